#!/usr/bin/env python
"""What weights lose in GGUF files: llama.cpp's own types next to ours.

    scripts/measure/gguf_weights.py MODEL --work DIR    measures, and writes eval/gguf.json
    scripts/measure/gguf_weights.py --render            prints the docs' table from that file

MODEL is a checkpoint of a LLaMA-like decoder that knows English, such as demo-smol. Only the matrices of its decoder blocks
change. Ours are read back from the `model.gguf` that `quantize --format gguf` writes; llama.cpp's are made by ggml's own
quantizers in the library of `xllamacpp`, with an importance matrix: the mean square of each input over the samples that ours
are calibrated with. Which matrix gets which type of Q4_K_M follows `src/llama-quant.cpp` for fewer than four query heads a
key head; rows that are no multiple of 256 get the wider types of `FALLBACK` there.

Divergences of English texts are those of `compare_weights.py`, whose statistics and references in WORK serve here, too; ratios
are to Q4_0 with an importance matrix. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gguf
import numpy as np
import teacher_forcing
import torch
import xllamacpp
from torch import Tensor
from weights_bench import Bench
from weights_table import means, ratio

from vlmcompress import models
from vlmcompress.cli._process import quiet_libraries
from vlmcompress.export.gguf import REGISTRY, ModelFacts
from vlmcompress.quantization.calibration.statistics_folder import read_statistics
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve

RESULTS = Path(__file__).resolve().parents[2] / "eval" / "gguf.json"
OURS = {
    "gptq-plus, Q4_0": {"scheme": "gptq-plus", "options": {"group_size": 32, "symmetric": True}},
    "gptq-plus, Q4_1": {"scheme": "gptq-plus", "options": {"group_size": 32}},
}
NEEDS = {"gram", "absmax", "absmean"}
BASE = "llama.cpp's Q4_0, importance"
FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
Values = dict[str, Tensor]
"""The decoder's parameters by their names in the GGUF file, in its order of rows."""


def decoder(vlm: models.VLM) -> dict[str, tuple[torch.nn.Parameter, Tensor]]:
    """Name in the GGUF file to the decoder's parameter, and the places that its rows have there."""
    facts, parameters = ModelFacts(vlm.model.config.to_dict(), {}), {}
    for rule in REGISTRY.get(vlm.spec.family).FAMILY.language.rules:
        for number in range(vlm.model.config.get_text_config().num_hidden_layers) if "{}" in rule.source else ():
            parameter = vlm.model.get_parameter(rule.source.format(number))
            rows = list(rule.rows(facts)) if rule.rows else range(len(parameter))
            parameters[rule.target.format(number)] = (parameter, torch.tensor(rows))
    return parameters


def importance(bench: Bench, parameters: dict[str, tuple[torch.nn.Parameter, Tensor]]) -> Values:
    """The mean square of each input of each matrix over the calibration samples."""
    names = {id(parameter): name for name, (parameter, _) in parameters.items()}
    statistics, squares = read_statistics(bench.statistics(0, NEEDS)), {}
    for block, groups in enumerate(statistics.facts["blocks"]):
        inputs = statistics.load(block)[0]
        for group, layers in groups.items():
            for layer in layers:
                name = names.get(id(bench.plain.model.get_parameter(f"{layer}.weight")))
                if name:  # not the head
                    squares[name] = inputs[group].importance() / inputs[group].tokens
    return squares


def type_of(name: str, mix: str, blocks: int) -> str:
    """The ggml type of a matrix in a mix of llama.cpp's quantizer."""
    number = int(name.split(".")[1])
    early = number < blocks // 8
    if mix == "Q4_0":
        return "Q4_1" if early and "ffn_down" in name else "Q4_0"
    wide = early or number >= 7 * blocks // 8 or (number - blocks // 8) % 3 == 2
    return "Q6_K" if wide and ("attn_v" in name or "ffn_down" in name) else "Q4_K"


