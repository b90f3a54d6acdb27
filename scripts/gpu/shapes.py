"""Checkpoints of random weights with the shapes of real models, their calibration data, and what is made of them.

`full` is the model as published, but for depth where a comment says so; `tower` lacks all decoder
blocks but one; `shallow` has three of full width after a short tower and a small vocabulary, which suffices for kernels and
answers; `tiny` is for a CPU. Weights are drawn
on the GPU. The norms get a log-normal gain per channel, so that AWQ has something to find. The tokenizer has one token per
byte; the rest of the vocabulary are names that no text contains.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu.part import Place
from gpu.steps import FREE

SPECIALS = ("<|im_start|>", "<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
            "<|video_pad|>")  # fmt: skip
START, PAD, END, VISION_START, VISION_END, IMAGE, VIDEO = range(256, 263)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = "What is in this picture?"


@dataclass(frozen=True)
class Shape:
    """A model's shape. `text` and `vision` are parts of its config; `patch`: pixels of a visual token's side."""

    family: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    patch: int


def _text(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
        "max_position_embeddings": 32768, "bos_token_id": START, "eos_token_id": END, "pad_token_id": PAD,
    }  # fmt: skip


FULL = {
    "qwen2.5-vl-7b": Shape(
        "qwen2_5_vl",
        _text(3584, 18944, 28, 28, 4, 152064) | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                                                                     "mrope_section": [16, 24, 24]}},
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
         "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "out_hidden_size": 3584},
        28,
    ),
    "qwen3-vl-8b": Shape(  # 12 of 36 blocks: its times are a third of the model's
        "qwen3_vl",
        _text(4096, 12288, 12, 32, 8, 151936) | {"head_dim": 128, "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}},
        {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
         "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24], "out_hidden_size": 4096},
        32,
    ),
}  # fmt: skip


def _tiny(shape: Shape) -> Shape:
    qwen3 = shape.family == "qwen3_vl"
    rope = dict(shape.text["rope_parameters"]) | {"mrope_section": [6, 5, 5] if qwen3 else [4, 6, 6]}
    text = _text(128, 256, 2, 4, 2, 384) | {"rope_parameters": rope, "max_position_embeddings": 2048}
    sizes = {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 128}
    vision_extra = {"deepstack_visual_indexes": [0], "num_position_embeddings": 256} if qwen3 else {
        "fullatt_block_indexes": [1], "window_size": 56}  # fmt: skip
    vision = {**shape.vision, **sizes, **vision_extra}
    return replace(shape, text=text | ({"head_dim": 32} if qwen3 else {}), vision=vision)


def _tower(shape: Shape) -> Shape:
    return replace(shape, text={**shape.text, "num_hidden_layers": 1, "vocab_size": 4096})


def _shallow(shape: Shape) -> Shape:
    marks = {name: [0, 2] for name in ("fullatt_block_indexes", "deepstack_visual_indexes") if name in shape.vision}
    text = {**shape.text, "num_hidden_layers": 3, "vocab_size": 4096}
    return replace(shape, text=text, vision={**shape.vision, "depth": 4, **marks})


def shape(place: Place, name: str, kind: str) -> Shape:
    """The shape of a name, `full`, `tower` or `shallow`; with tiny shapes that."""
    full = FULL[name]
    return _tiny(full) if place.tiny else {"full": full, "tower": _tower(full), "shallow": _shallow(full)}[kind]


def model(place: Place, name: str, kind: str, apart: bool = False) -> Path:
    """Return the folder of the unquantized checkpoint, which is created if missing.

    Args:
        apart: create it in another process, so that it does not count in this one's peak memory.
    """
    folder = place.work / f"{name}-{kind}" / "bf16"
    if kind == "full":  # of which only one is kept at a time, as disks are small where machines are lent
        for other in FULL.keys() - {name}:
            shutil.rmtree(place.work / f"{other}-full", ignore_errors=True)
    if apart and not (folder / "config.json").is_file():
        size = "tiny" if place.tiny else "full"
        subprocess.run([sys.executable, "-m", "gpu.shapes", str(place.work), size, name, kind], check=True)
    return _made(folder, lambda partial: _save(shape(place, name, kind), partial))


def vlm(place: Place, name: str, kind: str) -> Any:
    """The unquantized model in memory, on the GPU if there is one."""
    from vlmcompress import models

    built, processor = _built(shape(place, name, kind))
    spec = models.spec_for(built.config.to_dict())
    return models.VLM(built.eval().requires_grad_(False), processor, spec, place.work)


def quantized(place: Place, name: str, kind: str, scheme: str, options: Mapping[str, Any], label: str) -> Path:
    """Return the folder of a quantized checkpoint, which is created if missing."""
    source = model(place, name, kind)
    folder = source.with_name(label)
    if not (folder / "config.json").is_file():
        import vlmcompress

        vlmcompress.quantize(recipe(place, source, folder, scheme, options), overwrite=True)
    return folder


def recipe(
    place: Place, source: Path, out: Path, scheme: str, options: Mapping[str, Any], large: bool = False, **keys: Any
) -> Any:
    """A recipe, with the check's calibration data where it needs any: 16 small images, or 128 large ones."""
    import vlmcompress

    if scheme not in FREE or "kv_cache" in keys:
        data = calibration(place, large)
        keys["calibrate"] = {"data": str(data), "samples": data.read_text().count("\n")}
    return vlmcompress.Recipe.of(str(source), str(out), scheme=scheme, options=dict(options), **keys)


