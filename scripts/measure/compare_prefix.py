#!/usr/bin/env python
"""Statistics behind unquantized blocks against statistics behind quantized ones, on a demo model, without an engine.

    scripts/measure/compare_prefix.py [--model eval/demo/demo-llava] [--samples 64] [--held-out 64]

Each scheme is solved in both forms. For held-out questions with their answers: the relative squared error of what the
decoder puts out, for visual, prompt and answer tokens, and the KL divergence (nats) of the answer's next-token
distributions from the original's. The layers' recorded errors are shown, too, but each form measures them on its own inputs.
The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
ROOT = Path(__file__).resolve().parents[2]
SCHEMES: dict[str, tuple[str, dict]] = {
    "gptq w4 g128": ("gptq", {}),
    "gptq w3 g128": ("gptq", {"bits": 3}),
    "gptq w2 g32": ("gptq", {"bits": 2, "group_size": 32}),
    "awq w4 g128": ("awq", {}),
    "awq w3 g128": ("awq", {"bits": 3}),
    "int8": ("int8", {}),
}


def outputs(vlm, batches: list[dict]) -> list[dict]:
    """Compute for each sample the decoder's output `[tokens, hidden]` and, where an answer token is next, log-probabilities."""
    import torch

    found = []
    for batch in batches:
        inputs = {key: value for key, value in batch.items() if key != "modality"}
        modality = batch["modality"][0]
        with torch.no_grad():
            hidden = vlm.model.model(**inputs).last_hidden_state[0]
            before_answer = (modality == 3).nonzero().squeeze(1)
            logits = vlm.model.lm_head(hidden[before_answer]).float()
        found.append({"hidden": hidden.float(), "modality": modality, "log_p": logits.log_softmax(-1)})
    return found


def distance(now: list[dict], original: list[dict]) -> dict[str, float]:
    """Compute the relative squared error of outputs by modality, over all samples, and the mean KL over answer tokens."""
    from vlmcompress.statistics.inputs import MODALITIES

    result = {}
    for code, name in enumerate(MODALITIES, start=1):
        pairs = [
            (a["hidden"][a["modality"] == code], b["hidden"][b["modality"] == code])
            for a, b in zip(now, original, strict=True)
        ]
        wrong = sum(float((a - b).square().sum()) for a, b in pairs)
        result[name] = wrong / sum(float(b.square().sum()) for _, b in pairs)
    kl = [(b["log_p"].exp() * (b["log_p"] - a["log_p"])).sum(-1) for a, b in zip(now, original, strict=True)]
    return result | {"kl": float(sum(one.sum() for one in kl)) / sum(len(one) for one in kl)}


def compress(folder: Path, scheme: str, options: dict, batches: list[dict], stats) -> tuple:
    """Quantize the model; returns it, seconds, and recorded errors of the layers; `stats` None: the sequential form."""
    import torch

    from vlmcompress import models, quantizers
    from vlmcompress.blocks.solve import QuantMethod
    from vlmcompress.blocks.store import BlockStore
    from vlmcompress.compression.blocks import compress, solve_blocks
    from vlmcompress.models import decoder_blocks

    vlm, module = models.load(folder), quantizers.REGISTRY.get(scheme)
    blocks, method, began = (
        decoder_blocks(vlm.model, vlm.spec),
        QuantMethod(module, module.Options(**options)),
        time.perf_counter(),
    )
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        store = BlockStore(Path(place) / "store", "compare", resume=False)
        if stats is None:
            compress(vlm, blocks, method, batches, store)
        else:
            solve_blocks(vlm.model, blocks, method, store, stats, norm_offset=vlm.spec.norm_offset)
        seconds = time.perf_counter() - began
        errors = [e for layer in range(len(blocks)) for e in store.load(layer, weights=False).errors.values()]
    return vlm, seconds, {name: sum(e[name] for e in errors) / len(errors) for name in ("text", "vision", "answer")}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "eval" / "demo" / "demo-llava")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the calibration samples")
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES), choices=list(SCHEMES))
    args = parser.parse_args()
    from vlmcompress import models
    from vlmcompress.calibration import statistics_folder
    from vlmcompress.commands import _process as terminal
    from vlmcompress.common import text
    from vlmcompress.compression.calibrate import calibrate
    from vlmcompress.data import bundled, encode, load_samples
    from vlmcompress.recipe import resolve

    terminal.quiet_libraries()
    vlm = models.load(args.model)
    data = bundled(args.model, "calibration")
    batches = encode(load_samples(data, samples=args.samples, seed=args.seed), vlm)
    held_out = encode(load_samples(bundled(args.model, "test"), samples=args.held_out, seed=1), vlm)
    original, rows = outputs(vlm, held_out), []
    with tempfile.TemporaryDirectory() as place, terminal.stdout_kept_clean():
        given = {"model": str(args.model), "out": f"{place}/stats", "scheme": "none", "seed": args.seed}
        began = time.perf_counter()
        calibrate(resolve(given | {"calibrate": {"data": str(data), "samples": args.samples}}).recipe)
        collecting, stats = time.perf_counter() - began, statistics_folder.read(Path(place) / "stats")
        for name in args.schemes:
            for prefix, source in (("float", stats), ("quantized", None)):
                model, seconds, recorded = compress(args.model, *SCHEMES[name], batches, source)
                found = distance(outputs(model, held_out), original)
                rows.append(
                    {"scheme": name, "prefix": prefix, "seconds": round(seconds, 2), **found, "recorded": recorded}
                )
    columns = ("text", "vision", "answer", "kl")
    table = [("scheme", "prefix", "seconds", *columns, "recorded vision")]
    for row in rows:
        figures = [f"{row[name]:.3e}" for name in columns]
        table.append((row["scheme"], row["prefix"], row["seconds"], *figures, f"{row['recorded']['vision']:.3e}"))
    print(text.table(table, indent=""))
    print(
        json.dumps(
            {"model": args.model.name, "samples": args.samples, "calibrate_seconds": round(collecting, 2), "rows": rows}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
