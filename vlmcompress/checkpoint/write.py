"""Write the compressed checkpoint: the source folder with some tensors replaced.

Nothing goes through transformers' saving: tensors that do not change are copied as bytes, under the names they had, so
what an engine could read before it can read now; names that vLLM does not find are put right (`models.written_names`).
Every other file (tokenizer, processor, chat template, ...) is copied too. One layer is in memory at a time. Equal inputs
give byte-identical files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vlmcompress.checkpoint import card, launch_files, pieces, reducer_block
from vlmcompress.checkpoint.manifest import MANIFEST, hash_files
from vlmcompress.checkpoint.pieces import Piece, Quantized, write_json
from vlmcompress.common import folders, json_files
from vlmcompress.common.layer_names import Layers
from vlmcompress.common.progress import phase, phase_seconds
from vlmcompress.common.text import parse_size
from vlmcompress.exporters import Writer
from vlmcompress.models import CONFIG_FILES, found_draft, refuse_quantized, spec_for, stored_bytes, stored_tensors
from vlmcompress.recipe.reducer import ReducerChoice
from vlmcompress.reducers import TokenCounter

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
_WRITTEN = ("config.json", card.CARD, MANIFEST, *CONFIG_FILES)  # written anew, not copied


def write(
    source: Path,
    out: Path,
    *,
    quantized: Mapping[str, Quantized],
    names: Mapping[str, str],
    exporter: Writer,
    layers: Layers,
    manifest: dict,
    original: Path | None = None,
    written: Mapping[str, str] | None = None,
    changed: Mapping[str, Tensor] | None = None,
    kv_scales: Mapping[str, Tensor] | None = None,
    reducer: ReducerChoice | None = None,
    counter: TokenCounter | None = None,
    beside: Mapping[str, Mapping | bytes] | None = None,
    settings: Mapping[str, Any] | None = None,
    shard_size: str | int = "5GB",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Write `out` and return its manifest.

    Args:
        source: folder of the checkpoint whose tensors are written where nothing else is said.
        out: folder to write; it appears whole or not at all.
        quantized: linear layer (memory name) -> weight, scheme, input scale. Looked up twice, so it may be lazy.
        names: memory name of a parameter -> its name on disk, as `models.disk_names` gives it.
        exporter: the format that is written, a module of `vlmcompress.exporters`.
        layers: which layers are quantized, for the config block.
        manifest: what `manifest.build` returned; files and sizes are added here.
        original: folder of the checkpoint that the source was made of, whose other files are copied; None: the source.
        written: memory name of a parameter -> its name in `out`; None: `names`.
        changed: parameter (memory name) -> new value, for norms and biases that took a scale in.
        kv_scales: attention module (memory name) -> `[2]` scales of keys and values.
        reducer: the reducer of visual tokens that the checkpoint is to carry; None for none.
        counter: computes how many tokens an image keeps, for a reducer that must be told the number.
        beside: name of a further file, or of one that is to be other than in the source -> bytes, or what is written as JSON.
        settings: entries of config.json that are to be others than in the source.
        shard_size: largest weight file, such as `5GB`.
        overwrite: replace an existing `out` that we wrote, once the new one is whole.
        progress: called with bytes written and bytes in all.
    """
    folders.check(source, out, overwrite=overwrite, mark=MANIFEST)
    config = json_files.read(source / "config.json")
    refuse_quantized(source, config)
    spec = spec_for(config)
    entries = list(stored_tensors(source).values())
    plan = pieces.of_original(entries, quantized, names, written or names, changed or {}, kv_scales or {}, exporter)
    before = stored_bytes(original or source)
    config = found_draft(spec, spec.completed(config), [entry.name for entry in entries])
    config |= dict(settings or {})
    if reducer:
        config = reducer_block.write(config, reducer, counter)
    content = Content(plan, quantized, exporter, layers, config, manifest, before, beside or {})
    return write_folder(original or source, out, content, shard_size=shard_size, progress=progress)


@dataclass(frozen=True)
class Content:
    """What a checkpoint is made of, besides the files that are copied.

    Attributes:
        plan: the tensors, in order.
        quantized: linear layer -> weight, scheme, input scale.
        exporter: the format's module; layers: what its config block says.
        config: what config.json holds besides that block.
        manifest: the manifest without sizes and hashes.
        before: bytes of the original's tensors.
        beside: name of a further file, or of one that is to be other than in the source -> bytes, or what is written as JSON.
    """

    plan: list[Piece]
    quantized: Mapping[str, Quantized]
    exporter: Writer
    layers: Layers
    config: dict
    manifest: dict
    before: int
    beside: Mapping[str, Mapping | bytes] = field(default_factory=dict)


def write_folder(
    source: Path,
    out: Path,
    content: Content,
    *,
    shard_size: str | int,
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Write `out`, which `folders.check` has allowed, with copies of the other files of `source`; return its manifest."""
    limit, found = parse_size(shard_size, "shard_size"), _other_files(source)
    others = [(file, target) for file, target in found if str(target) not in content.beside]
    plan, exporter = content.plan, content.exporter
    needed = sum(piece.spec.nbytes for piece in plan)
    folders.check_space(out, needed + sum(file.stat().st_size for file, _ in others))
    with folders.new_folder(out) as tree:
        with phase("writing"):
            after = pieces.write_weights(tree, plan, limit, content.quantized, exporter, progress)
        configs = exporter.configs(content.layers)
        block = configs.pop("config.json", None)
        write_json(tree / "config.json", content.config | ({"quantization_config": block} if block else {}))
        for name, file_content in {**configs, **content.beside}.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(file_content, bytes):
                (tree / name).write_bytes(file_content)
            else:
                write_json(tree / name, dict(file_content))
        for file, target in others:
            (tree / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, tree / target)
        size = {"weights_before": content.before, "weights_after": after}
        complete = content.manifest | {"size": size, "tensors": len(plan), "timing": phase_seconds()}
        launch_files.write(tree, complete, out.name)
        (tree / card.CARD).write_text(card.render(complete, tree, out.name), encoding="utf-8")
        complete["files"] = hash_files(tree)
        write_json(tree / MANIFEST, complete)
    return complete


def _other_files(source: Path) -> Iterator[tuple[Path, Path]]:
    """List the files to copy, with their place in the output; the source's model card is kept under another name, and launch
    files that we wrote for the source are left out."""
    ours = (source / MANIFEST).is_file()
    for folder, subfolders, files in os.walk(source):
        if ours and Path(folder) == source:
            subfolders[:] = [name for name in subfolders if name != launch_files.FOLDER]
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(files):
            place = Path(folder, name).relative_to(source)
            if name.startswith(".") or name.endswith(WEIGHTS):
                continue
            if str(place) == card.CARD:
                yield Path(folder, name), Path(card.SOURCE_CARD)
            elif str(place) not in _WRITTEN:
                yield Path(folder, name), place
