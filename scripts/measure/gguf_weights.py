#!/usr/bin/env python3
"""What weights in GGUF files cost: our codes in ggml's types beside llama.cpp's own rounding.

    scripts/measure/gguf_weights.py build/demo-smol [--samples 32] [--texts 12] [--work FOLDER]
    pip install --target quantizer --no-deps llama-cpp-py-sync==0.11739 && PYTHONPATH=quantizer scripts/measure/...

MODEL is a checkpoint whose tokenizer knows English. Each method writes `model.gguf`; its matrices are read back by the package
`gguf` and put into the model, so that what is measured are the bytes that llama.cpp gets. llama.cpp's own types are made by
`gguf.quants`, whose results equal those of its reference quantizers, and, with the second line, by llama.cpp itself (the
package carries its library): K-quants and IQ4, which the other lacks, each without and with an importance matrix, the mean
square of each input over the texts that our methods calibrate on. Rows that don't fill blocks of 256 get other types there, so
mind the bits. Calibration and texts: `eval/english.py`. Prints a table of the mean divergence from the 16-bit model over the
vocabulary, nats, and of bits per weight of the decoder's matrices. The last line is a JSON object.
"""

import argparse
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import gguf
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
    "none": ["--scheme", "none"],
}
LLAMA_CPP = ("Q4_0", "Q4_1", "Q8_0")
NATIVE = {"Q4_0": 2, "IQ4_XS": 30, "IQ4_NL": 25, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_M": 17}
"""llama.cpp's numbers of mixes of types."""


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


def quantize_natively(source: Path, target: Path, mix: str, matrix: dict[str, torch.Tensor] | None) -> None:
    """Have llama.cpp's library write a quantized GGUF file."""
    from llama_cpp_py_sync import _cffi_bindings as bindings

    ffi, library = bindings.ffi, bindings.get_lib()
    params = ffi.new("llama_model_quantize_params *", library.llama_model_quantize_default_params())
    params.ftype, params.nthread = NATIVE[mix], 1
    kept = []
    if matrix:
        entries = ffi.new("struct llama_model_imatrix_data[]", len(matrix) + 1)
        for entry, (name, values) in zip(entries, matrix.items(), strict=False):
            kept += [ffi.new("char[]", name.encode()), ffi.new("float[]", values.tolist())]
            entry.name, entry.data, entry.size = kept[-2], kept[-1], len(values)
        params.imatrix = entries
    if library.llama_model_quantize(str(source).encode(), str(target).encode(), params):
        raise SystemExit(f"llama.cpp could not write {target}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--samples", type=int, default=32, help="calibration texts")
    parser.add_argument("--texts", type=int, default=12, help="texts that are measured on")
    parser.add_argument("--work", type=Path, help="folder for the checkpoints; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        data = work / "calibration.jsonl"
        lines = [json.dumps(text_probe.turns(text)) for text in english.paragraphs("calibration")[: args.samples]]
        data.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for name, flags in METHODS.items():
            reads = not {"rtn", "none"} & set(flags)
            calib = ["--calib", str(data), "--samples", str(args.samples)] if reads else []
            out = work / name.replace(", ", "-")
            if (out / "model.gguf").is_file():  # of an earlier run in the same folder
                continue
            command = ["quantize", str(args.model), *flags, *calib, "--format", "gguf", "-o", str(out), "--overwrite"]
            if vlmcompress(command):
                raise SystemExit(2)
        print(json.dumps(measure(args.model, work, args.samples, args.texts)))


@torch.no_grad()
def measure(model: Path, work: Path, samples: int, count: int) -> dict[str, dict[str, float]]:
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
        if title != "none":
            judge_file(title, work / title.replace(", ", "-") / "model.gguf")
    if find_spec("llama_cpp_py_sync"):
        for name, value in sources.items():
            parameters[name][0].copy_(value)
        matrix = importance(vlm, english.paragraphs("calibration")[:samples], parameters)
        for mix in NATIVE:
            for title, weights in ((f"llama.cpp's {mix}", None), (f"llama.cpp's {mix}, imatrix", matrix)):
                quantize_natively(work / "none" / "model.gguf", work / "native.gguf", mix, weights)
                judge_file(title + " (native)" * (mix in LLAMA_CPP), work / "native.gguf")
    return rows


if __name__ == "__main__":
    main()
