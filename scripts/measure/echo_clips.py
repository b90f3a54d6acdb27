#!/usr/bin/env python
"""Whether EchoPrune's scores of a video's tokens (arXiv 2605.10050) beat those of `evs`, on clips, in vLLM.

    scripts/measure/echo_clips.py    # demo-qwen-clips from scripts/train/assemble_demo.py clips-qwen; about 20 minutes

`evs` scores a token by one minus its cosine to the token at its place in the frame before. Variants: `nearest` takes the most
alike token in the 3 x 3 places around that; `echo` subtracts from the score of `evs` how well a softmax (temperature 0.5) over
the cosines to all tokens of the frame before reconstructs the token, as the paper does; `echo, near` over 3 x 3 places. The
paper's relevance to the question is left out, and the first frame is kept whole as in `evs`. 160 clips of each kind. The
reducer reads the variant from the environment, so this script runs itself in the engine's process as the plugin's `evs`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
VARIANTS = ("evs", "nearest", "echo", "echo, near")
CLIPS = 160  # of a kind

PATCH = """
        import os
        variant, (t, h, w) = os.environ.get("VARIANT", "evs"), signals.grid
        if variant == "echo":
            cosines = frames[1:] @ frames[:-1].transpose(1, 2)
            change = change - ((cosines / 0.5).softmax(-1) * cosines).sum(-1)
        elif variant != "evs":
            pad = torch.nn.functional.pad
            grid = frames.reshape(t, h, w, -1).permute(0, 3, 1, 2)
            before, inside = pad(grid[:-1], (1, 1, 1, 1)), pad(torch.ones(h, w, dtype=torch.bool), (1, 1, 1, 1))
            shifts = [(slice(y, y + h), slice(x, x + w)) for y in range(3) for x in range(3)]
            cosines = torch.stack([(grid[1:] * before[:, :, y, x]).sum(1) for y, x in shifts])
            masks = torch.stack([inside[y, x] for y, x in shifts])[:, None]
            cosines = cosines.masked_fill(~masks, -torch.inf)
            echo = ((cosines / 0.5).softmax(0) * cosines.masked_fill(~masks, 0)).sum(0).flatten(1)
            change = 1 - cosines.amax(0).flatten(1) if variant == "nearest" else change - echo
"""


def main() -> None:
    """Patch `evs` in this checkout, ask all clips with each variant, and put the file back."""
    from vlmcompress import engines
    from vlmcompress.engines import EngineSettings
    from vlmcompress.evaluation.accuracy import clips
    from vlmcompress.evaluation.accuracy.accuracy import FIRST_TOKENS, EvalOptions, evaluate
    from vlmcompress.evaluation.accuracy.compare import compare
    from vlmcompress.quantization.run import quantize
    from vlmcompress.recipe import resolve

    clips.FAMILIES.update(dict.fromkeys(clips.FAMILIES, CLIPS))
    source, file = ROOT / "build/demo-qwen-clips", ROOT / "vlmcompress/reduction/methods/evs.py"
    text, engine, scores, rows = file.read_text(), engines.get_engine("vllm"), {}, []
    at = "        scores = torch.cat("
    try:
        file.write_text(text.replace(at, PATCH.removeprefix("\n") + at))
        with tempfile.TemporaryDirectory() as folder:
            for variant in VARIANTS:
                out = Path(folder) / variant
                recipe = {"model": str(source), "out": str(out), "scheme": "none", "reduce": "evs:0.5"}
                quantize(resolve(recipe).recipe)
                os.environ["VARIANT"] = variant
                settings = EngineSettings(logprobs=FIRST_TOKENS, max_num_seqs=256, dtype="float32")
                options = EvalOptions(engine, engine, settings=settings, journal=Path(folder) / "answers.jsonl")
                results = evaluate(out, source, ["clips"], None, options)
                scores[variant] = [sample.candidate_score for sample in results.samples]
                suite = results.suites[0]
                row = {"variant": variant, "overall": suite.overall.model_dump(mode="json")}
                row["families"] = {name: c.difference for name, c in suite.families.items()}
                row["to evs"] = compare(scores["evs"], scores[variant]).model_dump(mode="json")
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    finally:
        file.write_text(text)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
