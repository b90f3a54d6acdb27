"""mlx-vlm drafts with a folder's MTP head, in a process of its own: importing its models changes transformers' `AutoProcessor`.

    python -m tests.kit.mlx_drafts FOLDER

Prints JSON: for each of `PROMPTS` the tokens without drafts and with them, and the numbers of drafted and accepted tokens.
"""

from __future__ import annotations

import json
import sys

import mlx.core as mx
import mlx_vlm
from mlx_vlm.generate import generate_step
from mlx_vlm.speculative.drafters import load_drafter

from tests.kit.mtp_oracle import PROMPTS


def main(folder: str) -> None:
    model, processor = mlx_vlm.load(folder)
    draft, kind = load_drafter(folder)
    options = {"draft_model": draft, "draft_kind": kind, "draft_block_size": 2}
    rounds, accepted, rows = 0, 0, []
    for prompt in PROMPTS:
        tokens = mx.array(processor.tokenizer([prompt], return_token_type_ids=False)["input_ids"])
        common = (tokens, model, None, mx.ones_like(tokens))
        plain, drafted = (
            [int(token) for token, _ in generate_step(*common, max_tokens=40, temperature=0.0, **settings)]
            for settings in ({}, options)
        )
        rows.append(
            (plain, drafted, draft.speculative_total_drafted - rounds, draft.speculative_total_accepted - accepted)
        )
        rounds, accepted = draft.speculative_total_drafted, draft.speculative_total_accepted
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1])
