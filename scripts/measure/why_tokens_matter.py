#!/usr/bin/env python
"""Find out why demo-smol answers worse when a reducer drops a quarter of its visual tokens: one change at a time, paired.

    scripts/train/assemble_demo_smol.py                  puts the model together, once
    scripts/measure/why_tokens_matter.py --train 45      trains its adapters on with gaps, and without: 45 minutes each
    scripts/measure/why_tokens_matter.py                 asks; goes on where it was; writes eval/why_tokens_matter.json
    scripts/measure/why_tokens_matter.py --render        prints the docs' table from that file

demo-smol's 81 visual tokens of an image are nine entries of nine words ("row 1 column 2 : large red circle white",
`eval/demo/smol/table.py`), so what each token says, and which entry a question is about, is certain. Every change is to the
language model's input alone: tokens are left out (`coverage:0.75` keeps 61 of 81), hidden, or moved. Questions are of the
validation split, one about each image, so that all are independent; an answer is right if each of its tokens, the stop
included, is the most likely one behind those before. Losses are paired with the answers to all tokens, with 95% intervals.

`--train` continues the shipped adapters by the training that made them, with up to half of each image's tokens left out at
random, and, as a control, with none left out. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from eval.demo.smol import package
from eval.demo.smol.adapter import merge
from eval.demo.smol.assemble import TRAINED, tokenizer_of
from eval.demo.smol.reading import Plan, Reading
from eval.demo.smol.sequences import BEFORE, BETWEEN, STOP, training_batch
from eval.demo.smol.table import ENTRIES, WORDS
from eval.world.rows import asked_views, images_of
from vlmcompress import models
from vlmcompress.cli._process import quiet_libraries
from vlmcompress.evaluation.accuracy.compare import compare
from vlmcompress.reduction import methods as reducers
from vlmcompress.reduction.choice import parse

ROOT = Path(__file__).resolve().parents[2]
MODEL, CACHE = ROOT / "build/demo-smol", ROOT / "build/smol"
RESULTS = ROOT / "eval/why_tokens_matter.json"
PLACES = ("colour_at", "object_at", "locate", "read")  # families whose questions are about one entry
OTHERS = ("count", "compare", "scene", "chart", "two_images")
NAMES = ("`row`", "row number", "`column`", "column number", "colon", "word 1", "word 2", "word 3", "background")
PLACE_WORDS = slice(0, 4)
PER_BATCH, RATE, MOST_DROPPED = 6, 3e-4, 0.5
TRAINED_ON = {"gaps": "trained on with gaps", "plain": "trained on without gaps"}


@dataclass(frozen=True, eq=False)
class Question:
    """A question about one view. `tokens [images, 81, d]`: visual tokens; `entry`: the only one that it is about, None where
    there is no such; `number`: of the question, the seed of what is random about it."""

    family: str
    number: int
    text: str
    answer: str
    tokens: Tensor
    entry: int | None

    def mark(self, value: bool = True) -> Tensor:
        """A mark for each word, `[images, entries, words]` bool."""
        return torch.full((len(self.tokens), ENTRIES, WORDS), value)


@dataclass(frozen=True, eq=False)
class Shown:
    """What the language model is shown of a question's images.

    kept: `[images, entries, words]` bool, tokens that stay.
    hidden: the others are hidden from attention instead of left out.
    positions: of all tokens, `[n]`, and that of the text behind them; None: one after the other.
    """

    kept: Tensor
    hidden: bool = False
    positions: tuple[Tensor, int] | None = None


Change = Callable[[Question], Shown]


@functools.cache
def kept_by(method: str, question: Question) -> Tensor:
    """Mark the tokens that a reducer keeps, `[images, entries, words]` bool."""
    reducer, grid = parse(method), (1, ENTRIES, WORDS)
    signals = [reducers.Signals(grid, features=tokens) for tokens in question.tokens]
    kept = [reducers.reduce(reducer.module, image, reducer.options).target >= 0 for image in signals]
    return torch.stack(kept).view(-1, ENTRIES, WORDS)


def covered(question: Question) -> Tensor:
    """Mark the tokens that coverage keeps."""
    return kept_by("coverage:0.75", question)


def compact(question: Question) -> Shown:
    """Leave out what coverage drops, and number what is left without gaps."""
    kept = covered(question)
    return Shown(kept, positions=((kept.flatten().cumsum(0) - 1).clamp(min=0), int(kept.sum())))


def spread(question: Question) -> Shown:
    """Leave nothing out, with as many gaps between positions as coverage makes, at random."""
    count, gaps = covered(question).numel(), int((~covered(question)).sum())
    places = sorted(Random(question.number).sample(range(count + gaps), count))
    return Shown(question.mark(), positions=(torch.tensor(places), count + gaps))


def covered_within(question: Question) -> Shown:
    """Leave out what coverage drops in the entry that the question is about, and nothing else."""
    kept = question.mark()
    kept[:, question.entry] = covered(question)[:, question.entry]
    return Shown(kept)


def covered_but(question: Question, words: slice = slice(None), behind: int = 0) -> Shown:
    """Leave out what coverage drops, except for `words` of the entry that the question is about, or of one `behind` it."""
    assert question.entry is not None
    kept = covered(question).clone()
    kept[:, (question.entry + behind) % ENTRIES, words] = True
    return Shown(kept)


def without_word(question: Question, word: int) -> Shown:
    """Leave out one word of the entry that the question is about."""
    kept = question.mark()
    kept[:, question.entry, word] = False
    return Shown(kept)


def without_two_entries(question: Question) -> Shown:
    """Leave out two whole entries, 18 words, that the question is not about."""
    kept, others = question.mark(), [entry for entry in range(ENTRIES) if entry != question.entry]
    kept[:, Random(question.number).sample(others, 2)] = False
    return Shown(kept)


ALL, COVERAGE, COMPACT, RANDOM = "nothing", "`coverage:0.75`", "the same, positions `compact`", "`random:0.75`"
ANYWHERE: dict[str, Change] = {
    ALL: lambda question: Shown(question.mark()),
    COVERAGE: lambda question: Shown(covered(question)),
    "the same, hidden from attention": lambda question: Shown(covered(question), hidden=True),
    COMPACT: compact,
    "nothing, as many gaps in positions": spread,
    RANDOM: lambda question: Shown(kept_by("random:0.75", question)),
}
BY_ENTRY: dict[str, Change] = {  # for questions about one entry
    "coverage's choice in the asked entry alone": covered_within,
    "coverage's choice in all other entries": covered_but,
    "coverage's choice but the asked entry's place words": partial(covered_but, words=PLACE_WORDS),
    "coverage's choice but another entry's place words": partial(covered_but, words=PLACE_WORDS, behind=1),
    "two entries that are not asked": without_two_entries,
    **{f"the asked entry's {name}": partial(without_word, word=word) for word, name in enumerate(NAMES)},
}
AFTER_TRAINING = (ALL, COVERAGE, COMPACT, RANDOM)


class Reader:
    """A language model, body and head in float32, that answers questions about visual tokens."""

    def __init__(self, body: Any, head: Any, tokenizer: Any):
        self.body, self.head = body, head
        self.encode: Callable[[str], list[int]] = lambda text: tokenizer(text)["input_ids"]
        self.prefix = self._embedded(self.encode(BEFORE))

    @torch.no_grad()
    def _embedded(self, ids: Sequence[int]) -> Any:
        return self.body.get_input_embeddings()(torch.tensor(ids))

    @torch.inference_mode()
    def right(self, prompts: Sequence[tuple[Question, Shown]]) -> list[bool]:
        """Whether each question is answered right."""
        rows = sorted(enumerate(itertools.starmap(self._row, prompts)), key=lambda row: len(row[1][0]))
        results = [False] * len(rows)
        for start in range(0, len(rows), PER_BATCH):
            numbers, batch = zip(*rows[start : start + PER_BATCH], strict=True)
            embeds, positions, attended, labels = (
                torch.nn.utils.rnn.pad_sequence(list(column), batch_first=True, padding_value=fill)
                for column, fill in zip(zip(*batch, strict=True), (0.0, 0, False, -100), strict=True)
            )
            length = embeds.shape[1]
            visible = attended[:, None] & torch.ones(length, length, dtype=torch.bool).tril()
            visible |= torch.eye(length, dtype=torch.bool)  # padding sees itself
            mask = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None]
            out = self.body(inputs_embeds=embeds, attention_mask=mask, position_ids=positions, use_cache=False)
            for number, states, targets in zip(numbers, out.last_hidden_state, labels[:, 1:], strict=True):
                predicted = self.head(states[:-1][targets != -100]).argmax(-1)
                results[number] = bool((predicted == targets[targets != -100]).all())
        return results

    def _row(self, question: Question, shown: Shown) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Embeddings, positions, what may be attended to, and labels of one prompt with its answer."""
        attended, before = shown.kept.flatten(), len(self.prefix)
        there = torch.ones_like(attended) if shown.hidden else attended
        places, end = shown.positions or (torch.arange(len(there)), len(there))
        prompt, answer = self.encode(question.text + BETWEEN), self.encode(question.answer + STOP)
        text = self._embedded([*prompt, *answer])
        embeds = torch.cat([self.prefix, question.tokens.flatten(0, 1)[there], text])
        positions = torch.cat([torch.arange(before), before + places[there], before + end + torch.arange(len(text))])
        visible = torch.ones(len(embeds), dtype=torch.bool)
        visible[before : before + int(there.sum())] = attended[there]
        labels = torch.full((len(embeds),), -100)
        labels[-len(answer) :] = torch.tensor(answer)
        return embeds, positions, visible, labels