def by_llamacpp(mix: str, weights: Values, squares: Values) -> tuple[Values, int]:
    """The matrices as ggml's library quantizes them, and their bytes."""
    rounded = ctypes.CDLL(str(next(Path(xllamacpp.__path__[0]).glob("*.so")))).ggml_quantize_chunk
    rounded.restype = ctypes.c_size_t
    values, nbytes = {}, 0
    for name, square in squares.items():
        source, kind = weights[name].contiguous().numpy(), type_of(name, mix, 1 + int(list(squares)[-1].split(".")[1]))
        rows, columns = source.shape
        number = gguf.GGMLQuantizationType[FALLBACK[kind] if kind in FALLBACK and columns % 256 else kind]
        block, size = gguf.GGML_QUANT_SIZES[number]
        packed, inputs = np.empty((rows, columns // block * size), np.uint8), square.float().contiguous().numpy()
        addresses = [array.ctypes.data_as(ctypes.c_void_p) for array in (source, packed, inputs)]
        sizes = [ctypes.c_int64(number) for number in (0, rows, columns)]
        nbytes += rounded(ctypes.c_int(number), *addresses[:2], *sizes, addresses[2])
        values[name] = torch.from_numpy(gguf.quants.dequantize(packed, number))
    return values, nbytes


def by_us(bench: Bench, method: str, matrices: Values) -> tuple[Values, int]:
    """The decoder as our GGUF file has it, norms included, and bytes of the matrices."""
    keys = bench.recipe_keys(bench.work / method.replace(", ", "-"), 0) | OURS[method] | {"format": "gguf"}
    keys["calibrate"] = {"stats": str(bench.statistics(0, NEEDS))}
    quantize(resolve(keys).recipe, overwrite=True)
    tensors = gguf.GGUFReader(Path(keys["out"]) / "model.gguf").tensors
    values = {t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()) for t in tensors}
    return values, sum(int(t.n_bytes) for t in tensors if t.name in matrices)


@torch.no_grad()
def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each method: bits a weight of the decoder's matrices, and the divergence on texts."""
    bench = Bench(args.model.resolve(), args)
    vlm = models.load(bench.folder)
    vlm.model.float()
    parameters = decoder(vlm)
    weights = {name: parameter.detach()[rows] for name, (parameter, rows) in parameters.items()}
    squares = importance(bench, decoder(bench.plain))
    methods: dict[str, Callable[[], tuple[Values, int]]] = {
        f"llama.cpp's {mix}, importance": partial(by_llamacpp, mix, weights, squares) for mix in ("Q4_0", "Q4_K_M")
    }
    methods |= {method: partial(by_us, bench, method, squares) for method in OURS}
    rows, divergences = [], {}
    for method, make in methods.items():
        values, nbytes = make()
        for name, (parameter, order) in parameters.items():
            parameter[order] = values.get(name, weights[name])
        path = bench.work / "gguf" / f"{method.replace(' ', '-')}-{args.samples}-{args.paragraphs}.pt"
        measures = teacher_forcing.cached(path, partial(bench.measure, vlm))
        divergences[method] = measures["text/kl"][None]
        bits = 8 * nbytes / sum(weights[name].numel() for name in squares)
        row = {"model": bench.name, "method": method, "bits": bits, "samples": args.samples} | means(measures)
        row["ratio"] = ratio(divergences[method], divergences[BASE], torch.arange(args.paragraphs))
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def render(rows: list[dict[str, Any]]) -> str:
    """The docs' table."""
    lines = ["| made by | bits a weight | KL text | to Q4_0 |", "|---|---:|---:|---:|"]
    for row in rows:
        to = "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**row["ratio"])
        lines.append(f"| {row['method']} | {row['bits']:.2f} | {row['text_kl']:.3f} | {to} |")
    return "\n".join(lines)


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--work", type=Path, default=Path("out/gguf"), help="where everything is kept")
    parser.add_argument("--samples", type=int, default=32, help="of calibration")
    parser.add_argument("--paragraphs", type=int, default=16, help="texts that are measured on")
    parser.add_argument("--render", action="store_true", help="print the table of eval/gguf.json")
    parser.set_defaults(split="validation", questions=0)
    args = parser.parse_args()
    quiet_libraries()
    if not args.render:
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, measure(args))) + "\n]\n")
    rows = json.loads(RESULTS.read_text())
    print(render(rows))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
