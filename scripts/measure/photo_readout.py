#!/usr/bin/env python
"""What visual-token reducers leave of things that a tower saw, read out of the tokens without a language model.

    scripts/measure/photo_readout.py --scenes 20                try it
    scripts/measure/photo_readout.py                            goes on from ROWS; the table of docs/measurements.md
    scripts/measure/photo_readout.py --summarise                figures of what there is so far

On scenes of pictures that no training saw, with DINOv2's tokens of them. A readout, LLaVA's projector trained here for
some minutes on the training pictures to say the name of what is under each patch, gives each token a log-probability
for each name; a token that is left counts for the thing under its anchor. A thing is recognized if its name is ahead
of three drawn others (`choice`), or of all (`name`); where no token of it is left, a choice is right in a quarter of
cases. Differences to all tokens are in percent of the things, with an interval of 95%, clustered by scene; the bands
are shares of the image's patches on which nothing stands. `random` has three seeds. The last line is one JSON object.
Needs what `train_demo_photo.py pool` writes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from bench_photo import BANDS, SHARES, settings
from methods_table import points, rows
from reduced_answers import Asker, Questions, encoder_untouched
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from eval.demo.export import export  # noqa: E402
from eval.demo.photo import package, pool, warmup  # noqa: E402
from eval.demo.photo.assemble import join, processor_of  # noqa: E402
from eval.demo.photo.language import begin, tokenizer_of  # noqa: E402
from eval.photo import pictures  # noqa: E402
from eval.photo.pictures import Album  # noqa: E402
from eval.photo.scene import SIDE, Item, sample_scene  # noqa: E402
from eval.photo.vocab import alike  # noqa: E402
from vlmcompress import models  # noqa: E402
from vlmcompress.commands._process import quiet_libraries  # noqa: E402
from vlmcompress.hf_hooks import attach  # noqa: E402
from vlmcompress.recipe.reducer import ReducerChoice  # noqa: E402

OFFERED = 4  # names in a choice
SIZES = ((1, 12), (12, 24), (24, 257))  # patches of a thing
TOKENS = SIDE * SIDE


def projector_of(work: Path, steps: int, words: warmup.Words, album: Album) -> warmup.Projector:
    """The trained readout, kept in `work`."""
    projector, path = warmup.Projector(words.table.embedding_dim), work / f"readout-{steps}.pt"
    if not path.exists():
        warmup.start(projector, words, pool.load(work / "pool", "train", album), steps, Random(0))
        torch.save(projector.state_dict(), path)
    projector.load_state_dict(torch.load(path))
    return projector


def recognized(items: Sequence[Item], under: Tensor, scores: Tensor, names: list[str]) -> dict[str, list[int]]:
    """Of each thing whether its name is chosen, among few and among all, and how many tokens of it are left.

    `under`: [left], number of the thing under each token, or -1; `scores`: [left, names].
    """
    out: dict[str, list[int]] = {"choice": [], "name": [], "tokens": []}
    for number, item in enumerate(items):
        random, mine = Random(f"{item}"), under == number
        others = [name for name in names if not alike(name, item.name)]
        offered = random.sample([item.name, *random.sample(others, OFFERED - 1)], OFFERED)
        total = scores[mine].sum(0)
        best = offered[int(total[[names.index(name) for name in offered]].argmax())]
        if not mine.any():
            best = random.choice(offered)  # there is nothing to see
        out["tokens"].append(int(mine.sum()))
        out["choice"].append(int(best == item.name))
        out["name"].append(int(bool(mine.any()) and names[int(total.argmax())] == item.name))
    return out


class _Reached(Exception):
    """The language model was about to run on `tokens`."""

    def __init__(self, tokens: Tensor):
        self.tokens = tokens


class Readout(Asker):
    """The projector that says names in a LLaVA that reducers are attached to, and scenes."""

    def __init__(self, work: Path, steps: int, split: str, scenes: int):
        self.album = pictures.fetch(work)
        tokenizer = tokenizer_of(self.album)
        torch.manual_seed(0)
        language = begin(tokenizer)
        words = warmup.Words(
            language.get_input_embeddings(), lambda text: tokenizer(text)["input_ids"], self.album.names
        )
        for place in (words.rows, words.columns):
            place.data.zero_()  # a token says what, not where
        self.words, self.targets = words, warmup.Targets(words)
        projector = projector_of(work, steps, words, self.album)
        learned = {f"language.{name}": value for name, value in language.state_dict().items()}
        learned |= {f"projector.{name}": value for name, value in projector.shipped().items()}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            model = join(language.config, tokenizer, package.load(work), learned)
            export("llava", model, tokenizer, folder, "", processor_of(tokenizer))
            vlm = models.load(folder)
        self.scenes = [sample_scene(Random(f"photo/{split}/readout/{k}"), split, self.album) for k in range(scenes)]
        self.drawn = [scene.draw(self.album) for scene in self.scenes]
        images = [{"pixel_values": pool.normalized(drawn.pixels[None])} for drawn in self.drawn]
        super().__init__(vlm, Questions([], images))
        self.prompt = torch.full((1, TOKENS), vlm.model.config.image_token_id)

    @torch.no_grad()
    def read(self, chosen: ReducerChoice | None) -> dict[str, Any]:
        """Of each thing whether its name is chosen, among few and among all, and how many tokens of it are left."""
        things: dict[str, list[float]] = {"scene": [], "background": [], "choice": [], "name": [], "tokens": []}
        left = 0
        with contextlib.ExitStack() as stack:
            attached = stack.enter_context(attach(self.vlm, chosen)) if chosen else None
            if chosen is None or encoder_untouched(chosen.module):
                stack.enter_context(self._remembered())
            for number in range(len(self.scenes)):
                tokens = self._tokens(number)
                patches = attached.images()[0].anchor if attached else torch.arange(TOKENS)
                left += len(patches)
                scores = self.targets.scores(tokens).log_softmax(-1)[:, : self.words.nothing]
                drawn, items = self.drawn[number], self.scenes[number].items
                under = torch.from_numpy(drawn.item.reshape(-1))[patches]
                things["scene"] += [number] * len(items)
                things["background"] += [round(drawn.background(), 4)] * len(items)
                for name, values in recognized(items, under, scores, self.album.names).items():
                    things[name] += values
        return things | {"left": left / TOKENS / len(self.scenes)}

    def _tokens(self, number: int) -> Tensor:
        """What the language model gets of a scene, `[left, hidden]`; it does not run."""
        self._shown = [number]

        def stop(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            raise _Reached(kwargs["inputs_embeds"][0])

        hook = self.vlm.model.model.language_model.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.vlm.model(input_ids=self.prompt, **self.questions.images[number], use_cache=False)
        except _Reached as reached:
            return reached.tokens
        finally:
            hook.remove()
        raise AssertionError("the language model was not called")


def measure(readout: Readout, args: argparse.Namespace) -> None:
    """Append a row for every setting that ROWS lacks."""
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    done = {row["reduce"] for row in kept_rows(args)}
    for group, chosen in settings():
        key = str(chosen or "full")
        if key in done or (args.groups and group not in (*args.groups, "full")):
            continue
        if chosen and skipped(chosen):
            continue
        start = time.process_time()
        row = {"split": args.split, "scenes": args.scenes, "steps": args.steps, "reduce": key, "group": group}
        row |= {"keep": getattr(chosen.options, "keep", None) if chosen else 1.0} | readout.read(chosen)
        with args.rows.open("a") as file:
            file.write(json.dumps(row | {"seconds": round(time.process_time() - start, 1)}) + "\n")
        shown = ", ".join(f"{name} {sum(row[name]) / len(row[name]):.3f}" for name in ("choice", "name"))
        print(f"{time.strftime('%H:%M:%S')} {key}: {shown}", file=sys.stderr, flush=True)


def skipped(chosen: ReducerChoice) -> bool:
    """Whether a setting has to be learnt, is about positions, which no readout looks at, or costs a pass of the tower and is
    not of the first shares."""
    options = chosen.options
    learnt = options.unlearnt or options.scorer is not None
    costly = not encoder_untouched(chosen.module) and options.keep not in SHARES[:3]
    return learnt or options.positions == "compact" or costly


def kept_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows measured so far on these scenes."""
    wanted_rows = (args.split, args.scenes, args.steps)
    return [row for row in rows(args.rows) if (row["split"], row["scenes"], row["steps"]) == wanted_rows]


