#!/usr/bin/env python
"""Does a checkpoint that we write unquantized answer in vLLM as its source does, token by token?

    scripts/measure/equal_to_source.py --family qwen3-5    asks both; adds what it found to eval/compatibility.json
    scripts/measure/equal_to_source.py                     the same of all families that are not in there yet

The source is the family's tiny checkpoint, with weights so large that answers depend on what is seen. Ours is what
`quantize --scheme none --reduce uniform:1.0` writes, with the reducer that keeps all tokens in vLLM's plugin, or, of families
that are not served reduced, what we write with nothing quantized. Asked are 50 prompts: 20 with one image, 15 with two and 15
with none, of many sizes, greedily for 16 tokens each, in float32; in bfloat16 where vLLM's CPU build computes recurrent
states, as it can't otherwise. `nats_apart` is the largest difference of a token's log-probability, `different` how many of
the source's answers differ from each other in tokens or log-probabilities. One vLLM process a family. The last line is one
JSON object; exit code 1 where a family's answers differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "compatibility.json"
KINDS = {"one image": 20, "two images": 15, "text only": 15}
TOKENS = 16


def ours(source: Path, out: Path) -> str:
    """Write the unquantized checkpoint; return how, in words."""
    from vlmcompress.quantization.run import quantize
    from vlmcompress.recipe import resolve
    from vlmcompress.reduction import support
    from vlmcompress.reduction.choice import parse

    (architecture,) = json.loads((source / "config.json").read_text())["architectures"]
    if support.engine_refusal(architecture, parse("uniform:1.0")) is None:
        quantize(resolve({"model": str(source), "out": str(out), "scheme": "none", "reduce": "uniform:1.0"}).recipe)
        return "reduce uniform:1.0"
    _copy(source, out)
    return "nothing quantized"


def _copy(source: Path, out: Path) -> None:
    """Have all of a checkpoint written, as it is."""
    from vlmcompress import models
    from vlmcompress.export import manifest
    from vlmcompress.export.formats import compressed_tensors
    from vlmcompress.export.write import Checkpoint, write
    from vlmcompress.models.layer_names import Layers

    about = models.Source.of(source)
    built = manifest.build(source, family=about.spec.family, recipe={"seed": 0}, calibration=None, errors={})
    layers = Layers([], [], {})
    write(Checkpoint(source=about, exporter=compressed_tensors, layers=layers, manifest=built, quantized={}), out)


def prompts(source: Path, folder: Path) -> list[dict[str, Any]]:
    """The prompts as text, with the files of their images."""
    from transformers import AutoProcessor

    from tests.kit import reduced_cases as cases
    from vlmcompress import models

    class Processed:
        processor = AutoProcessor.from_pretrained(source)

    images = {"one image": 1, "two images": 2, "text only": 0}
    requests = []
    with models.quiet():
        for kind, count in KINDS.items():
            for number in range(count):
                seed = 100 * len(kind) + 2 * number
                parts = [
                    cases.noise(seed + each, 56 + 28 * (seed % 4), 56 + 28 * (number % 3))
                    for each in range(images[kind])
                ]
                turn = cases.turn(*parts, f"what is number {number} of these {'?' * (number % 5 + 1)}")
                requests.append(cases.request(Processed, [turn], folder))  # type: ignore[arg-type]
    return requests


def ask(folders: list[str], requests: list[dict[str, Any]], dtype: str) -> list[list[dict[str, Any]]]:
    """Of each checkpoint, in vLLM in this process: of each prompt its tokens, the answer's and their log-probabilities."""
    from PIL import Image
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    prompts = []
    for request in requests:
        images = [Image.open(file).convert("RGB") for file in request["images"]]
        prompts.append({"prompt": request["prompt"], **({"multi_modal_data": {"image": images}} if images else {})})
    sampling, rows = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=1), []
    for folder in folders:
        llm = LLM(
            folder,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=8,
            limit_mm_per_prompt={"image": 2},
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        answers = [(out, out.outputs[0]) for out in llm.generate(prompts, sampling, use_tqdm=False)]
        rows.append(
            [
                {
                    "prompt": list(out.prompt_token_ids),
                    "tokens": list(best.token_ids),
                    "likely": [at[token].logprob for at, token in zip(best.logprobs, best.token_ids, strict=True)],
                }
                for out, best in answers
            ]
        )
        del llm
        cleanup_dist_env_and_memory()
    return rows


def compared(family: str) -> dict[str, Any]:
    """Write, ask and compare one family; `{"error": line}` where vLLM failed."""
    from tests.kit import reduced_cases as cases
    from tests.kit.engine import SETTINGS
    from vlmcompress import models

    if reason := models.REGISTRY.get(family).SPEC.vllm_cpu:
        return {"error": reason}
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        source = cases.tiny(family, base / "source")
        copied_by = ours(source, base / "ours")
        dtype = "bfloat16" if "linear_attention" in (source / "config.json").read_text() else "float32"
        folders = [str(source), str(base / "ours")]
        job = {"folders": folders, "requests": prompts(source, base / "images"), "dtype": dtype}
        (base / "job.json").write_text(json.dumps(job))
        command = [sys.executable, __file__, "--ask", str(base / "job.json")]
        environment = os.environ | SETTINGS | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[-1][:200]}
        theirs, written = json.loads(done.stdout.splitlines()[-1])
    pairs = list(zip(theirs, written, strict=True))
    same = [all(answer[key] == other[key] for key in ("prompt", "tokens")) for answer, other in pairs]
    apart = max(abs(a - b) for answer, other in pairs for a, b in zip(answer["likely"], other["likely"], strict=True))
    different = {(*answer["tokens"], *(round(each, 3) for each in answer["likely"])) for answer in theirs}
    return {
        "ours": copied_by,
        "dtype": dtype,
        "prompts": len(same),
        "equal": sum(same),
        "nats_apart": round(apart, 6),
        "different": len(different),
    }


def main() -> int:
    """Ask about the families that are named, or those that nothing is known of yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--family", nargs="+", help="these; default: all that are not in the file yet")
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        print(json.dumps(ask(**json.loads(Path(args.ask).read_text()))))
        return 0
    sys.path.insert(0, str(ROOT))
    from vlmcompress import models

    results = json.loads(RESULTS.read_text())
    families = args.family or [name for name in models.REGISTRY.names() if "equal" not in results.get(name, {})]
    rows = {}
    for family in families:
        rows[family] = compared(family)
        results = json.loads(RESULTS.read_text())  # the table's script may have been at work
        results.setdefault(family, {})["equal"] = rows[family]
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
        print(family, rows[family], file=sys.stderr, flush=True)
    differ = [name for name, row in rows.items() if "error" in row or row["equal"] < row["prompts"]]
    print(json.dumps({"families": len(rows), "differ": differ, **rows}))
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
