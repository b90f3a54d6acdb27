"""The folder of statistics that `vlmcompress calibrate` writes and `quantize --stats` reads.

It holds a safetensors file per decoder block and `statistics.json`. A file has, for each group of linear layers that
read the same input, `GroupStats.state_dict` under `GROUP/`, and under `kv/ATTENTION` the ranges of keys and values, if
requested. The statistics have a *float prefix*: every block is observed after unquantized blocks, so they do not depend on the
scheme and serve all schemes. `statistics.json` describes them (`Facts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field
from safetensors import safe_open
from torch import Tensor
from typing_extensions import TypedDict

from vlmcompress.export import manifest
from vlmcompress.numerics.statistics.balance import Sensitivity
from vlmcompress.numerics.statistics.gradients import Gradients, sensitivities
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization.calibration.block_store import block_name
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.choice import reducer_of_setting as read_reducer
from vlmcompress.reduction.resize import Resize
from vlmcompress.utils import identity, schema
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import foreign_errors
from vlmcompress.utils.schema import Amount, Count, Number, Place
from vlmcompress.utils.work_folder import RUN, WorkFolder

NAME = "statistics.json"
SCHEMA_VERSION = 2
PROCESSOR_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


_ByModality = TypedDict("_ByModality", {"text": Amount, "vision": Amount, "answer": Amount})
_Tokens = TypedDict("_Tokens", {"text": Count, "vision": Count, "answer": Count})
_Rotation = TypedDict("_Rotation", {"kind": str, "seed": int})


_Bits = list[Number | None]
_Entropy = TypedDict("_Entropy", {"luq": _Bits, "qvlm": _Bits})


class _Model(manifest.Original):
    weights_sha256: str


class _Data(manifest.CalibrationData):
    tokens: _Tokens  # type: ignore[misc]  # where a manifest may lack them
    sha256: str  # type: ignore[misc]
    reduce: NotRequired[dict[str, Any] | None]  # the reducer in front of the blocks
    resize: NotRequired[Resize | None]
    skipped: NotRequired[dict[str, str]]


class _Settings(TypedDict):
    samples: Count
    max_length: Count | None
    seed: int
    all_experts: NotRequired[bool]


class _Gradient(TypedDict):
    channels: Count
    absolute: _ByModality
    square: _ByModality


class _Gradients(TypedDict):
    loss: Number
    samples: Annotated[Count, Field(gt=0)]
    blocks: list[dict[str, _Gradient]]


class Facts(TypedDict):
    """The JSON object of `statistics.json`; only keys that are read back have precise types."""

    schema_version: int
    created_by: dict[str, str]  # versions of vlmcompress and of the packages that shape the result
    model: _Model
    processor: dict[str, str]  # file of the tokenizer or processor -> sha256
    calibration: _Data
    run: NotRequired[str | None]  # fingerprint of the run, also in the metadata of each block's file
    settings: _Settings  # as given
    rotate: NotRequired[_Rotation | None]  # rotation of the model when it was observed
    adapter: NotRequired[str | None]  # SHA-256 of the weights of the adapter that was merged into the model
    needs: list[str]  # what was collected
    kv_cache: bool
    blocks: list[dict[str, Annotated[list[str], Field(min_length=1)]]]  # for each block, group -> its linear layers
    entropy: NotRequired[_Entropy]  # measure (`calibration.entropy`) -> bits of each block's input
    gradients: NotRequired[_Gradients]  # of the answers' loss, see `statistics.gradients`
    timing: NotRequired[dict[str, Number]]  # phase of the run -> seconds
    files: dict[Place, manifest.File]  # every other file


def save_statistics(
    work: WorkFolder, layer: int, stats: Mapping[str, GroupStats], kv_ranges: Mapping[str, Tensor]
) -> None:
    """Save a block's statistics by group, and its ranges of keys and values by attention module."""
    tensors = {f"{group}/{key}": t for group, state in stats.items() for key, t in state.state_dict().items()}
    work.write(block_name(layer), tensors | {f"kv/{name}": ranges for name, ranges in kv_ranges.items()})