def parts_of(full: dict[str, Any]) -> dict[str, Tensor]:
    """Which things are in which part of the table, `[things]` bool each; `full`: the row of all tokens."""
    background, sizes = torch.tensor(full["background"]), torch.tensor(full["tokens"])
    parts = {"all": sizes > 0}
    parts |= {f"{low:.0%}-{min(high, 1):.0%}": (background >= low) & (background < high) for low, high in BANDS}
    parts |= {f"{low}-{high - 1} patches": (sizes >= low) & (sizes < high) for low, high in SIZES}
    return {name: mask for name, mask in parts.items() if mask.any()}


def summarise(args: argparse.Namespace) -> dict[str, Any]:
    """Accuracy with all tokens, and for each row and share what it loses, by part of the things."""
    grouped: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in kept_rows(args):
        grouped.setdefault((row["group"], row["keep"] or row["left"]), []).append(row)
    full = grouped.pop(("full", 1.0))
    clusters, parts, figures = torch.tensor(full[0]["scene"]), parts_of(full[0]), []
    for (group, keep), group_rows in grouped.items():
        figure: dict[str, Any] = {"group": group, "keep": keep, "left": round(group_rows[0]["left"], 4)}
        for kind in ("choice", "name"):
            change = _values(group_rows, kind) - _values(full, kind)
            figure[kind] = {name: _interval(change[:, mask], clusters[mask]) for name, mask in parts.items()}
        gone = (_values(group_rows, "tokens") == 0).double()
        figure["gone"] = {name: round(100 * float(gone[:, mask].mean()), 1) for name, mask in parts.items()}
        figures.append(figure)
    accuracy = {
        kind: {name: round(100 * float(_values(full, kind)[:, mask].mean()), 1) for name, mask in parts.items()}
        for kind in ("choice", "name")
    }
    counts = {name: int(mask.sum()) for name, mask in parts.items()}
    return {"split": args.split, "scenes": args.scenes, "things": counts, "full": accuracy, "figures": figures}