def questions(vlm: models.VLM, per_family: int) -> Iterator[Question]:
    """The first question about each of the first views of a family, of all families with images."""
    features: Any = vlm.model.get_image_features
    for kind, family in enumerate((*PLACES, *OTHERS)):
        views = itertools.islice(asked_views("validation", family, "llava"), per_family)
        for number, (view, turns) in enumerate(views, 1000 * kind):
            pictures = [Image.fromarray(image.draw()[0]) for image in images_of(view)]
            pixels = vlm.processor.image_processor(pictures, return_tensors="pt")["pixel_values"]
            with torch.no_grad():
                tokens = torch.stack(list(features(pixel_values=pixels).pooler_output))
            (text, answer), entry = turns[0], None
            if family in PLACES:
                place = re.search(r"row (\d) column (\d)", f"{text} {answer}")
                assert place is not None
                entry = 3 * int(place[1]) + int(place[2]) - 4
            yield Question(family, number, text, answer, tokens, entry)


class WithGaps(Reading):
    """The training of the shipped adapters, continued, with up to a share `most` of an image's tokens left out at random."""

    most = MOST_DROPPED

    def answer_loss(self, random: Random) -> Tensor:
        """The loss of a batch's answers. What is left out is padding then, which nothing attends to."""
        batch, before = training_batch(self.writer, random, self.weights), len(self.writer.encode(BEFORE))
        for turns in batch.turns:
            image = (turns == 0).nonzero().flatten()[before:].tolist()
            turns[random.sample(image, int(len(image) * random.uniform(0, self.most)))] = -1
        self.questions += sum(map(len, batch.families))
        logits, target, _ = self.learner.answer_logits(batch)
        return functional.cross_entropy(logits, target)


