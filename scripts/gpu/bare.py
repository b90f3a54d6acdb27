"""What a machine with a GPU, torch and transformers shows, without vLLM: the parts of the tier `bare`.

    equal      quantizers, statistics and reducers against a CPU    kernels           Triton's kernels against torch
    layers     a block's layers by every scheme                     next_to_encoder   reducers' own time
    prefill    prefill after reducers                               training          gradients, scorers, rotation, ranges
    suite      the test suite, as far as it can run there           whole             models from loading to the folder

Before them: measuring, inputs like those of trained models, and checkpoints. All of it runs on a CPU with tiny shapes, too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import torch
from torch import Tensor

from gpu.check import ROOT, SCHEMES, SHAPES, Failed, Place, last_lines

QWEN = SHAPES[0]


# --- Seconds and peak memory, of the GPU or of the CPU without one. What is timed has run once before. ---


def device() -> torch.device:
    """The GPU, or the CPU without one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def once(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, and what it returns."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    result = call()
    wait()
    return time.perf_counter() - start, result


def milliseconds(call: Callable[[], Any]) -> float:
    """Median milliseconds of three calls, after an unmeasured one."""
    call()
    return 1000 * median(once(call)[0] for _ in range(3))


def forget_peaks() -> None:
    """Reset the measurement of the GPU's peak memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks() -> dict[str, float | None]:
    """Peak memory of this process: of the GPU, allocated and reserved, and of the host, mapped files included; in GB."""
    cuda = torch.cuda.is_available()
    return {
        "gpu_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if cuda else None,
        "gpu_reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2) if cuda else None,
        "host_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
    }


Rows = dict[str, dict[str, Any]]


def each(names: Iterable[str], row: Callable[[str], dict[str, Any]]) -> Rows:
    """A row per name, with the error if it raises."""
    rows: Rows = {}
    for name in names:
        try:
            rows[name] = row(name)
        except Exception as error:
            rows[name] = {"wrong": last_lines(f"{type(error).__name__}: {error}", 1)[0]}
    return rows


def checked(rows: Rows, result: dict[str, Any]) -> dict[str, Any]:
    """The result; raises `Failed` with it if a row has a problem."""
    if wrong := [f"{name}: {row['wrong']}" for name, row in rows.items() if "wrong" in row]:
        raise Failed("\n".join(wrong), result)
    return result


# --- Inputs, weights and signals as trained models have them. White noise would flatter every scheme and every reducer: its
# Gram matrix is the identity, and no token stands for another. Here the singular values of inputs and weights fall as
# `1 / (1 + i)^0.7` onto a floor of noise, channels have log-normal gains, and one channel in 512 is 20 times larger (as found
# in LLM.int8(), arXiv 2208.07339). ---

RANK, FALL, FLOOR, OUTLIERS = 512, 0.7, 0.05, 512
SHARES = {1: 0.15, 2: 0.75, 3: 0.1}  # of text, vision and answer among the tokens
HEADS, LAYERS = 16, 8  # of the pretended encoder


def spectrum(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    """A random matrix `[rows, columns]` of unit mean square whose singular values decay onto a floor."""
    place: dict[str, Any] = {"device": draw.device, "generator": draw}
    rank = min(RANK, rows, columns)
    sizes = (1 + torch.arange(rank, device=draw.device)) ** -FALL
    sizes /= sizes.norm()
    x = (torch.randn(rows, rank, **place) * sizes) @ torch.randn(rank, columns, **place)
    return x.add_(torch.randn(rows, columns, **place), alpha=FLOOR)


def drawn_inputs(width: int, tokens: int, where: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs `[tokens, width]` of linear layers in bfloat16, and the modality `[tokens]` of each on the CPU."""
    draw = torch.Generator(where).manual_seed(0)
    counts = torch.tensor([round(share * tokens) for share in SHARES.values()])
    mask = torch.repeat_interleave(torch.tensor([*SHARES]), counts)[:tokens]
    mask = torch.cat([mask, mask.new_ones(tokens - len(mask))])
    x = spectrum(tokens, width, draw)
    x += torch.randn(4, width, device=where, generator=draw)[mask.to(where)] * 0.3  # each modality has its own mean
    gains = torch.randn(width, device=where, generator=draw).mul_(0.5).exp_()
    gains[torch.randperm(width, device=where, generator=draw)[: max(2, width // OUTLIERS)]] *= 20
    return (x * gains).bfloat16(), mask


def drawn_weight(rows: int, width: int, where: torch.device) -> Tensor:
    """A weight `[rows, width]` in bfloat16 whose rows differ in size."""
    draw = torch.Generator(where).manual_seed(10_000 + rows)
    sizes = torch.randn(rows, 1, device=where, generator=draw).mul_(0.3).exp_()
    return (spectrum(rows, width, draw) * sizes * width**-0.5).bfloat16()


def statistics_of(x: Tensor, mask: Tensor) -> Any:
    """All statistics of inputs on the device that they are on, with a sensitivity, as a gradient pass would give one."""
    from vlmcompress.numerics.statistics.balance import Sensitivity
    from vlmcompress.numerics.statistics.collect import Collector
    from vlmcompress.numerics.statistics.inputs import SAMPLE, STATISTICS
    from vlmcompress.numerics.statistics.tokens import splits

    (split,) = splits([mask[None]], [[0]], SAMPLE)
    collector = Collector(x.shape[1], STATISTICS)
    collector.add(x, split.to(x.device))
    stats = collector.finish()
    stats.sensitivity = Sensitivity(rho=0.5)
    return stats


def reducer_of(name: str, width: int) -> Any:
    """A reducer that keeps half of the tokens and runs on signals alone."""
    from vlmcompress.reduction.methods import REGISTRY, learned

    default = REGISTRY.get(name)
    network = learned.Network(learned.initial(torch.zeros(width), torch.ones(width), hidden=64, seed=0))
    options = {"keep": 0.5, "thresholds": (0.6,) * LAYERS, "network": network, "level": 0.6}
    fields = {field.name for field in dataclasses.fields(default)}
    return replace(default, **{key: value for key, value in options.items() if key in fields})


def drawn_signals(grid: tuple[int, int, int], width: int, where: torch.device, seed: int = 0) -> Any:
    """Signals of an image that has something for every reducer: tokens `[n, width]` in which neighbours are alike."""
    from vlmcompress.reduction.methods import Signals

    draw, n, head = torch.Generator(where).manual_seed(seed), math.prod(grid), max(4, min(80, width // HEADS))

    def rows(count: int, columns: int) -> Tensor:
        x = spectrum(count, columns, draw)
        return (x + 0.7 * x.roll(1, 0) + 0.7 * x.roll(grid[2], 0)).bfloat16()

    def spread() -> Tensor:
        return torch.randn(n, device=where, generator=draw).exp()

    return Signals(
        grid=grid,
        features=rows(n, width),
        keys=rows(n, HEADS * head),
        heads=HEADS,
        saliency=spread(),
        windowed=spread(),
        query=rows(12, width),
        query_keys=rows(12, HEADS * head),
    )


def reduction(reducer: Any, image: Any) -> Any:
    """The reduction of an image by a method; by one that merges in the encoder's layers, in `LAYERS` of these."""
    from vlmcompress.reduction import methods

    if not reducer.MERGES:
        return methods.reduce(reducer, image)
    merged = methods.Reduction.identity(image.n, image.device)
    for layer in range(LAYERS):
        left = {name: merged.apply(getattr(image, name)) for name in ("features", "keys", "saliency", "windowed")}
        merged = merged.then(methods.merge_layer(reducer, replace(image, merged=merged, **left), layer, LAYERS))
    return merged


# --- Checkpoints of random weights with the shapes of real models, and their calibration data. `full` is the model as
# published, but for depth where a comment says so; `tower` lacks all decoder blocks but one; `shallow` has three of full width
# after a short tower and a small vocabulary, which suffices for kernels and answers; tiny shapes are for a CPU. Weights are
# drawn on the GPU. The norms get a log-normal gain per channel, so that AWQ has something to find. The tokenizer has one token
# per byte; the rest of the vocabulary are names that no text contains. ---

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
UNCALIBRATED = ("fp8", "w8a16", "rtn")  # schemes that need no calibration data, and get none


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


def shape_of(place: Place, name: str, kind: str) -> Shape:
    """The shape of a name, `full`, `tower` or `shallow`; with tiny shapes that."""
    shape = FULL[name]
    if place.tiny:
        qwen3 = shape.family == "qwen3_vl"
        rope = dict(shape.text["rope_parameters"]) | {"mrope_section": [6, 5, 5] if qwen3 else [4, 6, 6]}
        text = _text(128, 256, 2, 4, 2, 384) | {"rope_parameters": rope, "max_position_embeddings": 2048}
        sizes: dict[str, Any] = {
            "depth": 2,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "out_hidden_size": 128,
        }
        sizes |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 256} if qwen3 else {
            "fullatt_block_indexes": [1], "window_size": 56}  # fmt: skip
        return replace(shape, text=text | ({"head_dim": 32} if qwen3 else {}), vision={**shape.vision, **sizes})
    if kind == "tower":
        return replace(shape, text={**shape.text, "num_hidden_layers": 1, "vocab_size": 4096})
    if kind == "shallow":
        marks = {name: [0, 2] for name in ("fullatt_block_indexes", "deepstack_visual_indexes") if name in shape.vision}
        text = {**shape.text, "num_hidden_layers": 3, "vocab_size": 4096}
        return replace(shape, text=text, vision={**shape.vision, "depth": 4, **marks})
    return shape


def built(shape: Shape) -> tuple[Any, Any]:
    """A model with random weights, and its processor."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from vlmcompress import models

    ids = {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END, "image_token_id": IMAGE,
           "video_token_id": VIDEO, "tie_word_embeddings": False}  # fmt: skip
    text = {**shape.text, "tie_word_embeddings": False}
    config = AutoConfig.for_model(shape.family, text_config=text, vision_config=dict(shape.vision), **ids)
    torch.manual_seed(0)
    with models.quiet_transformers():
        with device():
            model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "layernorm" in name and "visual" not in name:
                    parameter.copy_(torch.randn(parameter.shape, device=parameter.device).mul(0.7).exp())
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = END, PAD
        return model, processor(shape)


def processor(shape: Shape) -> Any:
    """The processor of a model of this shape, whose tokenizer has a token for each byte."""
    import transformers as T
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = shape.text["vocab_size"]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIALS]
    names = [*tokens, *(f"<unused{number}>" for number in range(len(tokens), vocabulary))]
    core = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIALS))
    tokenizer = T.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=SPECIALS[0], eos_token=SPECIALS[2], pad_token=SPECIALS[1],
        extra_special_tokens=list(SPECIALS[3:]), model_max_length=32768,
    )  # fmt: skip
    kinds = {"qwen2_5_vl": (T.Qwen2_5_VLProcessor, T.Qwen2VLVideoProcessor), "qwen3_vl": (  # type: ignore[attr-defined]
        T.Qwen3VLProcessor, T.Qwen3VLVideoProcessor)}  # fmt: skip
    kind, video = kinds[shape.family]
    most = 36 if vocabulary < 1000 else 1280  # visual tokens
    sizes = {"shortest_edge": 4 * shape.patch**2, "longest_edge": most * shape.patch**2}
    return kind(
        image_processor=T.Qwen2VLImageProcessor(patch_size=shape.patch // 2, size=sizes),
        tokenizer=tokenizer,
        video_processor=video(patch_size=shape.patch // 2, size=sizes),
        chat_template=TEMPLATE,
    )


def finished(folder: Path, make: Callable[[Path], None], mark: str = "config.json") -> Path:
    """A folder, which is created under a temporary name and renamed, unless it exists with its file `mark`."""
    if not (folder / mark).is_file():
        partial = folder.with_name(f".{folder.name}.partial")
        for stale in (partial, folder):
            shutil.rmtree(stale, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        make(partial)
        partial.rename(folder)
    return folder


def model(place: Place, name: str, kind: str, apart: bool = False) -> Path:
    """The folder of the unquantized checkpoint, which is created if missing.

    Args:
        apart: create it in another process, so that it does not count in this one's peak memory.
    """
    folder = place.work / f"{name}-{kind}" / "bf16"
    if kind == "full":  # of which only one is kept at a time, as disks are small where machines are lent
        for other in FULL.keys() - {name}:
            shutil.rmtree(place.work / f"{other}-full", ignore_errors=True)
    if apart and not (folder / "config.json").is_file():
        process = multiprocessing.get_context("spawn").Process(target=model, args=(place, name, kind))
        process.start()
        process.join()

    def save(partial: Path) -> None:
        from vlmcompress import models

        made, reads = built(shape_of(place, name, kind))
        with models.quiet_transformers():
            made.save_pretrained(partial, max_shard_size="4GB")
            reads.save_pretrained(partial)

    return finished(folder, save)


def vlm_of(place: Place, name: str, kind: str) -> Any:
    """The unquantized model in memory, on the GPU if there is one."""
    from vlmcompress import models

    made, reads = built(shape_of(place, name, kind))
    spec = models.spec_for(made.config.to_dict())
    return models.VLM(made.eval().requires_grad_(False), reads, spec, place.work)


def calibration(place: Place, large: bool = False) -> Path:
    """The calibration data, created if missing: drawn pictures with a question and an answer.

    Args:
        large: 128 pictures of 1000 x 1000 pixels, some 1,250 tokens each, instead of 16 of 448 x 448.
    """
    count, size = (128, (1000, 1000)) if large else (16, (448, 448))
    if place.tiny:
        count, size = 16, (112, 112)

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        draw = functools.partial(_draw, folder, size)
        with multiprocessing.get_context("spawn").Pool(1 if place.tiny else os.cpu_count()) as pool:
            pool.map(draw, range(count))
        rows = [{"id": str(n), "image": f"{n}.png", "question": QUESTION, "answer": "Leaves."} for n in range(count)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return finished(place.work / f"calibration-{size[0]}", make, "data.jsonl") / "data.jsonl"


def _draw(folder: Path, size: tuple[int, int], number: int) -> None:
    from vlmcompress.evaluation.speed.prompts import dead_leaves

    dead_leaves(size, number).save(folder / f"{number}.png", compress_level=1)


def recipe_for(
    place: Place, source: Path, out: Path, scheme: str, options: Mapping[str, Any], large: bool = False, **keys: Any
) -> Any:
    """A recipe, with the check's calibration data where it needs any."""
    import vlmcompress

    if scheme not in UNCALIBRATED or "kv_cache" in keys:
        data = calibration(place, large)
        keys["calibrate"] = {"data": str(data), "samples": data.read_text().count("\n")}
    return vlmcompress.Recipe.of(str(source), str(out), scheme=scheme, options=dict(options), **keys)


# --- The parts ---


def equal(place: Place, what: str) -> dict[str, Any]:
    """Compare all `quantizers`, `statistics` or `reducers` of the GPU with those of a CPU, on equal inputs.

    Sums differ in their order, so that a code may fall on the other side of a boundary and a token that is as good as another
    may take its place. So codes are held against the CPU's by the error that they make, which is what counts: within 2%.
    Statistics are to be as close to those in float64 as the CPU's are, and reducers are to keep 95% of the CPU's tokens.
    Raises `Failed` if some differ by more.
    """
    rows = {"quantizers": _equal_quantizers, "statistics": _equal_statistics, "reducers": _equal_reducers}[what](place)
    return checked(rows, rows)


def _equal_quantizers(place: Place) -> Rows:
    """Each scheme on a group of two layers: equal codes, the errors of their outputs, and the smoothing scales."""
    from vlmcompress.quantization.schemes import REGISTRY, smooth, solve

    width = 256 if place.tiny else 1024
    x, mask = drawn_inputs(width, 4 * width, torch.device("cpu"))
    weights = [drawn_weight(rows, width, x.device) for rows in (width // 2, width // 4)]
    stats = {side: statistics_of(x.to(where), mask) for side, where in (("cpu", x.device), ("gpu", device()))}

    def row(name: str) -> dict[str, Any]:
        method = REGISTRY.get(name)
        options = method.OPTIONS()
        scales: dict[str, Tensor | None] = {}
        quantized, errors = {}, {}
        for side, side_stats in stats.items():
            group = [weight.to(device() if side == "gpu" else x.device) for weight in weights]
            smoothing = smooth(method, group, side_stats, options)
            scales[side] = smoothing.scale
            if smoothing.scale is not None:
                group, side_stats = [w.float() * smoothing.scale for w in group], side_stats.rescaled(smoothing.scale)
            solution = solve(method, group, side_stats, options, torch.bfloat16, smoothing.factorization)
            quantized[side] = solution.weights
            errors[side] = [
                _output_error(x, q.dequantize(torch.float32).cpu(), weight, scales[side])
                for q, weight in zip(solution.weights, weights, strict=True)
            ]
        pairs = zip(quantized["cpu"], quantized["gpu"], strict=True)
        codes = [round((cpu.q.float() == gpu.q.cpu().float()).double().mean().item(), 5) for cpu, gpu in pairs]
        figures: dict[str, Any] = {"codes": codes, "error_cpu": errors["cpu"], "error_gpu": errors["gpu"]}
        if scales["cpu"] is not None and scales["gpu"] is not None:
            figures["scales_apart"] = _apart(scales["gpu"].cpu(), scales["cpu"])
        ratios = [gpu / cpu for cpu, gpu in zip(errors["cpu"], errors["gpu"], strict=True)]
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))
        return figures | ({} if abs(worst - 1) <= 0.02 else {"wrong": f"its error is {worst:.4f} times the CPU's"})

    return each(_quantizers(), row)


def _quantizers() -> list[str]:
    """Names of the schemes that round weights."""
    from vlmcompress.quantization.schemes import REGISTRY

    return [name for name in REGISTRY.names() if (m := REGISTRY.get(name)).scheme(m.OPTIONS()) is not None]


def _output_error(x: Tensor, quantized: Tensor, weight: Tensor, scale: Tensor | None) -> float:
    """Relative squared error of a layer's output, in float64 from the inputs themselves."""
    change = quantized.double() / (1 if scale is None else scale.cpu().double()) - weight.double()
    return float((x.double() @ change.T).square().sum() / (x.double() @ weight.double().T).square().sum())


def _equal_statistics(place: Place) -> Rows:
    """Each statistic, relative to the same in float64: from the GPU, and from the CPU."""
    from vlmcompress.numerics.rotation import Rotation
    from vlmcompress.numerics.statistics import kv_range
    from vlmcompress.numerics.statistics.inputs import quadratic

    width = 128 if place.tiny else 2048
    x, mask = drawn_inputs(width, 3 * width, torch.device("cpu"))
    weight, wide = drawn_weight(width, width, x.device).float(), x.double()
    heads = x.view(1, len(x), 4, width // 4).transpose(1, 2)  # [1, heads, tokens, channels]

    vision = wide[mask == 2]
    oracle = {
        "gram": vision.T @ vision,
        "absmean": wide.abs().mean(0),
        "absmax": wide.abs().amax(0),
        "error": (wide @ weight.double().T).square().sum().sqrt(),
        "kv_ranges": torch.stack([wide[mask == code].abs().amax() for code in SHARES]),
        "rotation": wide @ Rotation("hadamard", width, 0).matrix(),
    }

    def computed(where: torch.device) -> dict[str, Tensor]:
        stats, ranges = statistics_of(x.to(where), mask), kv_range.KVRange()
        ranges.update(0, heads.to(where), mask[None])
        return {
            "gram": stats.gram({"vision": 1.0}),
            "absmean": stats.absmean(),
            "absmax": stats.absmax(),
            "error": quadratic(weight.to(where), stats.gram()).sum().sqrt(),
            "kv_ranges": ranges.ranges[0, :, 0],
            "rotation": Rotation("hadamard", width, 0).rows(x.to(where).float()),
        }

    values = {"cpu": computed(x.device), "gpu": computed(device())}

    def row(name: str) -> dict[str, Any]:
        errors = {side: _apart(by_name[name].cpu(), oracle[name]) for side, by_name in values.items()}
        limit = max(1e-5, 4 * errors["cpu"])
        return errors | ({} if errors["gpu"] <= limit else {"wrong": f"{errors['gpu']:.2g} apart, over {limit:.2g}"})

    return each(oracle, row)


def _equal_reducers(place: Place) -> Rows:
    """Each reducer on the signals of an image: the share of the CPU's tokens that the GPU keeps as well."""
    from vlmcompress.reduction.methods import REGISTRY

    grid, width = ((1, 8, 8), 64) if place.tiny else ((1, 32, 40), 3584)
    on_cpu = drawn_signals(grid, width, torch.device("cpu"))
    values = {field.name: getattr(on_cpu, field.name) for field in dataclasses.fields(on_cpu)}
    on_gpu = replace(on_cpu, **{name: v.to(device()) for name, v in values.items() if isinstance(v, Tensor)})

    def row(name: str) -> dict[str, Any]:
        reducer = reducer_of(name, width)
        cpu, gpu = (reduction(reducer, image).anchor.cpu() for image in (on_cpu, on_gpu))
        share = torch.isin(cpu, gpu).sum().item() / max(len(cpu), len(gpu))
        figures = {"kept": len(cpu), "equal": round(share, 4)}
        return figures | ({} if share >= 0.95 else {"wrong": f"{share:.0%} of the CPU's tokens are kept"})

    return each(REGISTRY.names(), row)


def _apart(value: Tensor, oracle: Tensor) -> float:
    """Relative difference of two tensors, by their norms."""
    return float((value.double() - oracle.double()).norm() / oracle.double().norm().clamp_min(1e-30))


def kernels(place: Place) -> dict[str, Any]:
    """Compare the quantizers' Triton kernels with the torch functions whose place they take: equal codes, and seconds.

    A scheme solves two layers that read one input, with the kernels and without (`VLMCOMPRESS_TRITON=0`). A value on a boundary
    may fall on its other side, from where its row goes on differently, so the codes are held against each other by the error
    that they make: within a thousandth. Without a GPU the kernels run in Triton's interpreter, where their seconds say nothing.
    Raises `Failed` if errors differ, or the codes of more than a tenth of the rows do.
    """
    if device().type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from vlmcompress.quantization.schemes import REGISTRY, _fused, smooth, solve

    width, sides = (128, (20, 12)) if place.tiny else (3584, (3584, 512))
    x, mask = drawn_inputs(width, 4 * width, device())
    weights = [drawn_weight(count, width, device()) for count in sides]
    stats = statistics_of(x, mask)
    schemes: dict[str, tuple[str, dict[str, Any]]] = {
        "gptq": ("gptq", {}), "gptq, zero points": ("gptq", {"symmetric": False}), "gptq-plus": ("gptq-plus", {}),
        "nvfp4": ("nvfp4", {}),
    }  # fmt: skip

    def row(name: str) -> dict[str, Any]:
        scheme, chosen = schemes[name]
        method = REGISTRY.get(scheme)
        options = method.OPTIONS(**chosen)
        group, group_stats = weights, stats
        if (scale := smooth(method, weights, stats, options).scale) is not None:
            group, group_stats = [w.float() * scale for w in weights], stats.rescaled(scale)
        seconds, codes, errors = {}, {}, {}
        for kind, switch in (("torch", "0"), ("triton", "1")):
            os.environ[_fused.SWITCH] = switch
            _fused.kernels.cache_clear()
            call = partial(solve, method, group, group_stats, options, torch.bfloat16)
            call()  # compiled
            seconds[kind], solution = once(call)
            quantized = solution.weights[0]
            assert (_fused.kernels(device(), quantized.format) is None) == (kind == "torch")
            codes[kind] = quantized.q.float()
            errors[kind] = _output_error(x.cpu(), quantized.dequantize(torch.float32).cpu(), weights[0].cpu(), scale)
        alike = float((codes["torch"] == codes["triton"]).all(1).double().mean())
        ratio = errors["triton"] / errors["torch"]
        figures: dict[str, Any] = {
            "seconds": {kind: round(value, 4) for kind, value in seconds.items()},
            "rows_alike": round(alike, 4),
        }
        if abs(ratio - 1) > 1e-3 or alike < 0.9:
            figures["wrong"] = f"{alike:.0%} of the rows are alike, the error is {ratio:.4f} times torch's"
        return figures

    rows = each(schemes, row)
    return checked(rows, rows)


def layers(place: Place, shape: str) -> dict[str, Any]:
    """The linear layers of one decoder block by every scheme: seconds by phase, and peak memory.

    Phases are the smoothing scale, the solving, and the packing for the written file; `model_seconds` is their sum and that of
    the statistics times the number of blocks. Raises `Failed`, with the figures of the others, if one does not run.
    """
    from vlmcompress.export.formats.compressed_tensors import FORMAT
    from vlmcompress.quantization.schemes import REGISTRY, smooth, solve

    text = shape_of(place, shape, "full").text
    hidden, inner, blocks = text["hidden_size"], text["intermediate_size"], text["num_hidden_layers"]
    head = text.get("head_dim", hidden // text["num_attention_heads"])
    queries, keys = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    groups = {"qkv": (hidden, [queries, keys, keys]), "o": (queries, [hidden]), "gate_up": (hidden, [inner, inner]),
              "down": (inner, [hidden])}  # fmt: skip
    tokens, seconds, stats = 256 if place.tiny else 16384, 0.0, {}
    for name, (width, _) in groups.items():
        x, mask = drawn_inputs(width, tokens, device())
        statistics_of(x, mask)  # the first call also loads libraries
        taken, stats[name] = once(partial(statistics_of, x, mask))
        seconds += taken
        del x, mask
    weights = {name: [drawn_weight(rows, width, device()) for rows in sides] for name, (width, sides) in groups.items()}
    methods: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in _quantizers()} | SCHEMES

    def row(name: str) -> dict[str, Any]:
        method = REGISTRY.get(methods[name][0])
        options = method.OPTIONS(**methods[name][1])
        scheme, total, errors = method.scheme(options), dict.fromkeys(("smooth", "solve", "pack"), 0.0), []
        small = [weights["qkv"][0][:256]]  # the first call of all, which is not measured
        smooth(method, small, stats["qkv"], options)
        tried = solve(method, small, stats["qkv"], options, torch.bfloat16)
        FORMAT.tensors(tried.weights[0], scheme, tried.input_scale)
        forget_peaks()
        for layer, group in weights.items():
            group_stats = stats[layer]
            taken, smoothing = once(partial(smooth, method, group, group_stats, options))
            total["smooth"] += taken
            if (scale := smoothing.scale) is not None:
                group, group_stats = [w.float() * scale for w in group], group_stats.rescaled(scale)
            arguments = method, group, group_stats, options, torch.bfloat16, smoothing.factorization
            taken, solution = once(partial(solve, *arguments))
            total["solve"] += taken
            for weight, q in zip(group, solution.weights, strict=True):
                taken, _ = once(partial(FORMAT.tensors, q, scheme, solution.input_scale))
                total["pack"] += taken
                some = slice(None, None, max(1, len(weight) // 256))
                change = q.dequantize(torch.float32)[some] - weight[some].float()
                errors.append(max(group_stats.error(change, weight[some].float()).values()))
        return {
            "seconds": {phase: round(value, 3) for phase, value in total.items()},
            "worst_error": max(errors),
            "blocks": blocks,
            "model_seconds": round(blocks * (sum(total.values()) + seconds), 1),
            **peaks(),
        }

    rows = each(methods, row)
    return checked(rows, {"statistics_seconds": round(seconds, 3), "tokens": tokens, "schemes": rows})


GRID, TINY_GRID = (1, 32, 40), (1, 8, 8)
IMAGES = (1, 8, 32)
WORDS = 48


@torch.no_grad()
def next_to_encoder(place: Place) -> dict[str, Any]:
    """The encoder's milliseconds for some images at the widths of Qwen2.5-VL-7B, and each reducer's.

    A reducer that takes longer than the prefill it saves is no gain. One that chooses in Triton kernels is timed without them
    as well.
    """
    from vlmcompress.reduction.methods import REGISTRY, _selecting, reduce_all

    vlm, grid = vlm_of(place, QWEN, "tower"), TINY_GRID if place.tiny else GRID
    width, encoder = vlm.model.config.text_config.hidden_size, {}
    for count in IMAGES[: 2 if place.tiny else 3]:
        inputs = prompts(vlm, grid, count)
        call = partial(vlm.model.get_image_features, inputs["pixel_values"], inputs["image_grid_thw"])
        encoder[count] = round(milliseconds(call), 3)
    images = [drawn_signals(grid, width, device(), seed) for seed in range(4)]

    def row(name: str) -> dict[str, Any]:
        reducer = reducer_of(name, width)

        def reduced(count: int) -> None:
            batch = [images[number % len(images)] for number in range(count)]
            if not reducer.MERGES:
                reduce_all(reducer, batch, check=False)  # as vLLM's plugin does: all images of a call at once
            else:
                for image in batch:
                    reduction(reducer, image)

        def taken() -> dict[int, float]:
            _selecting.kernels.cache_clear()
            return {count: round(milliseconds(partial(reduced, count)), 3) for count in encoder}

        figures = {"stage": reducer.STAGE, "served": reducer.SERVED, "ms": taken()}
        if _selecting.kernels.cache_info().currsize:  # it has asked for kernels
            with patch.dict(os.environ, {_selecting.SWITCH: "0"}):
                figures["torch_ms"] = taken()
            _selecting.kernels.cache_clear()
        return figures

    rows = each(REGISTRY.names(), row)
    return checked(rows, {"tokens": math.prod(grid), "encoder_ms": encoder, "reducers": rows})


@torch.no_grad()
def prefill(place: Place) -> dict[str, Any]:
    """Milliseconds of the decoder alone at each share of an image's tokens, and of the whole model with some reducers."""
    from vlmcompress.reduction.hooks import attach

    vlm, grid = vlm_of(place, QWEN, "full"), TINY_GRID if place.tiny else GRID
    tokens, hidden = math.prod(grid), vlm.model.config.text_config.hidden_size
    decoder = vlm.model.model.language_model

    def row(name: str) -> dict[str, Any]:
        count = int(name.split()[0])
        inputs = prompts(vlm, grid, count)
        figures: dict[str, dict[Any, float]] = {"decoder_ms": {}, "model_ms": {}}
        for share in (1.0, 0.5, 0.25):
            x = torch.randn(count, round(share * tokens) + WORDS, hidden, device=device()).to(vlm.model.dtype)
            figures["decoder_ms"][share] = round(milliseconds(partial(decoder, inputs_embeds=x, use_cache=True)), 2)
        whole = partial(vlm.model, **inputs, use_cache=True, logits_to_keep=1)
        figures["model_ms"]["all"] = round(milliseconds(whole), 2)
        for method in ("uniform", "coverage", "divprune"):
            for share in (0.5, 0.25):
                with attach(vlm, method, {"keep": share}):
                    figures["model_ms"][f"{method}:{share}"] = round(milliseconds(whole), 2)
        return figures

    rows = each([f"{count} images" for count in IMAGES[: 1 if place.tiny else 2]], row)
    return checked(rows, {"tokens": tokens, **rows, **peaks()})


def prompts(vlm: Any, grid: tuple[int, int, int], count: int) -> dict[str, Tensor]:
    """Inputs of some prompts, each of an image of noise with a grid of tokens, and a question of random tokens."""
    config, draw = vlm.model.config, torch.Generator().manual_seed(0)
    vision, (frames, down, across) = config.vision_config, grid
    merge = vision.spatial_merge_size
    image = torch.full((count, math.prod(grid)), getattr(config, vlm.spec.image_token))
    ids = torch.cat([image, torch.randint(0, 256, (count, WORDS), generator=draw)], 1)
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.randn(image.numel() * merge**2, width, generator=draw).to(vlm.model.dtype),
        "image_grid_thw": torch.tensor([[frames, down * merge, across * merge]] * count),
        "mm_token_type_ids": (ids == image[0, 0]).long(),
    }
    return {name: value.to(device()) for name, value in inputs.items()}


STEPS, BATCH = 10, 2


def training(place: Place, what: str) -> dict[str, Any]:
    """Run `gradients`, `learn-reducer`, `rotate` or `kv-cache` on three decoder blocks of full width.

    Each is a verb's run on random weights: seconds by phase, peak memory, and whether it finishes. What is learned means
    nothing. Raises `Failed` if a figure is not finite.
    """
    import vlmcompress
    from vlmcompress.training.learn_reducer import ScorerTraining, learn_reducer
    from vlmcompress.utils.errors import UserError

    source = model(place, QWEN, "shallow", apart=True)
    out = source.with_name(f"training-{what}")
    scorer = Path(f"{out}.safetensors")

    def quantize(scheme: str, options: Mapping[str, Any], **keys: Any) -> Any:
        return vlmcompress.quantize(recipe_for(place, source, out, scheme, options, **keys), overwrite=True).manifest

    def learned() -> Any:
        recipe = recipe_for(place, source, scorer, "none", {})
        try:
            return learn_reducer(recipe, ScorerTraining(steps=STEPS, batch=BATCH, every=STEPS // 2), overwrite=True)
        except UserError as error:  # nothing can be learned from random weights, which it reports at its end
            if not str(error).startswith("nothing was learned"):
                raise
            return {"timing": {}}

    runs: dict[str, Callable[[], Any]] = {
        "gradients": lambda: quantize("mbq", {"objective": "gram"}),  # mbq reads gradients
        "learn-reducer": learned,
        "rotate": lambda: quantize("rtn", {}, rotate="hadamard"),
        "kv-cache": lambda: quantize("fp8", {}, kv_cache="fp8"),
    }
    forget_peaks()
    try:
        seconds, manifest = once(runs[what])
    finally:
        for path in (out, scorer):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    result = {"seconds": round(seconds, 2), "phases": manifest["timing"], **peaks()}
    if odd := [name for name, value in manifest["timing"].items() if not math.isfinite(value)]:
        raise Failed(f"{', '.join(odd)} should be a number", result)
    return result


SUITE_SECONDS = 540


def suite(place: Place, piece: str) -> dict[str, Any]:
    """A piece of the default test suite, of under ten minutes, as far as the Python that runs it can run it.

    `pure` are the tests that use no model, `device` those of what works on the accelerator where there is one: these two take
    torch and transformers. `models-1-2` is the first half of all that load models, `engines-1-3` the first third of those that
    start vLLM. Tests that end for want of a package are skipped: on a bare machine there are few. Tiny shapes run one quick
    folder and only collect the others, as the suite is what runs this.
    """
    kind, *which = piece.split("-")
    files = suite_files(kind)
    if which:
        files = files[int(which[0]) - 1 :: int(which[1])]
    collect = place.tiny and kind != "pure"
    if place.tiny and kind == "pure":
        files = [ROOT / "tests" / "recipe"]
    marks = "engine and not slow" if kind == "engines" else "not slow and not engine"
    report = place.work / f"tests-{piece}.xml"
    report.unlink(missing_ok=True)
    # Whatever else is installed there is left out; and tests compare with a CPU, which has no TF32.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-m", marks]
    command += ["-p", "pytest_timeout"] if find_spec("pytest_timeout") else []
    if find_spec("xdist") and (os.cpu_count() or 1) > 2:
        command += ["-p", "xdist", "-n", str(min(8, os.cpu_count() or 1)), "--dist", "loadfile"]
    command += [f"--junitxml={report}", *["--collect-only"] * collect]
    try:
        done = subprocess.run(
            [*command, *map(str, files)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=SUITE_SECONDS, check=False,
        )  # fmt: skip
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, output = -1, late.stdout or b""
    printed = output.decode(errors="replace")
    print(printed)
    if code == -1:
        raise Failed("\n".join([f"not done after {SUITE_SECONDS / 60:g} minutes", *last_lines(printed, 3)]))
    result = {"files": len(files), **suite_ends(report)}
    if collect:
        result["passed"] = len(re.findall(r"^\S+::|^\S+\.py: \d+", printed, re.MULTILINE))  # collected
    if code not in (0, 1) or result["failed"] or not result["passed"]:
        lines = result["failed"][:6] or last_lines(printed, 5)
        raise Failed("\n".join([f"{len(result['failed'])} failed", *lines]), result)
    return result


def suite_ends(report: Path) -> dict[str, Any]:
    """How many tests passed and were skipped, and the names of those that failed, from pytest's report."""
    states: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        kinds = {child.tag for child in case}
        state = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        lacking = re.search(r"ModuleNotFoundError: No module named '(\w+)", "".join(case.itertext()))
        if state == "failed" and lacking and lacking[1] not in ("vlmcompress", "tests", "eval", "gpu"):
            state = "skipped"
        states[state].append(f"{case.get('classname')}::{case.get('name')}")
    counts = {state: len(states[state]) for state in ("passed", "skipped")}
    return {**counts, "failed": sorted(set(states["failed"]))}


def suite_files(kind: str) -> list[Path]:
    """Test files of a kind."""
    sys.path.insert(0, str(ROOT))
    from tests.conftest import has_engine
    from tests.kit.imports import reaches

    every = sorted((ROOT / "tests").glob("**/test_*.py"))
    if kind in ("engines", "models"):
        return [file for file in every if (has_engine if kind == "engines" else reaches)(file)]
    folders = {ROOT / "tests" / name for name in ("quantization", "reduction", "training")}
    return [f for f in every if not reaches(f)] if kind == "pure" else [
        file for file in every if folders & {*file.parents} and reaches(file)
    ]  # fmt: skip


def whole(place: Place, shape: str, name: str) -> dict[str, Any]:
    """Quantize one model by one scheme, from loading to the written folder: seconds by phase, peak memory of GPU and host.

    Calibration is what the documentation's estimates are of: 128 images of 1000 x 1000 pixels.
    """
    import vlmcompress

    scheme, options = SCHEMES[name]
    source = model(place, shape, "full", apart=True)
    out = source.with_name(name)
    recipe = recipe_for(place, source, out, scheme, options, large=True)
    forget_peaks()
    seconds, done = once(lambda: vlmcompress.quantize(recipe, overwrite=True))
    manifest, config = done.manifest, json.loads((source / "config.json").read_text())
    shutil.rmtree(out)  # disks are small
    return {
        "seconds": round(seconds, 2),
        "phases": manifest["timing"],
        "samples": recipe.calibrate.samples if manifest["calibration"] else 0,
        "layers": config["text_config"]["num_hidden_layers"],
        "gb_before": round(manifest["size"]["weights_before"] / 1e9, 3),
        "gb_after": round(manifest["size"]["weights_after"] / 1e9, 3),
        "worst_error": max((max(by.values(), default=0.0) for by in manifest["errors"].values()), default=None),
        **peaks(),
    }
