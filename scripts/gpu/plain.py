"""Calibrating and solving where there is no vLLM: seconds, peak memory, and how often the host waits for the GPU.

`calibrate` runs `vlmcompress calibrate` and `quantize --stats` on a shallow model, with llm-compressor out of sight, so that
torch, transformers and compressed-tensors alone do it. `block` takes it apart: a plain forward pass over the samples, the same
samples on their way through all blocks with everything observed, and one block solved by several schemes.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpu import shapes
from gpu.part import Place
from gpu.quantizing import Phases, peaks
from gpu.syncs import Watch

SHAPE = "qwen2.5-vl-7b"
SOLVED = ("awq", "gptq", "rtn")


def run(place: Place, what: str) -> dict[str, Any]:
    """Run one of the two parts."""
    with hidden("llmcompressor"):
        return {"calibrate": calibrate, "block": block}[what](place)


@contextlib.contextmanager
def hidden(package: str) -> Iterator[None]:
    """Within the context importing a package fails as if it were not installed."""
    assert package not in sys.modules, f"{package} is imported already"
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def calibrate(place: Place) -> dict[str, Any]:
    """Collect a model's statistics and solve schemes from them, as the command line does."""
    import vlmcompress

    source = shapes.model(place, SHAPE, "shallow", apart=True)
    stats, phases = source.with_name("stats"), Phases()
    recipe = shapes.recipe(place, source, stats, "gptq", {})
    began = time.monotonic()
    manifest = vlmcompress.calibrate(recipe, overwrite=True, progress=phases).manifest
    seconds, solve_seconds = time.monotonic() - began, {}
    for scheme in SOLVED[:2]:
        calibration = {"data": recipe.calibrate.data, "samples": recipe.calibrate.samples, "stats": str(stats)}
        out = source.with_name(f"from-stats-{scheme}")
        solving = vlmcompress.Recipe.of(str(source), str(out), scheme=scheme, calibrate=calibration)
        began = time.monotonic()
        vlmcompress.quantize(solving, overwrite=True)
        solve_seconds[scheme] = round(time.monotonic() - began, 2)
        shutil.rmtree(out)
    shutil.rmtree(stats)
    return {
        "seconds": round(seconds, 2),
        "phases": manifest.get("timing") or phases.seconds(),
        "samples": recipe.calibrate.samples,
        "solve_seconds": solve_seconds,
        **peaks(),
    }


def block(place: Place) -> dict[str, Any]:
    """Observe all blocks, watching the second, then run the plain model over the same samples."""
    import torch

    from vlmcompress import models
    from vlmcompress.calibration.observe import Wanted, observe
    from vlmcompress.runs.inputs import read_inputs
    from vlmcompress.statistics.inputs import NEEDS

    source = shapes.model(place, SHAPE, "shallow", apart=True)
    vlm = models.load(source)
    recipe = shapes.recipe(place, source, source.with_name("unused"), "gptq", {})
    rows, blocks = read_inputs(recipe, vlm, "the check").batches, models.decoder_blocks(vlm.model, vlm.spec)
    watch, kept = Watch(), dict[str, Any]()

    def observed(watched: bool) -> None:
        """Take all samples through all blocks; the statistics of the second are kept, the others are dropped."""
        for layer, capture in observe(vlm, blocks, rows, Wanted(NEEDS), twice=False):
            if layer == 1:
                kept.update(capture.stats)
            if watched:
                (watch.start if layer == 0 else watch.stop)()

    observed(False)  # not measured: kernels are loaded
    all_blocks = timed(lambda: observed(False))
    observed(True)
    solving = {name: round(solved(vlm, blocks[1], kept, name), 3) for name in SOLVED}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vlm.model.to(device)

    def forward() -> None:
        with torch.no_grad():
            for row in rows:
                vlm.model.model(**{name: value.to(device) for name, value in row.items() if name != "modality"})

    forward()
    plain, alone = timed(forward), Watch()
    alone.start()
    forward()
    return {
        "samples": len(rows),
        "tokens": sum(row["input_ids"].shape[1] for row in rows),
        "forward_seconds": round(plain, 3),
        "observe_seconds": round(all_blocks, 3),
        "block": watch.found(len(rows)),
        "forward": alone.found(len(rows)),
        "solve_seconds": solving,
        **peaks(),
    }


def solved(vlm: Any, groups: Any, stats: Any, scheme: str) -> float:
    """Seconds in which a block is solved by a scheme, its weights brought to the GPU first."""
    import torch

    from vlmcompress import quantizers
    from vlmcompress.calibration.solve import QuantMethod, solve_block

    module = quantizers.REGISTRY.get(scheme)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def weight(name: str) -> Any:
        return vlm.model.get_submodule(name).weight.detach().to(device)

    weights = {name: weight(name) for group in groups for name in group.linears}
    norms = {group.smooth: weight(group.smooth) for group in groups if group.smooth and group.smooth_kind == "norm"}
    method, block_stats = QuantMethod(module, module.Options()), dict(stats)  # what is solved is emptied
    with torch.no_grad():
        return timed(lambda: solve_block(groups, weights, block_stats, method, torch.bfloat16, None, norms))


def timed(work: Callable[[], Any]) -> float:
    """Seconds that some work takes, what it leaves running on the GPU included."""
    import torch

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began