@dataclass(frozen=True)
class Statistics:
    """A folder of statistics for reading; see `read_statistics`."""

    folder: Path
    facts: dict[str, Any]

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the description, which holds the hashes of all other files."""
        return identity.sha256(self.folder / NAME)

    @property
    def origin(self) -> dict[str, Any]:
        """The description of the calibration data for a checkpoint's manifest."""
        return {**self.facts["calibration"], "statistics_sha256": self.sha256}

    @cached_property
    def gradients(self) -> Gradients | None:
        """Gradients of the answers' loss; None: they were not collected."""
        stored = self.facts.get("gradients")
        return None if stored is None else Gradients.from_dict(stored)

    @cached_property
    def sensitivities(self) -> dict[tuple[int, str], Sensitivity]:
        """Sensitivities by block and group; empty without gradients."""
        if not self.gradients:
            return {}
        return sensitivities(self.gradients, self.facts["blocks"][: len(self.gradients.blocks)])  # the head has none

    def load(self, layer: int, device: str = "cpu") -> tuple[dict[str, GroupStats], dict[str, Tensor]]:
        """Read a block's statistics by group, on `device`, and its ranges of keys and values by attention module.

        Raises:
            UserError: the folder has been replaced since it was read, or is damaged.
        """
        states: dict[str, dict[str, Tensor]] = {}
        path = self.folder / f"{block_name(layer)}.safetensors"
        with foreign_errors(f"{path} is damaged", "; calibrate again"), safe_open(path, "pt", device) as file:
            if self.facts.get(RUN) not in (None, (file.metadata() or {}).get(RUN)):
                raise UserError(f"{path} is of other statistics than {NAME} was: they were replaced; run again")
            for name in file.keys():  # noqa: SIM118
                group, _, key = name.partition("/")
                states.setdefault(group, {})[key] = file.get_tensor(name)
            kv_ranges = states.pop("kv", {})
            stats = {group: GroupStats.from_state_dict(states.pop(group)) for group in list(states)}
        for group, group_stats in stats.items():
            group_stats.sensitivity = self.sensitivities.get((layer, group))
        return stats, kv_ranges

    def other_model(self, model: Path) -> list[str]:
        """Reasons why the statistics belong to another model, from descriptions alone; empty if none is found."""
        was, now = self.facts["model"], identity.source_identity(model)
        for key, what in (("config_sha256", "config"), ("headers_sha256", "shapes of weights")):
            if was[key] != now[key]:
                return [self.differs(what, was["source"], was[key], model, now[key])]
        files, hashes = self.facts["processor"], processor_identity(model)
        for name in sorted(files.keys() | hashes.keys()):
            if files.get(name) != hashes.get(name):
                return [self.differs(name, was["source"], files.get(name), model, hashes.get(name))]
        return []

    def differs(self, what: str, source: str, was: str | None, model: Path, now: str | None) -> str:
        """The message that part of the statistics' model has another hash than that part of `model`."""
        return (
            f"statistics {self.folder} are of another model: sha256 of {what} is {short(was)} for '{source}' and "
            f"{short(now)} for {model}; calibrate {model}"
        )

    @property
    def rotation(self) -> dict[str, Any] | None:
        """The rotation of the model when it was observed, in the form of `Recipe.rotation`; None for none."""
        rotation: dict[str, Any] | None = self.facts.get("rotate")
        return rotation

    @property
    def reducer(self) -> ReducerChoice | None:
        """The reducer that the statistics were collected after; None for none."""
        stored = self.facts["calibration"].get("reduce")
        return read_reducer(stored, f"{self.folder / NAME}: reduce") if stored else None

    @property
    def resize(self) -> Resize | None:
        """How images were resized for these statistics; None: they were not."""
        stored = self.facts["calibration"].get("resize")
        return None if stored is None else Resize(**stored)


def read_statistics(folder: Path) -> Statistics:
    """Read the description of the statistics in a folder and check that its files exist, without hashing them.

    Raises:
        UserError: the folder has no statistics, they are incomplete, or a later version of vlmcompress wrote them.
    """
    path = folder / NAME
    if not path.is_file():
        raise UserError(f"{folder} has no {NAME}; give a folder written by `vlmcompress calibrate`")
    facts: dict[str, Any] = schema.read_typed(Facts, path, "calibrate again", version=SCHEMA_VERSION)
    blocks, gradients = facts["blocks"], facts["gradients"]["blocks"] if "gradients" in facts else []
    linears = [{name for names in groups.values() for name in names} for groups in blocks]
    whole = len(gradients) <= len(blocks) and ("gradients" in facts or "gradient" not in facts["needs"])
    if not whole or any(names - block.keys() for block, names in zip(gradients, linears, strict=False)):
        raise UserError(f"{path} has no gradients of some layers; calibrate again")
    for name, recorded in facts["files"].items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != recorded["size"]:
            raise UserError(f"{folder / name} is missing or of another size than recorded; calibrate again")
    return Statistics(folder, facts)


def processor_identity(model: Path) -> dict[str, str]:
    """Hash the files of a model's tokenizer and processor: name -> sha256."""
    return {name: identity.sha256(model / name) for name in PROCESSOR_FILES if (model / name).is_file()}


def short(digest: str | None) -> str:
    """The first characters of a hash, for messages."""
    return digest[:12] if digest else "(none)"
