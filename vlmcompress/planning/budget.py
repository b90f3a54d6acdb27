"""What a recipe's `bits` leave to share out among groups of layers, from shapes alone.

What a group can get is a *width*: the recipe's scheme at another number of bits, or another scheme (`fp8`, `int8`, `bf16`).
Sizes are the exporter's own, so a budget of 3.25 bits per weight counts scales and zero points, and a `max_size` everything
that is written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from vlmcompress import targets
from vlmcompress.allocation import Key
from vlmcompress.blocks.solve import Method
from vlmcompress.checkpoint import sizes as estimate
from vlmcompress.checkpoint.write import parse_size
from vlmcompress.common.tensor_files import Spec
from vlmcompress.common.text import size
from vlmcompress.errors import UserError
from vlmcompress.models import Group
from vlmcompress.planning import fit
from vlmcompress.quantizers import REGISTRY as SCHEMES
from vlmcompress.recipe import Recipe
from vlmcompress.recipe.bits import DEFAULT, NAMED, Bits


@dataclass(frozen=True)
class Room:
    """What there is to share out.

    Attributes:
        widths: name of a width -> method.
        sizes: group -> width -> bytes, for the widths that its shape allows.
        weights: how many weights the groups have.
        fixed: bytes of everything else that is written.
        budget: bytes for all groups.
    """

    widths: Mapping[str, Method]
    sizes: Mapping[Key, Mapping[str, int]]
    weights: int
    fixed: int
    budget: int

    @property
    def largest(self) -> int:
        """The most bytes that can be written."""
        return self.fixed + min(self.budget, sum(max(own.values()) for own in self.sizes.values()))

    def bits(self, nbytes: int) -> float:
        """Bits per weight."""
        return 8 * nbytes / self.weights


def widths(recipe: Recipe) -> dict[str, Method]:
    """What a group can get. Raises `UserError` for what the scheme does not have or the target does not run."""
    assert recipe.bits is not None
    among = recipe.bits.among
    if among is None:
        among = _default(recipe)
    found = {str(one): _width(recipe, one) for one in among}
    machine = targets.get(recipe.target) if recipe.target else None
    for name, method in found.items():
        if machine and (reason := machine.refusal(targets.format_key(method.scheme))):
            raise UserError(f"bits.among has {name}, and {reason}")
    return found


def _default(recipe: Recipe) -> tuple[int | str, ...]:
    if recipe.target is None:
        return DEFAULT
    machine = targets.get(recipe.target)
    runs = tuple(w for w in DEFAULT if not machine.refusal(targets.format_key(_width(recipe, w).scheme)))
    wide = machine.schemes["throughput"]
    return runs if 8 in runs or wide not in NAMED else (*runs, wide)


def _width(recipe: Recipe, width: int | str) -> Method:
    options = recipe.options
    if isinstance(width, int):
        if not hasattr(options, "bits"):
            schemes = ", ".join(name for name in SCHEMES.names() if hasattr(SCHEMES.get(name).Options(), "bits"))
            raise UserError(f"bits: scheme '{recipe.scheme}' has one width only; take one of {schemes}")
        try:
            return Method(recipe.method, dataclasses.replace(options, bits=width))
        except ValueError as error:
            raise UserError(f"bits.among has {width}, and scheme '{recipe.scheme}' has not: {error}") from error
    module = SCHEMES.get("none" if width == "bf16" else width)
    own = module.Options()
    if hasattr(own, "balance") and hasattr(options, "balance"):
        own = dataclasses.replace(own, balance=options.balance)
    return Method(module, own)


def measure(
    recipe: Recipe,
    bones: nn.Module,
    groups: Sequence[Group],
    stored: Mapping[str, Spec],
    names: Mapping[str, str],
    written: Mapping[str, Spec],
    table: Mapping[str, Method] | None = None,
) -> Room:
    """What a recipe's `bits` leave to share out.

    Args:
        table: widths by name; by default those of the recipe. Without `bits` everything fits.
        bones: the model without weights.
        groups: the decoder's, without what is skipped.
        stored: tensor name on disk -> type and shape, of the source.
        names: memory name of a parameter -> its name on disk.
        written: every tensor that would be written without an allocation, as `estimate.output_tensors` names them.

    Raises:
        UserError: a width that can't be, or a budget that can't be met.
    """
    table = widths(recipe) if table is None else table
    if any(method.by_block or method.joint for method in table.values()):
        raise UserError(
            "bits needs predicted errors, which searches that re-run blocks do not have; use gptq, awq or rtn"
        )
    if any(method.by_token for method in table.values()):
        raise UserError("bits is shared out by statistics, which know no single tokens; use options.tokens off")
    sizes: dict[Key, dict[str, int]] = {}
    for group in groups:
        weights = [stored[names[f"{name}.weight"]] for name in group.linears]
        problems = {
            name: list(fit.shape_problems(bones, group, method.scheme, recipe.target)) for name, method in table.items()
        }
        sizes[group.layer, group.name] = own = {
            name: _nbytes(method, weights) for name, method in table.items() if not problems[name]
        }
        if not own:
            raise UserError(next(iter(problems.values()))[0])
    members = {name for group in groups for name in group.linears} | {
        names[f"{name}.weight"] for group in groups for name in group.linears
    }
    fixed = sum(spec.nbytes for name, spec in written.items() if name.partition(":")[0] not in members)
    count = sum(math.prod(stored[names[f"{name}.weight"]].shape) for group in groups for name in group.linears)
    largest = sum(max(own.values()) for own in sizes.values())
    found = Room(table, sizes, count, fixed, largest)
    return found if recipe.bits is None else dataclasses.replace(found, budget=_budget(recipe.bits, found))


def _budget(bits: Bits, room: Room) -> int:
    """Bytes for all groups. Raises `UserError` naming the smallest reachable where that is more."""
    smallest = sum(min(own.values()) for own in room.sizes.values())
    if bits.max_size is not None:
        budget = parse_size(bits.max_size) - room.fixed
        least = (
            f"{math.ceil((room.fixed + smallest) / 1000) / 1000:g}MB, of which {size(room.fixed)} are not shared out"
        )
        asked = f"bits.max_size {bits.max_size}"
    else:
        assert bits.budget is not None
        budget = math.floor(bits.budget * room.weights / 8)
        least = f"{math.ceil(1e4 * room.bits(smallest)) / 1e4:g} bits per weight, scales and zero points included"
        asked = f"bits.budget {bits.budget:g}"
    if smallest > budget:
        raise UserError(f"{asked} can't be met with widths {', '.join(room.widths)}; the smallest reachable is {least}")
    return budget


def _nbytes(method: Method, weights: Iterable[Spec]) -> int:
    if method.scheme is None:
        return sum(weight.nbytes for weight in weights)
    return sum(spec.nbytes for weight in weights for spec in estimate.layer_tensors(method.scheme, weight).values())
