"""The Triton kernels of the quantizers against the torch functions whose place they take: equal codes, and seconds.

A scheme solves two layers that read one input, with the kernels and without (`VLMCOMPRESS_TRITON=0`). A value on a boundary may
fall on its other side, from where its row goes on differently, so the codes are held against each other by the error that they
make: within a thousandth. Without a GPU the kernels run in Triton's interpreter, where their seconds say nothing.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from gpu.bare import made, measure
from gpu.bare.equal import checked, each, output_error
from gpu.part import Place

WIDTH, ROWS = 3584, (3584, 512)
SCHEMES = {
    "gptq": ("gptq", {}), "gptq, zero points": ("gptq", {"symmetric": False}), "gptq-plus": ("gptq-plus", {}),
    "nvfp4": ("nvfp4", {}),
}  # fmt: skip
CLOSE, ALIKE = 1e-3, 0.9


def run(place: Place) -> dict[str, Any]:
    """Compare all schemes with kernels. Raises `Failed` if errors differ, or the codes of more than a tenth of the rows do."""
    from vlmcompress.numerics.statistics.inputs import STATISTICS
    from vlmcompress.quantization.schemes import REGISTRY, _fused, smooth, solve

    device = measure.device()
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    width, rows = (128, (20, 12)) if place.tiny else (WIDTH, ROWS)
    x, mask = made.inputs(width, 4 * width, device)
    weights = [made.weight(count, width, device, count) for count in rows]
    stats = made.statistics(x, mask, STATISTICS)

    def row(name: str) -> dict[str, Any]:
        scheme, chosen = SCHEMES[name]
        method = REGISTRY.get(scheme)
        options = method.OPTIONS(**chosen)
        scale = smooth(method, weights, stats, options).scale
        scaled, group = (
            (weights, stats) if scale is None else ([w.float() * scale for w in weights], stats.rescaled(scale))
        )
        seconds, codes, errors = {}, {}, {}
        for kind, switch in (("torch", "0"), ("triton", "1")):
            os.environ[_fused.SWITCH] = switch
            _fused.kernels.cache_clear()
            solve(method, scaled, group, options, torch.bfloat16)  # compiled
            seconds[kind], solution = measure.once(lambda: solve(method, scaled, group, options, torch.bfloat16))
            quantized = solution.weights[0]
            assert (_fused.kernels(device, quantized.format) is None) == (kind == "torch")
            codes[kind] = quantized.q.float()
            errors[kind] = output_error(x.cpu(), quantized.dequantize(torch.float32).cpu(), weights[0].cpu(), scale)
        alike = float((codes["torch"] == codes["triton"]).all(1).double().mean())
        ratio = errors["triton"] / errors["torch"]
        figures = {"seconds": {kind: round(value, 4) for kind, value in seconds.items()}, "rows_alike": round(alike, 4)}
        fine = abs(ratio - 1) <= CLOSE and alike >= ALIKE
        return figures | (
            {} if fine else {"wrong": f"{alike:.0%} of the rows are alike, the error is {ratio:.4f} times torch's"}
        )

    rows_by_name = each(list(SCHEMES), row)
    return checked(rows_by_name, rows_by_name)
