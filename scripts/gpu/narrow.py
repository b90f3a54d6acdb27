"""2- and 3-bit layers in vLLM: they run in Humming, and answer as transformers does with the same codes.

The CPU build has no kernel for them; tiny shapes take 4 bits there, which go the same way.
"""

from __future__ import annotations

from typing import Any

from gpu import agreement, kernels, probe, shapes
from gpu.environment import target
from gpu.part import Failed, Place

APART = 0.15  # nats
SHAPE = "qwen3-vl-8b"


def run(place: Place, bits: int) -> dict[str, Any]:
    """Quantize a shallow model by GPTQ, ask it in both, compare."""
    width = 4 if target() == "cpu" else bits
    folder = shapes.quantized(place, SHAPE, "shallow", "gptq", {"bits": width}, f"narrow-{width}")
    images, log = kernels.pictures(place), place.work / "logs" / f"probe-narrow-{bits}.log"
    probed = probe.finish(probe.start(folder, log, images, shapes.QUESTION, **probe.options_for(0.3)), log)
    if "error" in probed:
        raise Failed("\n".join([f"vLLM does not load {width} bits", *probed["error"]]))
    used = sorted({kernel for layer_kernels in probed["layers"].values() for kernel in layer_kernels})
    gap = agreement.apart(probed["first"], agreement.reference(folder, images, shapes.QUESTION))
    result = {"bits": width, "kernels": used, "apart_nats": round(gap, 4), "pictures": len(images)}
    expected = "CPUWNA16" if target() == "cpu" else "Humming"
    if not used or not all(kernels.fits(expected, kernel) for kernel in used):
        raise Failed(f"{width} bits run in {', '.join(used) or 'no kernel'}, not in {expected}", result)
    if not gap <= APART:
        raise Failed(f"first tokens are {gap:.3f} nats from transformers', more than {APART}", result)
    return result