def train(minutes: float, kind: str, work: Path) -> None:
    """Train the shipped adapters on for so many minutes, earlier runs included; the state is `work/kind/reading.pt`."""
    (work / kind).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    language, original = package.load(CACHE)
    training = WithGaps(Plan(minutes, RATE, 0, 600.0, 8), language, tokenizer_of(original), work / kind)
    training.most = MOST_DROPPED if kind == "gaps" else 0.0
    if training.step == 0:
        shipped = load_file(TRAINED)
        with torch.no_grad():
            for name, parameter in training.learned.items():
                parameter.copy_(shipped[name])
                training.ema[name].copy_(shipped[name])
    training.run()


def readers(vlm: models.VLM, work: Path) -> Iterator[tuple[str, Reader]]:
    """The shipped model's language model, and those of the adapters that were trained on."""
    body: Any = vlm.model.get_submodule("model.language_model")
    yield "", Reader(body, vlm.model.get_output_embeddings(), vlm.processor.tokenizer)
    for kind, name in TRAINED_ON.items():
        if (state := work / kind / "reading.pt").is_file():
            language, _ = package.load(CACHE)
            merge(language.model.layers, torch.load(state)["ema"])
            yield name, Reader(language.eval().model, language.lm_head, vlm.processor.tokenizer)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Answer all questions under each change, and keep each change's answers in WORK as soon as they are there."""
    if not (MODEL / "config.json").is_file():
        raise SystemExit(f"{MODEL} is not there; run scripts/train/assemble_demo_smol.py")
    args.work.mkdir(parents=True, exist_ok=True)
    file = args.work / f"rows-{args.per_family}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(row["model"], row["change"]) for row in rows}
    vlm = models.load(MODEL)
    vlm.model.float().eval()
    every = list(questions(vlm, args.per_family))
    for model, reader in readers(vlm, args.work):
        for name, change in (ANYWHERE | BY_ENTRY).items():
            if (model, name) in done or (model and name not in AFTER_TRAINING):
                continue
            prompts = [(each, change(each)) for each in every if name in ANYWHERE or each.entry is not None]
            dropped = sum(float((~shown.kept).sum()) / len(shown.kept) for _, shown in prompts) / len(prompts)
            right = "".join(str(int(each)) for each in reader.right(prompts))
            rows.append({"model": model, "change": name, "dropped": round(dropped, 2), "right": right})
            rows[-1]["families"] = [each.family for each, _ in prompts]
            with file.open("a") as appended:
                appended.write(json.dumps(rows[-1]) + "\n")
            print(f"{model or 'shipped'}, {name}: {right.count('1') / len(right):.1%}", file=sys.stderr, flush=True)
    drops = torch.cat([~covered(each) for each in every]).double().mean((0, 1))
    return {
        "coverage_drops": [round(share, 3) for share in drops.tolist()],
        "rows": [_figures(row, rows) for row in rows],
    }


