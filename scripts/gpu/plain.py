"""Calibrating and solving where there is no vLLM: seconds, peak memory, and how often the host waits for the GPU.

`calibrate` runs `vlmcompress calibrate` and `quantize --stats` on a shallow model, first with llm-compressor out of sight. If
the package can't do without it, that is said and it is let in; where it isn't installed the part is skipped. `block` needs
nothing of the kind: it runs the model over the samples, once as it is and once with the statistics of one block collected, and
solves that block.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpu import shapes
from gpu.part import Place, Skipped
from gpu.quantizing import Phases, peaks
from gpu.syncs import Watch

SHAPE = "qwen2.5-vl-7b"
SOLVED = ("awq", "gptq", "rtn")


def run(place: Place, what: str) -> dict[str, Any]:
    """Run one of the two parts."""
    return {"calibrate": calibrate, "block": block}[what](place)


def calibrate(place: Place) -> dict[str, Any]:
    """Collect a model's statistics and solve schemes from them."""
    import vlmcompress

    source = shapes.model(place, SHAPE, "shallow")
    stats = source.with_name("stats")
    recipe = shapes.recipe(place, source, stats, "gptq", {})
    try:
        with hidden("llmcompressor"):
            found, alone = _calibrated(recipe), True
    except ImportError:
        if importlib.util.find_spec("llmcompressor") is None:
            raise Skipped("vlmcompress calibrate needs llm-compressor, which is not installed") from None
        found, alone = _calibrated(recipe), False
    solved = {}
    for scheme in SOLVED[:2]:
        more = {"data": recipe.calibrate.data, "samples": recipe.calibrate.samples, "stats": str(stats)}
        out = source.with_name(f"from-stats-{scheme}")
        own = vlmcompress.Recipe.of(str(source), str(out), scheme=scheme, calibrate=more)
        began = time.monotonic()
        vlmcompress.quantize(own, overwrite=True)
        solved[scheme] = round(time.monotonic() - began, 2)
        shutil.rmtree(out)
    shutil.rmtree(stats)
    return {"without_llm_compressor": alone, **found, "solve_seconds": solved, **peaks()}


def _calibrated(recipe: Any) -> dict[str, Any]:
    """Calibrate, watching the second block."""
    import vlmcompress

    phases, watch, marks = Phases(), Watch(), list[float]()

    def progress(label: str, done: int, total: int) -> None:
        phases(label, done, total)
        if label != "calibrating" or total <= 0:
            return
        share = done / total * blocks
        if len(marks) == 0 and share >= 1:
            marks.append(share)
            watch.start()
        elif len(marks) == 1 and share >= 2:
            marks.append(share)
            watch.stop()

    blocks = _blocks(recipe.model)
    began = time.monotonic()
    vlmcompress.calibrate(recipe, overwrite=True, progress=progress)
    seconds = time.monotonic() - began
    samples = (marks[1] - marks[0]) * recipe.calibrate.samples if len(marks) == 2 else 0
    return {"seconds": round(seconds, 2), "phases": phases.seconds(), "block": watch.found(samples)}


def _blocks(folder: Any) -> int:
    from vlmcompress import models

    return models.read_config(folder)["text_config"]["num_hidden_layers"]


@contextlib.contextmanager
def hidden(package: str) -> Iterator[None]:
    """Within the context importing a package fails as if it were not installed. ImportError if it is imported already."""
    if package in sys.modules:
        raise ImportError(f"{package} is imported already")
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def block(place: Place) -> dict[str, Any]:
    """Collect the statistics of one block during plain forward passes, and solve it."""
    import torch

    from vlmcompress import models
    from vlmcompress.compression.inputs import read_inputs
    from vlmcompress.statistics.inputs import NEEDS, GroupStats

    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = shapes.model(place, SHAPE, "shallow")
    vlm = models.load(source, device=device)
    recipe = shapes.recipe(place, source, source.with_name("unused"), "gptq", {})
    rows = [
        {k: v if k == "modality" else v.to(device) for k, v in row.items()}
        for row in read_inputs(recipe, vlm, "the check").batches
    ]
    groups = models.decoder_blocks(vlm.model, vlm.spec)[1]
    first = {group.name: vlm.model.get_submodule(group.linears[0]) for group in groups}
    stats = {name: GroupStats(linear.in_features, NEEDS) for name, linear in first.items()}
    now: dict[str, Any] = {}

    def observe(name: str) -> Callable[..., None]:
        return lambda _module, args: stats[name].update(args[0], now["modality"])

    def forward() -> None:
        with torch.inference_mode(False), torch.no_grad():
            for row in rows:
                now.update(row)
                vlm.model.model(**{k: v for k, v in row.items() if k != "modality"})

    forward()  # not measured: kernels are loaded
    plain, alone, watch = timed(forward), Watch(), Watch()
    alone.start()
    forward()
    of_model = alone.found(len(rows))
    hooks = [linear.register_forward_pre_hook(observe(name)) for name, linear in first.items()]
    observed = timed(forward)
    watch.start()
    forward()
    waits = watch.found(len(rows))
    for hook in hooks:
        hook.remove()
    return {
        "samples": len(rows),
        "tokens": sum(row["input_ids"].shape[1] for row in rows),
        "forward_seconds": round(plain, 3),
        "one_block_observed_seconds": round(observed - plain, 3),
        "block": waits,
        "model_waits_per_sample": of_model and of_model["waits_per_sample"],
        "solve_seconds": {name: round(solved(vlm, groups, stats, name), 3) for name in SOLVED},
        **peaks(),
    }


def solved(vlm: Any, groups: Any, stats: Any, scheme: str) -> float:
    """Seconds in which a block is solved by a scheme."""
    import torch

    from vlmcompress import quantizers
    from vlmcompress.blocks.solve import Method, solve_block

    module = quantizers.REGISTRY.get(scheme)
    own = dict(stats)  # it is emptied
    weights = {name: vlm.model.get_submodule(name).weight.detach() for group in groups for name in group.linears}
    norms = {
        group.smooth: vlm.model.get_submodule(group.smooth).weight.detach()
        for group in groups
        if group.smooth and group.smooth_kind == "norm"
    }
    method = Method(module, module.Options())
    with torch.no_grad():
        return timed(lambda: solve_block(groups, weights, own, method, torch.bfloat16, None, norms))


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
