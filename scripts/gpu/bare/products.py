"""Matrix products in FP8 and INT8 by torch's own kernels, against BF16: a bound for what a scheme with 8-bit inputs can win.

An engine's kernels are others, and may be faster; rounding the inputs is not counted. Shapes are those of Qwen2.5-VL-7B's
layers, for one token of each of 16 requests, for an image, and for a full batch of prefill.
"""

from __future__ import annotations

from typing import Any

import torch

from gpu.bare import measure
from gpu.part import Place, last_lines

LAYERS = {"qkv": (3584, 4608), "o": (3584, 3584), "gate_up": (3584, 37888), "down": (18944, 3584)}  # inputs, outputs
TOKENS = (32, 1280, 8192)


def run(place: Place) -> dict[str, Any]:
    """Measure all layers: microseconds in BF16, and how many times faster each other type is, or why it does not run."""
    layers = {"qkv": (64, 128)} if place.tiny else LAYERS
    return {
        f"{name}, {tokens}": measured(tokens, *sides)
        for name, sides in layers.items()
        for tokens in TOKENS[: len(layers)]
    }


def measured(tokens: int, width: int, rows: int) -> dict[str, Any]:
    """The figures of one layer."""
    device = measure.device()
    x, w = (torch.randn(side, width, device=device) for side in (tokens, rows))
    unit, by_row = torch.ones(1, device=device), torch.ones(tokens, 1, device=device)
    by_column = torch.ones(1, rows, device=device)
    products = {
        "bf16": lambda a, b: a @ b.T,
        "fp8": lambda a, b: torch._scaled_mm(a, b.T, scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16),
        "fp8_rows": lambda a, b: torch._scaled_mm(a, b.T, scale_a=by_row, scale_b=by_column, out_dtype=torch.bfloat16),
        "int8": lambda a, b: torch._int_mm(a, b.T),
    }
    types = {"bf16": torch.bfloat16, "int8": torch.int8}
    taken: dict[str, Any] = {}
    for name, product in products.items():
        dtype = types.get(name, torch.float8_e4m3fn)
        a, b = ((value * 20).clamp(-120, 120).to(dtype) for value in (x, w))
        try:
            taken[name] = measure.seconds(lambda: repeated(product, a, b)) / REPEATS  # noqa: B023
        except (RuntimeError, ValueError, NotImplementedError) as error:
            taken[name] = last_lines(str(error), 1)[0]
    bf16 = taken.pop("bf16")
    rates = {"us": round(bf16 * 1e6, 1), "tflops": round(2e-12 * tokens * width * rows / bf16, 1)}
    return rates | {name: value if isinstance(value, str) else round(bf16 / value, 3) for name, value in taken.items()}


REPEATS = 10


def repeated(product: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    """Some products one after the other, so that starting them does not count."""
    for _ in range(REPEATS):
        product(a, b)
