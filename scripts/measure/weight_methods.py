"""The methods that `compare_weights.py` compares, as data.

A row is a name and what `vlmcompress quantize` gets besides the number format: the scheme, its options, other keys of a
recipe. To measure another method, add a row. `kind` says who runs it: `stats` solves from statistics that are collected once
a seed, `run` runs the model itself after what is quantized already, `stock` is llm-compressor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Grid:
    """A number format of weights alone: `bits`, groups of `group` columns, symmetric or with zero points."""

    bits: int
    group: int
    symmetric: bool = True

    @property
    def options(self) -> dict[str, Any]:
        return {"bits": self.bits, "group_size": self.group, "symmetric": self.symmetric}


FORMATS: dict[str, Grid | None] = {  # None: by the scheme's own options
    "W4 g128": Grid(4, 128, False),  # the schemes' default
    "W4 g64": Grid(4, 64, False),  # the same where 128 does not divide a width
    "W4 g64 sym": Grid(4, 64),
    "W3 g64 sym": Grid(3, 64),
    "W2 g64": Grid(2, 64, False),
    "W8A8": None,
    "W4A8-FP8": None,
    "NVFP4A16": None,
    "MXFP4A16": None,
    "MXFP4": None,
    "MXFP8": None,
    "FP8": None,
    "head": None,
    "embeddings": None,
}
WEIGHTS = tuple(name for name, grid in FORMATS.items() if grid and name[0] == "W")


@dataclass(frozen=True)
class Row:
    """A method: see the module. `formats`: those that it is measured in; `data_free`: no seed changes the result."""

    scheme: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    kind: str = "stats"
    formats: tuple[str, ...] = WEIGHTS
    data_free: bool = False

    def recipe_in(self, grid: Grid | None) -> dict[str, Any]:
        """The recipe in a number format."""
        return {"scheme": self.scheme, "options": (grid.options if grid else {}) | self.options} | self.recipe


STEPS = {"smooth": "feedback", "clip": True, "sweeps": 2}  # those of gptq-plus

METHODS: dict[str, Row] = {
    "rtn": Row("rtn", data_free=True),
    "stock gptq": Row("gptq", kind="stock"),
    "stock awq": Row("awq", kind="stock"),
    "stock autoround": Row("autoround", kind="stock"),
    "gptq": Row("gptq"),
    "gptq run": Row("gptq", kind="run"),
    "gptq-plus": Row("gptq-plus"),
    "gptq-plus rotate": Row("gptq-plus", recipe={"rotate": "hadamard"}, kind="run"),
    "awq": Row("awq"),
    "mbq": Row("mbq", kind="run"),
    "stock int8": Row("int8", kind="stock", formats=("W8A8",)),
    "int8": Row("int8", formats=("W8A8",)),
    **{
        f"{scheme} {name}": Row(scheme, options | keys, formats=(form,), data_free=name == "rtn")
        for name, options in (("rtn", {"rounding": "rtn"}), ("all steps", {"rounding": "gptq"} | STEPS))
        for scheme, keys, form in (
            ("nvfp4", {"activations": 16, "mixed": False}, "NVFP4A16"),
            ("mxfp4", {"activations": 16}, "MXFP4A16"),
            ("w4a8-fp8", {}, "W4A8-FP8"),
        )
    },
    "mxfp4, inputs too, all steps": Row("mxfp4", STEPS, formats=("MXFP4",)),
    "mxfp8": Row("mxfp8", formats=("MXFP8",), data_free=True),
    "fp8": Row("fp8", formats=("FP8",), data_free=True),
    **{f"head {name}": Row("none", recipe={"head": name}, formats=("head",)) for name in ("w8a16", "w4a16")},
    **{
        f"head and embeddings {name}": Row("none", recipe={"head": name, "embeddings": name}, formats=("embeddings",))
        for name in ("w8a16", "w4a16")
    },
}
STOCK = tuple(name for name, row in METHODS.items() if row.kind == "stock")


def chosen(methods: list[str], formats: list[str]) -> list[tuple[str, str]]:
    """The (format, method) pairs of these methods and formats, in the order of both.

    Raises ValueError for a name that there is not.
    """
    for name, table in [(m, METHODS) for m in methods] + [(f, FORMATS) for f in formats]:
        if name not in table:
            raise ValueError(f"there is no '{name}'; choose from {', '.join(table)}")
    return [(f, m) for f in formats for m in methods if f in METHODS[m].formats]