def reduced(full: Path, reduce: str) -> Path:
    """Return the folder of `full` with a reducer, the weights linked instead of copied."""
    from vlmcompress.reduction import block as reducer_block
    from vlmcompress.reduction.choice import parse_reducer

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        for file in full.iterdir():
            if file.is_file() and file.name != "config.json":
                os.link(file, folder / file.name)
        config = reducer_block.config_with_reducer(
            json.loads((full / "config.json").read_text()), parse_reducer(reduce)
        )
        (folder / "config.json").write_text(json.dumps(config, indent=2))

    return _made(full.with_name(f"{full.name}-{reduce.replace(':', '-').replace('/', '-')}"), make)


def calibration(place: Place, large: bool = False) -> Path:
    """Return the calibration data, created if missing: drawn pictures with a question and an answer.

    Args:
        large: 128 pictures of 1000 x 1000 pixels instead of 16 of 448 x 448.
    """
    count, size = (128, (1000, 1000)) if large else (16, (448, 448))
    if place.tiny:
        count, size = 16, (112, 112)

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        draw = functools.partial(_draw, folder, size)
        with multiprocessing.get_context("spawn").Pool(1 if place.tiny else os.cpu_count()) as pool:
            pool.map(draw, range(count))
        rows = [
            {"id": str(number), "image": f"{number}.png", "question": QUESTION, "answer": "Leaves."}
            for number in range(count)
        ]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return _made(place.work / f"calibration-{size[0]}", make, "data.jsonl") / "data.jsonl"


def _draw(folder: Path, size: tuple[int, int], number: int) -> None:
    from vlmcompress.evaluation.speed.prompts import dead_leaves

    dead_leaves(size, number).save(folder / f"{number}.png", compress_level=1)


def _made(folder: Path, make: Callable[[Path], None], mark: str = "config.json") -> Path:
    """Create a folder under a temporary name and rename it, unless it exists with its file `mark`."""
    if not (folder / mark).is_file():
        partial = folder.with_name(f".{folder.name}.partial")
        for stale in (partial, folder):
            shutil.rmtree(stale, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        make(partial)
        partial.rename(folder)
    return folder


def _save(shape: Shape, folder: Path) -> None:
    from vlmcompress import models

    built, processor = _built(shape)
    with models.quiet_transformers():
        built.save_pretrained(folder, max_shard_size="4GB")
        processor.save_pretrained(folder)


def _built(shape: Shape) -> tuple[Any, Any]:
    """A model with random weights, and its processor."""
    import torch
    from transformers import AutoModelForImageTextToText

    from vlmcompress import models

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with models.quiet_transformers():
        with torch.device(device):
            built = AutoModelForImageTextToText.from_config(config(shape), dtype=torch.bfloat16)
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                if "layernorm" in name and "visual" not in name:
                    parameter.copy_(torch.randn(parameter.shape, device=parameter.device).mul(0.7).exp())
        built.generation_config.eos_token_id, built.generation_config.pad_token_id = END, PAD
        return built, processor(shape)


def config(shape: Shape) -> Any:
    """transformers' config of a model of this shape."""
    from transformers import AutoConfig

    ids = {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END, "image_token_id": IMAGE,
           "video_token_id": VIDEO, "tie_word_embeddings": False}  # fmt: skip
    text = {**shape.text, "tie_word_embeddings": False}
    return AutoConfig.for_model(shape.family, text_config=text, vision_config=dict(shape.vision), **ids)


def processor(shape: Shape) -> Any:
    """The processor of a model of this shape, whose tokenizer has a token for each byte."""
    import transformers as T

    patch, least, most = shape.patch // 2, 4 * shape.patch**2, (36 if shape.text["vocab_size"] < 1000 else 1280)
    sizes = {"shortest_edge": least, "longest_edge": most * shape.patch**2}
    kinds = {"qwen2_5_vl": (T.Qwen2_5_VLProcessor, T.Qwen2VLVideoProcessor), "qwen3_vl": (  # type: ignore[attr-defined]
        T.Qwen3VLProcessor, T.Qwen3VLVideoProcessor)}  # fmt: skip
    kind, video = kinds[shape.family]
    return kind(
        image_processor=T.Qwen2VLImageProcessor(patch_size=patch, size=sizes),
        tokenizer=_tokenizer(shape.text["vocab_size"]),
        video_processor=video(patch_size=patch, size=sizes),
        chat_template=TEMPLATE,
    )


def _tokenizer(size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIALS]
    names = [*tokens, *(f"<unused{number}>" for number in range(len(tokens), size))]
    core = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=SPECIALS[0], eos_token=SPECIALS[2], pad_token=SPECIALS[1],
        extra_special_tokens=list(SPECIALS[3:]), model_max_length=32768,
    )  # fmt: skip


if __name__ == "__main__":
    where, size_given, *names = sys.argv[1:]
    model(Place(Path(where), size_given == "tiny"), names[0], names[1])
