#!/usr/bin/env python
"""Speed of vLLM's server with and without a reducer: a random model of about 0.5 B parameters, images of 1,024 tokens.

scripts/measure/bench_serving.py --work DIR --prepare        write the checkpoints: minutes, once
scripts/measure/bench_serving.py --work DIR [--groups cold,quantized,warm] [--turns 2] [--out eval/serving.json]
scripts/measure/bench_serving.py --render [FILE]             the docs' tables of FILE, or of eval/serving.json

The servers of a group are up together and asked one at a time, in an order that is reversed from turn to turn, so that each
ratio is between neighbours in time and a machine that drifts favours nobody. Images are unique, answers of equal length.
Before each burst the server answers one request that is not measured: a machine may have taken pages from it while it was
idle. `--out` is written after every turn, and groups in it that are not run now stay.

latency: one client. TTFT is the time from sending to the first token: upload, decoding the image, encoder, prefill.
load: twelve clients. Requests per second, TTFT with its queue, and how many requests were seen running at once.
again: four clients, warm: everything they ask has been asked before, so that caches hold it.

In cold groups prefix cache and image processor cache are off, and that nothing came from one is checked. `floor` keeps one
visual token, so what its TTFT is of the full one's is the part of prefill that no reducer can save. The KV
cache has the same size everywhere: room for four full requests. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import serving_table
from serving_burst import WARM_UP, burst, state, warm_up
from serving_model import ROOT, SIDE, Variant, prepare

from vlmcompress.engines.vllm.serve import Server, vllm_server
from vlmcompress.evaluation import sides
from vlmcompress.evaluation.speed.prompts import open_prompts
from vlmcompress.evaluation.speed.serving import ALWAYS, FLAGS
from vlmcompress.reduction.choice import parse_reducer as parse_reducer
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import ProgressBar

RESULTS = ROOT / "eval/serving.json"
METHOD = "dart"
SHARES = ("1/2", "1/4", "1/9")
FLOOR = f"uniform:1/{SIDE * SIDE}"
REDUCED = tuple(f"{METHOD}:{share}" for share in SHARES)
BF16 = tuple(Variant("bf16", reduce) for reduce in ("", *REDUCED))
GROUPS: dict[str, tuple[Variant, ...]] = {
    "cold": (*BF16, Variant("bf16", FLOOR)),
    "quantized": (
        Variant("bf16"),
        *(Variant(scheme, reduce) for scheme in ("int8", "rtn") for reduce in ("", REDUCED[1])),
    ),
    "warm": BF16,
}
BLOCK, BLOCKS = 32, 144  # tokens in a block of the KV cache, and blocks: 143 can be used, a full request takes 34
RESIDENT = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "2048")


@contextlib.contextmanager
def servers(group: str, folders: Mapping[Variant, Path], progress: ProgressBar) -> Iterator[dict[Variant, Server]]:
    """All servers of a group, up; two start at a time."""
    flags = [*FLAGS[state(group)], *ALWAYS, *RESIDENT]
    with contextlib.ExitStack() as stack:

        def start(variant: Variant) -> Server:
            return stack.enter_context(vllm_server(folders[variant], flags=flags, images=1))

        progress(f"{group}: starting vLLM", 0, len(folders))
        with ThreadPoolExecutor(2) as starters:
            up = dict(zip(folders, starters.map(start, folders), strict=True))
        yield up


def run_group(
    group: str, folders: Mapping[Variant, Path], turns: int, progress: ProgressBar
) -> Iterator[list[dict[str, Any]]]:
    """Run the bursts of a group, turn by turn; returns rows."""
    prompts = open_prompts(None, [(448, 448)], *(2 * (next(iter(folders.values())),)), seed=0)
    kinds = ("again",) if group == "warm" else ("latency", "load")
    with servers(group, folders, progress) as up:
        for number, running in enumerate(up.values()):
            progress(f"{group}: warming up", number, len(up))
            warm_up(running, prompts, group, WARM_UP)
        for turn in range(turns):
            rows: list[dict[str, Any]] = []
            for kind in kinds:
                for variant in list(up)[:: 1 if turn % 2 == 0 else -1]:
                    progress(f"{group}, turn {turn + 1}: {kind} {variant}", len(rows), len(kinds) * len(up))
                    row = {"variant": str(variant), "load": kind, "turn": turn}
                    rows.append(row | burst(up[variant], prompts, group, variant, folders[variant], kind, turn))
            yield rows


def reducer_ms(rounds: int = 50) -> dict[str, float]:
    """Measure the milliseconds that each reducer takes for one image's tokens, to choose and gather, as the plugin calls it."""
    import torch
    from serving_model import TEXT

    from vlmcompress.reduction import methods
    from vlmcompress.reduction.methods import Signals

    features = torch.randn(SIDE * SIDE, TEXT["hidden_size"], dtype=torch.bfloat16)
    times: dict[str, list[float]] = {reduce: [] for reduce in REDUCED}
    for reduce in REDUCED * rounds:
        chosen, start = parse_reducer(reduce), time.perf_counter()
        signals = Signals((1, SIDE, SIDE), features=features)
        methods.reduce(chosen.reducer, signals).apply(features)
        times[reduce].append(time.perf_counter() - start)
    return {reduce: 1000 * statistics.median(seconds) for reduce, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder for the checkpoints: 4 GB")
    parser.add_argument("--prepare", action="store_true", help="write the checkpoints, measure nothing")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--layers", type=int, default=28, help="of the language model; fewer for a trial")
    parser.add_argument("--out", type=Path, help="write the rows here after every turn; other groups in it stay")
    parser.add_argument("--render", type=Path, nargs="?", const=RESULTS, metavar="FILE", help="print the tables of one")
    options = parser.parse_args()
    if options.render:
        show(json.loads(options.render.read_text()))
        return
    if options.work is None:
        parser.error("--work is needed: a folder for the checkpoints")
    groups = options.groups.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"--groups: no such group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    variants = dict.fromkeys(variant for group in groups for variant in GROUPS[group])
    folders = {variant: prepare(variant, options.work, options.layers) for variant in variants}
    if not options.prepare:
        measure_groups(groups, folders, options)


def measure_groups(groups: Sequence[str], folders: Mapping[Variant, Path], options: argparse.Namespace) -> None:
    """Run groups, one after the other; when one fails its measurements stay, and the next one is run."""
    kept = options.out is not None and options.out.is_file()
    results: dict[str, Any] = json.loads(options.out.read_text()) if kept else {}
    progress, failed = ProgressBar(), []
    for group in groups:
        served, rows = {variant: folders[variant] for variant in GROUPS[group]}, []
        began = time.monotonic()
        record = {**sides.origin(), "layers": options.layers, "reducer_ms": reducer_ms()}
        try:
            for turn in run_group(group, served, options.turns, progress):
                rows += turn
                results[group] = {**record, "seconds": round(time.monotonic() - began), "rows": rows}
                print(f"{group}: {turn[0]['turn'] + 1} of {options.turns} turns", file=sys.stderr)
                if options.out:
                    options.out.write_text(json.dumps(results, indent=1) + "\n")
        except UserError as error:
            failed.append(f"{group}: {error}")
    progress.close()
    show({group: results[group] for group in GROUPS if group in results})
    if failed:
        sys.exit("\n".join(failed))


def show(results: Mapping[str, Any]) -> None:
    """Print the tables, and as the last line the figures."""
    print(serving_table.render(results))
    print(json.dumps(serving_table.summarise(results)))


if __name__ == "__main__":
    main()
