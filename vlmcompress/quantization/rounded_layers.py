"""Linear layers that are rounded when they are written: without calibration a layer depends on nothing but its weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from vlmcompress.models import Group
from vlmcompress.models.devices import accelerator
from vlmcompress.numerics import QTensor, Scheme
from vlmcompress.quantization.calibration.solve import QuantMethod, solve_block
from vlmcompress.utils.progress import phase


class RoundedLayers(Mapping):
    """A lazy mapping of linear layer to (weight, scheme, input scale). A group is rounded when its first layer is read, on the
    accelerator if there is one; results are kept until they are read.

    Args:
        errors: takes the errors of layers (as in `BlockResult`) once they are rounded; its order is that of the groups.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Group],
        method: QuantMethod,
        errors: dict[str, dict[str, float]] | None = None,
    ):
        self._model, self._method = model, method
        self._group = {name: group for group in groups for name in group.linears}
        self._errors = {} if errors is None else errors
        self._errors |= {name: {} for name in self._group}
        self._results: dict[str, tuple[QTensor, Scheme, Tensor | None]] = {}

    def __getitem__(self, name: str) -> tuple[QTensor, Scheme, Tensor | None]:
        group, device = self._group[name], accelerator() or torch.device("cpu")
        if name not in self._results:
            weights = {each: self._model.get_parameter(f"{each}.weight").detach().to(device) for each in group.linears}
            dtype, scheme = self._method.scale_dtype or weights[name].dtype, self._method.of(group).scheme
            assert scheme is not None  # a plan has no other groups
            with phase("solving"):
                result = solve_block([group], weights, {}, self._method, dtype)
            for each, weight in result.weights.items():
                self._results[each] = weight, scheme, result.input_scales.get(each)
            self._errors |= result.errors
        return self._results.pop(name)

    def __contains__(self, name: object) -> bool:
        return name in self._group

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)
