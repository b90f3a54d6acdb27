#!/usr/bin/env python
"""Compare what may stand where an image is left out: how far each token moves a demo model's answers from those without it.

    scripts/measure/stand_in.py [--questions 60]

Frozen validation questions about two images, each asked twice, without the first image and without the second. One token is
put at the position of the image's first one; the standard is the prompt in which none is. Of the written answer's tokens:
the share of answers whose every most likely token is the standard's, and the mean divergence KL(standard || candidate).
The test split is not looked at.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.demo.measure import DATA, load_rows, messages
from vlmcompress.hf_hooks.units import Call, units
from vlmcompress.models import VLM, load

WORDS = (".", ",", "\n", "image", "none")
SPECIAL = ("pad", "eos", "image")


def candidates(vlm: VLM) -> dict[str, Tensor]:
    """Rows `[d]` that may stand there, by name."""
    table: Any = vlm.model.get_input_embeddings().weight  # type: ignore[union-attr]
    tokenizer = vlm.processor.tokenizer
    image = getattr(vlm.model.config, vlm.spec.image_token)
    ids = {"pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id, "image": image}
    rows = {"zeros": torch.zeros_like(table[0]), "mean of the table": table.mean(0)}
    rows |= {f"special token {name}": table[ids[name]] for name in SPECIAL}
    return rows | {repr(word): table[tokenizer.encode(word, add_special_tokens=False)[-1]] for word in WORDS}


def prompt(vlm: VLM, row: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """A question with its written answer as the model's inputs, and the number of the answer's tokens."""
    turns, tokenizer = messages(row), vlm.processor.tokenizer
    text = vlm.processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    images = [part["image"] for part in turns[0]["content"] if part["type"] == "image"]
    space = "" if text.endswith("\n") else " "
    text += space + row["answer"] + tokenizer.eos_token
    answer = tokenizer.encode(space + row["answer"] + tokenizer.eos_token, add_special_tokens=False)
    return dict(vlm.processor(text=[text], images=images, return_tensors="pt")), len(answer)


def arguments(vlm: VLM, inputs: dict[str, Tensor]) -> tuple[Any, Tensor, Tensor]:
    """The language model, its embeddings `[1, s, d]` and positions `[..., s]`."""
    captured: dict[str, Any] = {}
    text = vlm.model.get_submodule(vlm.spec.layers.rpartition(".")[0])
    hook = text.register_forward_pre_hook(lambda _, args, kwargs: captured.update(kwargs), with_kwargs=True)
    vlm.model(**inputs, use_cache=False)
    hook.remove()
    embeds, positions = captured["inputs_embeds"], captured.get("position_ids")
    return text, embeds, torch.arange(embeds.shape[1])[None] if positions is None else positions


@torch.inference_mode()
def compare(vlm: VLM, rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Of each candidate the share of equal answers, and the mean divergence."""
    rows_of, head = candidates(vlm), vlm.model.get_output_embeddings()
    sums = {name: [0.0, 0.0] for name in rows_of}
    for row in rows:
        inputs, answer = prompt(vlm, row)
        text, embeds, positions = arguments(vlm, inputs)

        def scores(e: Tensor, keep: Tensor, text=text, positions=positions, answer=answer) -> Tensor:
            mask = torch.ones(1, int(keep.sum()), dtype=torch.int64)
            kwargs = {"inputs_embeds": e[:, keep], "position_ids": positions[..., keep], "attention_mask": mask}
            return head(text(**kwargs, use_cache=False).last_hidden_state)[0, -answer - 1 : -1].log_softmax(-1)

        for unit in units(vlm, Call(inputs)):
            keep = torch.ones(embeds.shape[1], dtype=torch.bool)
            keep[unit.columns] = False
            standard = scores(embeds, keep)
            keep[unit.columns[0]] = True
            for name, embedding in rows_of.items():
                changed = embeds.clone()
                changed[0, unit.columns[0]] = embedding
                logits = scores(changed, keep)
                sums[name][0] += bool((logits.argmax(-1) == standard.argmax(-1)).all())
                sums[name][1] += float((standard.exp() * (standard - logits)).sum(-1).mean())
    return {name: (same / len(rows) / 2, apart / len(rows) / 2) for name, (same, apart) in sums.items()}


def main() -> None:
    """Print a table for each demo model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=60)
    count = parser.parse_args().questions
    for kind in ("llava", "qwen"):
        vlm = load(DATA.parent / f"demo-{kind}")
        vlm.model.float()
        rows = [row for row in load_rows(kind, "validation") if len(row["image"]) == 2][:count]
        print(f"\ndemo-{kind}, {len(rows)} questions\n\n| token | same answers | divergence |\n|---|---|---|")
        for name, (same, apart) in sorted(compare(vlm, rows).items(), key=lambda item: item[1][1]):
            print(f"| {name} | {same:.1%} | {apart:.4f} |")


if __name__ == "__main__":
    main()
