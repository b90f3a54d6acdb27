"""The methods that `compare_weights.py` compares, as data.

A row is a name and what `vlmcompress quantize` gets besides the number format: the scheme, its options, other keys of a
recipe. To measure another method, add a row. `KIND` says who runs it: `stats` solves from statistics that are collected once
a seed, `run` runs the model itself behind what is quantized already, `stock` is llm-compressor, `autoround` is auto-round.
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
    "W4": Grid(4, 64),
    "W3": Grid(3, 64),
    "W2": Grid(2, 64),
    "W4 asym": Grid(4, 64, False),
    "W3 asym": Grid(3, 64, False),
    "W2 asym": Grid(2, 64, False),
    "3.25": Grid(3, 64),
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
    """A method: see the module. `formats`: those that it is measured in; `data_free`: no seed changes the result; `than`: the
    (format, method) that it is compared with instead of the better stock method of its format; `blind`: it gets statistics
    without gradients, as samples without answers give them."""

    scheme: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    kind: str = "stats"
    formats: tuple[str, ...] = WEIGHTS
    data_free: bool = False
    than: tuple[str, str] | None = None
    blind: bool = False

    @property
    def reads_gradients(self) -> bool:
        """Whether statistics have to have gradients: balances by them and widths that are shared out."""
        return (
            self.kind == "stats" and not self.blind and (self.options.get("balance") == "mbq" or "bits" in self.recipe)
        )

    def recipe_in(self, grid: Grid | None) -> dict[str, Any]:
        """The recipe in a number format."""
        return {"scheme": self.scheme, "options": (grid.options if grid else {}) | self.options} | self.recipe


def budget(bits: float, **keys: Any) -> dict[str, Any]:
    """The recipe's key for widths that are shared out."""
    return {"bits": {"budget": bits, "among": [2, 3, 4, 8]} | keys}


STEPS = {"smooth": "feedback", "clip": True, "sweeps": 2}  # those of gptq-plus
NO_STEPS = {"smooth": "off", "clip": False, "sweeps": 0}

ROUNDINGS: dict[str, dict[str, Any]] = {  # of the schemes with one number format
    " rtn": {"rounding": "rtn"},
    " awq": {"rounding": "awq"},
    " gptq": {"rounding": "gptq"} | NO_STEPS,
    " all steps": {"rounding": "gptq"} | STEPS,
}

METHODS: dict[str, Row] = {
    "rtn": Row("rtn", data_free=True),
    "stock gptq": Row("gptq", kind="stock"),
    "stock awq": Row("awq", kind="stock"),
    "autoround": Row(kind="autoround", options={"iters": 200}),
    "autoround 50": Row(kind="autoround", options={"iters": 50}),
    "gptq": Row("gptq"),
    "gptq ratio": Row("gptq", {"balance": "ratio"}),
    "gptq run": Row("gptq", kind="run"),
    "gptq clip": Row("gptq", {"clip": True}),
    "gptq sweeps": Row("gptq", {"sweeps": 2}),
    "gptq smooth": Row("gptq", {"smooth": "awq"}),
    "gptq smooth clip": Row("gptq", {"smooth": "awq", "clip": True}),
    "gptq all": Row("gptq", {"smooth": "awq", "clip": True, "sweeps": 2}),
    "gptq clip sweeps": Row("gptq", {"clip": True, "sweeps": 2}),
    "gptq feedback": Row("gptq", {"smooth": "feedback"}),
    "gptq feedback clip": Row("gptq", {"smooth": "feedback", "clip": True}),
    "gptq-plus": Row("gptq-plus"),
    "gptq-plus, damp 0.05": Row("gptq-plus", {"damp": 0.05}),
    "gptq-plus run": Row("gptq-plus", kind="run"),
    "gptq all run": Row("gptq", {"smooth": "awq", "clip": True, "sweeps": 2}, kind="run"),
    "gptq rotate": Row("gptq", recipe={"rotate": "hadamard"}, kind="run"),
    "gptq-plus rotate": Row("gptq-plus", recipe={"rotate": "hadamard"}, kind="run"),
    "qronos": Row("qronos", kind="run"),
    "qronos clip sweeps": Row("qronos", {"clip": True, "sweeps": 2}, kind="run"),
    "qronos all": Row("qronos", STEPS | {"behind": "blocks"}, kind="run"),
    "qronos all half": Row("qronos", STEPS | {"behind": "blocks", "correct": 0.5}, kind="run"),
    "awq": Row("awq"),
    "awq sweeps": Row("awq", {"clip_sweeps": 2}),
    "awq run": Row("awq", kind="run"),
    "awq rotate": Row("awq", recipe={"rotate": "hadamard"}, kind="run"),
    "gptq by error": Row("gptq", recipe=budget(3.25), formats=("3.25",), than=("W3", "gptq")),
    "gptq by error, blind": Row("gptq", recipe=budget(3.25), formats=("3.25",), than=("W3", "gptq"), blind=True),
    "gptq-plus by error": Row("gptq-plus", recipe=budget(3.25), formats=("3.25",), than=("W3", "gptq-plus")),
    "awq by error": Row("awq", recipe=budget(3.25), formats=("3.25",), than=("W3", "awq")),
    "stock int8": Row("int8", kind="stock", formats=("W8A8",)),
    "int8": Row("int8", formats=("W8A8",)),
    "int8 rotate": Row("int8", recipe={"rotate": "hadamard"}, kind="run", formats=("W8A8",)),
    "int8 ratio": Row("int8", {"balance": "ratio"}, formats=("W8A8",)),
    **{
        f"{scheme}{name}": Row(scheme, options | keys, formats=formats, data_free=options.get("rounding") == "rtn")
        for name, options in ROUNDINGS.items()
        for scheme, keys, formats in (
            ("nvfp4", {"activations": 16, "mixed": False}, ("NVFP4A16",)),
            ("mxfp4", {"activations": 16}, ("MXFP4A16",)),
            ("w4a8-fp8", {}, ("W4A8-FP8",)),
        )
    },
    "mxfp4, inputs too": Row("mxfp4", NO_STEPS, formats=("MXFP4",)),
    "mxfp4, inputs too, all steps": Row("mxfp4", STEPS, formats=("MXFP4",)),
    "mxfp8": Row("mxfp8", formats=("MXFP8",), data_free=True),
    "mxfp8 gptq": Row("mxfp8", {"rounding": "gptq"}, formats=("MXFP8",)),
    "fp8": Row("fp8", formats=("FP8",), data_free=True),
    **{
        f"head {name}": Row("none", recipe={"head": name}, formats=("head",))
        for name in ("fp8", "int8", "w8a16", "w4a16")
    },
    "head w4a16, to nearest": Row("none", recipe={"head": "w4a16"}, formats=("head",), data_free=True),
    **{
        f"head and embeddings {name}": Row("none", recipe={"head": name, "embeddings": name}, formats=("embeddings",))
        for name in ("w8a16", "w4a16")
    },
    "gptq-plus, head w4a16": Row("gptq-plus", recipe={"head": "w4a16"}, formats=("W4",)),
}
STOCK = ("stock gptq", "stock awq", "stock int8")


def chosen(methods: list[str], formats: list[str]) -> list[tuple[str, str]]:
    """The (format, method) pairs of these methods and formats, in the order of both.

    Raises ValueError for a name that there is not.
    """
    for name, table in [(m, METHODS) for m in methods] + [(f, FORMATS) for f in formats]:
        if name not in table:
            raise ValueError(f"there is no '{name}'; choose from {', '.join(table)}")
    return [(f, m) for f in formats for m in methods if f in METHODS[m].formats]