def _figures(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Exact match by family, and what is lost to all tokens in the shipped model, in questions about a place and in others."""
    full = next(each for each in rows if (each["model"], each["change"]) == ("", ALL))
    before = [right for right, family in zip(full["right"], full["families"], strict=True) if family in row["families"]]
    scores = [(family, float(a), float(b)) for family, a, b in zip(row["families"], before, row["right"], strict=True)]
    figures: dict[str, Any] = {name: row[name] for name in ("model", "change", "dropped")}
    for kind, families in (("places", PLACES), ("others", OTHERS)):
        if pairs := [(a, b) for family, a, b in scores if family in families]:
            lost = compare(*zip(*pairs, strict=True))
            figures[kind] = {key: round(getattr(lost, key), 4) for key in ("candidate", "difference", "low", "high")}
    for family in dict.fromkeys(row["families"]):
        answers = [b for name, _, b in scores if name == family]
        figures[family] = round(sum(answers) / len(answers), 4)
    return figures


def label(row: dict[str, Any]) -> str:
    """The model, where it is not the shipped one, and the change."""
    return ", ".join(part for part in (row["model"], row["change"]) if part)


def render(results: dict[str, Any]) -> str:
    """Render the docs' table: exact match in percent, differences in points with 95% intervals."""
    lines = ["| left out | of 81 | " + " | ".join(PLACES) + " | these four, less nothing left out | others, likewise |"]
    lines.append("|---|---:|" + "---:|" * len(PLACES) + "---|---|")
    for row in results["rows"]:
        cells = [label(row), f"{row['dropped']:.3g}", *(f"{100 * row[family]:.0f}" for family in PLACES)]
        for kind in ("places", "others"):
            points = [100 * row[kind][key] for key in ("difference", "low", "high")] if kind in row else ()
            cells.append("{:+.1f} ({:+.1f} to {:+.1f})".format(*points) if points else "")
        lines.append(f"| {' | '.join(cells)} |")
    drops = ", ".join(f"{name} {share:.0%}" for name, share in zip(NAMES, results["coverage_drops"], strict=True))
    return "\n".join([*lines, "", f"`coverage:0.75` drops, of each word of an entry: {drops}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-family", type=int, default=40, help="questions of each of nine families; default: 40")
    parser.add_argument("--train", type=float, metavar="MINUTES", help="train adapters on instead of asking")
    parser.add_argument("--kind", choices=TRAINED_ON, help="with --train: one of the two trainings; default: both")
    parser.add_argument("--work", type=Path, default=ROOT / "build/smol-words", help="folder of answers and trainings")
    parser.add_argument("--render", action="store_true", help="print the docs' table of the last results")
    args = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    if args.train:
        for kind in [args.kind] if args.kind else TRAINED_ON:
            train(args.train, kind, args.work)
        return
    if not args.render:
        RESULTS.write_text(json.dumps(measure(args), indent=1) + "\n")
    results = json.loads(RESULTS.read_text())
    print(render(results))
    print(json.dumps({label(row): row["places"]["candidate"] for row in results["rows"]}))


if __name__ == "__main__":
    main()
