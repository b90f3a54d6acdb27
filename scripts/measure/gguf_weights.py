#!/usr/bin/env python3
"""What weights in GGUF files cost: our codes in Q4_0 and Q4_1 beside llama.cpp's own rounding to the same types.

    scripts/measure/gguf_weights.py build/demo-smol [--samples 32] [--texts 12] [--work FOLDER]

MODEL is a checkpoint whose tokenizer knows English. Each method writes `model.gguf`; its matrices are read back by the package
`gguf` and put into the model, so that what is measured are the bytes that llama.cpp gets. llama.cpp's own types are made by
`gguf.quants`, whose results equal those of llama.cpp's reference quantizers; it has none for Q4_K and IQ4, and rows of 576
would not fill their blocks of 256. Calibration and texts: `eval/english.py`. Prints a table of the mean divergence from the
16-bit model over the vocabulary, nats, and of bits per weight of the quantized matrices. The last line is a JSON object.
"""

import argparse
import json
import sys
import tempfile
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
}
LLAMA_CPP = ("Q4_0", "Q4_1", "Q8_0")


def contents(file: Path) -> dict[str, tuple[torch.Tensor, bool, int]]:
    """The tensors of a GGUF file: name -> float32 values, whether they are quantized, bytes."""
    return {
        tensor.name: (
            torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()),
            tensor.tensor_type.name.startswith("Q"),
            tensor.n_bytes,
        )
        for tensor in gguf.GGUFReader(file).tensors
    }


def places(vlm: models.VLM) -> dict[str, tuple[torch.Tensor, int]]:
    """Name in the GGUF file -> the decoder's parameter, and the heads whose rows stand in another order there; 0: none.
    Norms are among them: methods that smooth change these, too."""
    family = REGISTRY.get(vlm.spec.family).FAMILY
    facts = Facts(vlm.model.config.to_dict(), {})
    parameters, blocks = {}, range(vlm.model.config.get_text_config().num_hidden_layers)
    for rule in family.language.rules:
        for number in blocks if "{}" in rule.source else ():
            parameter = vlm.model.get_parameter(rule.source.format(number))
            parameters[rule.target.format(number)] = (parameter, rule.heads(facts) if rule.heads else 0)
    return parameters


def in_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the order of rows in which ggml rotates neighbours."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape) if heads else weight


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
            calib = ["--calib", str(data), "--samples", str(args.samples)] if "rtn" not in flags else []
            out = work / name.replace(", ", "-")
            if (out / "model.gguf").is_file():  # of an earlier run in the same folder
                continue
            command = ["quantize", str(args.model), *flags, *calib, "--format", "gguf", "-o", str(out), "--overwrite"]
            if vlmcompress(command):
                raise SystemExit(2)
        print(json.dumps(measure(args.model, work, args.texts)))


@torch.no_grad()
def measure(model: Path, work: Path, count: int) -> dict[str, dict[str, float]]:
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
        print(f"{title:24} {kl:10.5f} nats  {rows[title]['bits']:.2f} bits", flush=True)

    for kind in LLAMA_CPP:
        number = gguf.GGMLQuantizationType[kind]
        packed = {name: gguf.quants.quantize(sources[name].numpy(), number) for name in matrices}
        values = {name: torch.from_numpy(gguf.quants.dequantize(data, number)) for name, data in packed.items()}
        judge(f"llama.cpp's {kind}", values, sum(data.nbytes for data in packed.values()))
    for title in METHODS:
        read = contents(work / title.replace(", ", "-") / "model.gguf")
        values = {name: in_order(read[name][0], heads) for name, (_, heads) in parameters.items()}
        judge(title, values, sum(nbytes for _, packed, nbytes in read.values() if packed))
    return rows


if __name__ == "__main__":
    main()