def _values(group_rows: list[dict[str, Any]], kind: str) -> Tensor:
    """[seeds, things]"""
    return torch.tensor([row[kind] for row in group_rows]).double()


def _interval(change: Tensor, clusters: Tensor) -> list[float]:
    """The difference to all tokens in percent of the things, and half its interval."""
    return points(change, clusters.unique(return_inverse=True)[1])


def render(summary: dict[str, Any]) -> str:
    """Tables in Markdown, one for each part: a line a row, what choices lose at each share."""
    groups = dict.fromkeys(figure["group"] for figure in summary["figures"])
    shares = sorted({round(figure["keep"], 3) for figure in summary["figures"]}, reverse=True)
    lines = []
    for part, count in summary["things"].items():
        accuracy = [summary["full"][kind][part] for kind in ("choice", "name")]
        lines += [f"\n{part}: of {count} things {accuracy[0]}% chosen and {accuracy[1]}% named with all tokens", ""]
        lines += [
            "| reducer | " + " | ".join(f"{share:.0%}" for share in shares) + " |",
            "|---" * (len(shares) + 1) + "|",
        ]
        for group in groups:
            cells = {round(f["keep"], 3): f for f in summary["figures"] if f["group"] == group}
            shown = (_cell(cells[share], part) if share in cells else "" for share in shares)
            lines.append(f"| {group} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _cell(figure: dict[str, Any], part: str) -> str:
    return "{:+.1f} ± {:.1f}".format(*figure["choice"][part])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "build/photo", help="folder of packages and pool")
    parser.add_argument("--rows", type=Path, default=ROOT / "build/photo-readout.jsonl", help="where rows are kept")
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--steps", type=int, default=600, help="of the readout's training")
    parser.add_argument("--groups", nargs="+", metavar="ROW", help="rows of the table to measure; default: all")
    parser.add_argument("--summarise", action="store_true", help="measure nothing")
    args = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    if not args.summarise:
        measure(Readout(args.work, args.steps, args.split, args.scenes), args)
    summary = summarise(args)
    print(render(summary))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
