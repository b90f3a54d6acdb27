"""Files of an unfinished recovery beside OUT: its settings, the teacher's answers, the state of its training loop."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import TypedDict

from vlmcompress.quantization.calibration.block_store import BlockStore
from vlmcompress.recipe import Recipe
from vlmcompress.utils import distributed, folders, identity, schema
from vlmcompress.utils.errors import UserError

PART = 16
"""Samples whose teacher's answers are in one file, which one worker writes."""
_Settings = TypedDict("_Settings", {"data": dict[str, Any]})


class RecoveryFiles(BlockStore):
    """A hidden folder beside OUT, with all that a run needs to go on. Of several workers the first one makes it: the others may
    use it once they have waited.

    Args:
        out: the folder that the run is to write.
        settings: what decides the run, by name, as JSON data.
        resume: keep what an earlier run with these settings left; otherwise start empty.

    Raises:
        UserError: an earlier run is to go on and had other settings.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any], resume: bool) -> None:
        folder = folders.beside(out, "recover")
        if distributed.is_main() and resume and (folder / "settings.json").is_file():
            _compare(
                schema.read(_Settings, folder / "settings.json", "leave out --resume to start anew")["data"], settings
            )
        text = json.dumps(settings, sort_keys=True)
        super().__init__(folder, hashlib.sha256(text.encode()).hexdigest(), resume)
        if distributed.is_main():
            self.note("settings", dict(settings))

    def answers(self) -> dict[str, str]:
        """Answers that the teacher wrote so far, by the id of a sample: those of all workers."""
        return {
            id: answer
            for path in sorted(self.folder.glob("answers-*.json"))
            for id, answer in self.noted(path.stem, dict[str, str]).items()
        }

    def note_answers(self, answers: Mapping[str, str]) -> None:
        """Write all answers that this worker has to its own file."""
        self.note(f"answers-{distributed.rank()}", dict(answers))

    def has_part(self, part: int) -> bool:
        """Whether the teacher's answers of a part of the samples are there."""
        return self._part(part).exists()

    def save_part(self, part: int, targets: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Write the teacher's targets (`teacher_cache.teacher_targets`) of some samples, by their numbers."""
        flat = {f"{index}/{key}": tensor.cpu() for index, tensors in targets.items() for key, tensor in tensors.items()}
        self.write(self._part(part), flat)

    def targets(self, index: int) -> dict[str, Tensor]:
        """Read the teacher's targets for one sample."""
        with self.opened(self._part(index // PART)) as file:
            names = [name for name in ("logs", "ids") if f"{index}/{name}" in file.keys()]  # noqa: SIM118
            return {name: file.get_tensor(f"{index}/{name}") for name in names}

    def save(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:  # type: ignore[override]
        """Write the state of the loop; it replaces the one before."""
        self.write(self.folder / "state.safetensors", tensors, {"facts": json.dumps(facts)})

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:  # type: ignore[override]
        """The state of the loop; None: there is none yet."""
        path = self.folder / "state.safetensors"
        if not path.exists():
            return None
        with self.opened(path) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, json.loads(file.metadata()["facts"])

    def _part(self, part: int) -> Path:
        return self.folder / f"teacher-{part:05d}.safetensors"


def model_facts(folder: Path) -> str:
    """What `settings` say of a model: its description, and the hash of all that its answers depend on."""
    return str(identity.source_identity(folder) | {"content_sha256": identity.model_hash(folder)})


def run_settings(recipe: Recipe, training: Any, particulars: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides a run, by names for messages: its training's fields, its seed, what is its own, and versions."""
    flags = {f"--{name}": ",".join(value) if name == "train" else value for name, value in asdict(training).items()}
    return {**flags, "--seed": recipe.seed, **particulars, "versions": str(identity.versions())}


def _compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings than those that a run began with."""
    for name, value in json.loads(json.dumps(now)).items():
        if before.get(name) != value:
            was, now_text = (
                json.dumps(setting) if not isinstance(setting, str) else setting
                for setting in (before.get(name), value)
            )
            raise UserError(
                f"--resume: the interrupted run had {name} {was}, this one has {now_text}; give the same, or leave out "
                "--resume to start anew"
            )
