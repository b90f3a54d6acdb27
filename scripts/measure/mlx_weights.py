#!/usr/bin/env python
"""What 4 bits lose in MLX's format: mlx-vlm's own conversions next to ours, in as many bytes.

    scripts/measure/mlx_weights.py MODEL --work DIR --save    a demo model; its rows go into eval/mlx.json
    scripts/measure/mlx_weights.py --render                   print the docs' table from that file

`VLMCOMPRESS_ENGINE_PYTHON` names a Python that has mlx-vlm. It converts by `mlx_vlm.convert` with its defaults: 4 bits in
groups of 64 for the decoder, the token embedding and the head, rounded (`rtn`) or after its `awq`, which reads 16 sentences of
its own. Ours quantize the same layers.

Divergences are those of `compare_weights.py`: of English texts for a model that knows English, and of the world's answers by
teacher forcing, both in transformers from the folder's numbers, `scale * code + bias`, in float32. MLX's CPU build computes ten
tokens a second of a model of 135 million. So it runs a sample, in float32, too: the beginning of a text, whose largest
difference of log-probabilities is kept, and questions, of which as many have to be right or wrong as in transformers.

Folders and measures are kept in WORK; what is there is not computed again. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import paired
import teacher_forcing
import torch
from safetensors.torch import load_file
from text_probe import tokenized
from torch import Tensor
from weight_methods import FORMATS
from weights_bench import Bench
from weights_table import means, ratio

from eval import english
from vlmcompress import models
from vlmcompress.cli._process import quiet_libraries
from vlmcompress.engines import EngineSettings, Request, mlx
from vlmcompress.engines.vllm import interpreter
from vlmcompress.export.formats._mlx_config import memory_name, published
from vlmcompress.export.packing import unpack_words
from vlmcompress.models import VLM
from vlmcompress.models.data import Sample
from vlmcompress.quantization import calibrate
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve

RESULTS = Path(__file__).resolve().parents[2] / "eval" / "mlx.json"
BASE = "mlx-vlm rtn"
METHODS = (BASE, "mlx-vlm awq", "mlx-vlm awq, images", "rtn", "gptq", "awq", "gptq-plus")
CONVERT = """  # AWQ's calibration in float32: on a CPU MLX takes ten times as long in bfloat16
import sys, mlx.core as mx, mlx_vlm, mlx_vlm.quant_utils as quantization
rounded = quantization.quantize_model
def in_bfloat16(model, *arguments, **options):
    model.set_dtype(mx.bfloat16)
    return rounded(model, *arguments, **options)
quantization.quantize_model = in_bfloat16
import mlx_vlm.utils
def prepared(processor, images=None, prompts=None, **_):  # its own passes `padding`, which transformers 5.17 refuses
    inputs = processor(images=images, text=prompts, return_tensors="np")
    return {name: mx.array(value) for name, value in inputs.items()}
mlx_vlm.utils.prepare_inputs = prepared
images = {"calibration": "multimodal", "calibration_data": sys.argv[4]} if len(sys.argv) > 4 else {}
mlx_vlm.convert(*sys.argv[1:3], quantize=True, quant_method=sys.argv[3], dtype="float32", **images)
"""
LOGITS = """
import sys, numpy, mlx.core as mx, mlx_vlm
model, _ = mlx_vlm.load(sys.argv[1])
model.set_dtype(mx.float32)
logits = model.language_model(mx.array(numpy.load(sys.argv[2]))[None]).logits[0]
numpy.save(sys.argv[3], numpy.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
"""


def in_mlx(program: str, *arguments: str | Path) -> None:
    """Run a program in the Python that has mlx-vlm."""
    subprocess.run([interpreter(), "-P", "-c", program, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def write(bench: Bench, method: str, folder: Path) -> None:
    """Write a model quantized by a method into a folder that MLX reads."""
    if method.startswith("mlx-vlm"):
        source = folder.with_suffix(".source")  # mlx-vlm fails on some config.json that transformers 5 saved
        shutil.copytree(bench.folder, source, dirs_exist_ok=True)
        (source / "config.json").write_text(json.dumps(published(models.read_config(bench.folder))))
        media = folder.with_suffix(".media")
        if images := method.endswith("images"):
            from vlmcompress.models.data import load_samples

            media.mkdir(exist_ok=True)
            for sample in load_samples(bench.data, samples=64, seed=0):
                for number, image in enumerate(sample.images):
                    image.convert("RGB").save(media / f"{sample.id}-{number}.png".replace("/", "-"))
        in_mlx(CONVERT, source, folder, method.split()[1].strip(","), *[media] * images)
        shutil.rmtree(source)
        return
    tied = models.is_tied(bench.plain.model, bench.plain.spec)
    keys = bench.recipe_keys(folder, 0) | {"scheme": method, "options": FORMATS["W4 g64"].options, "format": "mlx"}
    keys |= {"embeddings": "w4a16"} | ({} if tied else {"head": "w4a16"})
    if method == "rtn":
        keys.pop("calibrate")
    else:
        keys["calibrate"] = {"stats": str(bench.statistics(0, calibrate.KINDS - {"gradient", "entropy"}))}
    quantize(resolve(keys).recipe, overwrite=True)


@torch.no_grad()
def dequantized(folder: Path, like: VLM) -> VLM:
    """A folder for MLX as a model of transformers: `scale * code + bias` in float32, with 4-bit codes from 0."""
    vlm = models.load(like.path)
    state, names = vlm.model.float().state_dict(), models.Source.of(like.path).names
    memory = {disk: name for name, disk in names.items()}  # ours have the source's names, mlx-vlm's its own
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name, tensor in stored.items():
        layer, _, part = name.rpartition(".")
        if part in ("scales", "biases"):
            continue
        if part == "weight" and f"{layer}.scales" in stored:
            codes = unpack_words(tensor.view(torch.int32), 4, tensor.shape[1] * 8).float() + 8
            scales, biases = (stored[f"{layer}.{part}"].float()[..., None] for part in ("scales", "biases"))
            tensor = (codes.view(*scales.shape[:2], -1) * scales + biases).flatten(1)
        target = state.pop(memory.get(name) or memory_name(name, state))
        target.copy_(tensor if tensor.shape == target.shape else tensor.movedim(-1, 1))  # a convolution, channels last
    if lacking := state.keys() - models.tied_names(vlm.model).keys():
        raise ValueError(f"{folder} lacks {sorted(lacking)}")
    return vlm


@torch.no_grad()
def logits_differ(folder: Path, vlm: VLM, tokens: int) -> float:
    """The largest difference of log-probabilities between MLX and transformers at the first tokens of a text."""
    ids = tokenized(vlm, english.paragraphs("validation")[:1])[0][:tokens]
    source, target = folder.with_suffix(".ids.npy"), folder.with_suffix(".logits.npy")
    np.save(source, ids.numpy())
    in_mlx(LOGITS, folder, source, target)
    ours = vlm.model(input_ids=ids[None]).logits[0].log_softmax(-1)
    return float((ours - torch.from_numpy(np.load(target))).abs().max())


def answered(folder: Path, samples: list[Sample], media: Path) -> Tensor:
    """Whether MLX answers questions as expected, `[questions]`, in float32."""
    media.mkdir(exist_ok=True)
    requests = []
    for sample in samples:
        content: list[dict[str, Any]] = []
        for number, image in enumerate(sample.images):
            path = media / f"{sample.id}-{number}.png".replace("/", "-")
            image.save(path)
            content.append({"type": "image_url", "image_url": {"url": path.resolve().as_uri()}})
        content.append({"type": "text", "text": sample.question})
        requests.append(Request(sample.id, [{"role": "user", "content": content}]))
    run = mlx.ENGINE.answer(folder, requests, media=media, settings=EngineSettings(dtype="float32"))
    return torch.tensor([float(run.answers[sample.id].text.strip() == sample.answer) for sample in samples])


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a model: each method's loss, next to mlx-vlm's own rounding."""
    bench = Bench(args.model.resolve(), args)
    said = bench.reference_answers[1] if bench.questions else None
    exact = teacher_forcing.measure(said[0], *said)["exact"] if said else torch.zeros(0)
    clusters = paired.numbered([paired.about(sample) for sample in bench.questions])
    pictures = clusters.new_tensor([bool(sample.images) for sample in bench.questions]).bool()
    subset = pictures.nonzero().squeeze(1)[:: max(1, int(pictures.sum()) // max(1, args.asked))][: args.asked].tolist()
    rows, loaded = [], {}
    for method in args.methods:
        folder = args.work / f"{bench.name}-{method.replace(' ', '-')}"
        if not folder.exists():
            write(bench, method, folder)
        path, fact = folder.with_suffix(".pt"), folder.with_suffix(".json")
        if not path.exists():
            vlm = dequantized(folder, bench.plain)
            facts = {"mlx_logits": logits_differ(folder, vlm, args.tokens)} if bench.english else {}
            teacher_forcing.cached(path, lambda vlm=vlm: bench.measure(vlm))
            fact.write_text(json.dumps(facts))
        loaded[method] = measures = torch.load(path)
        row = {"model": bench.name, "split": args.split, "method": method, "questions": len(exact)} | means(measures)
        row |= json.loads(fact.read_text()) | {
            "bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        }
        if said:
            row["exact_difference"] = paired.points((measures["answers/exact"] - exact)[None], clusters)
        for name, values in (("text", "text/kl"), ("answers", "answers/path")):
            if values in measures and BASE in loaded:
                a, b = measures[values][None], loaded[BASE][values][None]
                row[f"{name}_ratio"] = ratio(a, b, clusters if name == "answers" else torch.arange(a.shape[1]))
        if method in args.ask:
            samples, path = [bench.questions[number] for number in subset], folder.with_suffix(".asked.pt")
            right = teacher_forcing.cached(path, lambda f=folder, s=samples: answered(f, s, args.work / "media"))
            expected = measures["answers/exact"][subset]
            row |= {"mlx_asked": len(subset), "mlx_as_expected": int((right == expected).sum())}
            row["mlx_difference"] = paired.points((right - exact[subset])[None], clusters[subset])
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def render(rows: list[dict[str, Any]]) -> str:
    """The docs' table."""
    lines = ["| model | quantized by | MB | KL text | to mlx-vlm's | KL answers | to mlx-vlm's | right, points |"]
    lines.append("|---|---|" + "---:|" * 6)
    for row in rows:
        cells = [row["model"], row["method"], f"{row['bytes'] / 1e6:.1f}"]
        for name in ("text", "answers"):
            cells.append(f"{row[f'{name}_kl']:.4f}" if f"{name}_kl" in row else "")
            by = row.get(f"{name}_ratio")
            cells.append("{ratio:.2f} ({low:.2f} to {high:.2f})".format(**by) if by else "")
        changed = row.get("exact_difference")
        cells.append("{:+.1f} ±{:.1f} of {}".format(*changed, row["questions"]) if changed else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *ran(rows)])


def ran(rows: list[dict[str, Any]]) -> list[str]:
    """Lines about what MLX itself ran, by `gptq-plus`."""
    differ = [row["mlx_logits"] for row in rows if "mlx_logits" in row]
    lines = [f"MLX's log-probabilities differed from transformers' by at most {max(differ):.1e}."] if differ else []
    answers = [f"{row['mlx_as_expected']} of {row['mlx_asked']} ({row['model']})" for row in rows if "mlx_asked" in row]
    text = "Asked questions with images, MLX itself was right or wrong as transformers was in"
    return [*lines, f"{text} {', '.join(answers)}."] if answers else lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--work", type=Path, default=Path("out/mlx"), help="where everything is kept")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument(
        "--ask", nargs="*", default=[], choices=METHODS, help="methods whose folders MLX asks questions"
    )
    parser.add_argument("--asked", type=int, default=60, help="how many")
    parser.add_argument("--tokens", type=int, default=64, help="of a text, which MLX runs itself")
    parser.add_argument("--split", choices=("validation", "test"), default="validation")
    parser.add_argument("--paragraphs", type=int, default=24, help="texts that are measured on")
    parser.add_argument("--questions", type=int, default=10, help="of each family of the world")
    parser.add_argument("--samples", type=int, default=96, help="of calibration")
    parser.add_argument("--save", action="store_true", help="put the rows into eval/mlx.json")
    parser.add_argument("--render", action="store_true", help="print the table of eval/mlx.json")
    args = parser.parse_args()
    quiet_libraries()
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    if not args.render:
        args.work.mkdir(parents=True, exist_ok=True)
        rows = [row for row in rows if row["model"] != args.model.name] + measure(args)
        if args.save:
            RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    print(render(rows))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
