"""Where a model runs, and in which precision: on the accelerator, if there is one, as a whole or module by module.

On processors without matrix products in the model's 16-bit type they are computed in float32: a CPU without bfloat16
instructions (most before 2023) emulates them at a quarter of the speed. Both sum in float32 and round the result once, so the
results differ only by the order of sums.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from vlmcompress.utils.errors import UserError
from vlmcompress.utils.gpu import gpu_problem

_ROOM = 0.8  # share of an accelerator's free memory that weights may take


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device, asynchronously for an accelerator; returns the tensor itself if it is already there.

    Do not use it for the way back: the host would read memory that is not written yet.
    """
    return x.to(device, non_blocking=device.type != "cpu")


def accelerator() -> torch.device | None:
    """The accelerator of this process, with its index (as in its tensors' `device`); None if there is none.

    Raises:
        UserError: there is a GPU that torch can't use (`utils.gpu`).
    """
    if problem := gpu_problem():
        raise UserError(problem)
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return device and torch.device(device.type, torch.accelerator.current_device_index())


@contextlib.contextmanager
def accelerated(model: Any, blocks: Sequence[str] = ()) -> Iterator[torch.device]:
    """Within the context the model is on the accelerator, if there is one; yields its device.

    Only changed weights are copied back. If the model takes more than 0.8 of the free memory, its decoder blocks are streamed;
    all other modules stay on the accelerator.

    Args:
        blocks: names of the decoder blocks.
    """
    device, members = accelerator(), [model.get_submodule(name) for name in blocks]
    if device is None:
        yield model.device
        return
    inside = {id(tensor) for block in members for tensor in _tensors(block)}
    tensors = _tensors(model)
    # What is there already takes no further memory, as when contexts are nested.
    needed = sum(tensor.nbytes for tensor in tensors if tensor.device != device)
    apart = needed > _ROOM * torch.accelerator.get_memory_info()[0]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_moved([t for t in tensors if not (apart and id(t) in inside)], model, device))
        for block in members if apart else ():
            stack.enter_context(streamed(block, device))
        yield device


@contextlib.contextmanager
def streamed(block: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the context copies of a block's weights are on `device` while it runs, and as long as a graph needs them."""
    forward = block.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        homes: list[tuple[dict, str, Any]] = []
        try:
            # In the modules' own dictionaries, so that the original objects, to which ties and gradients refer, come back.
            for module in block.modules():
                for named, kind in ((module._parameters, nn.Parameter), (module._buffers, lambda tensor, _: tensor)):
                    for name, tensor in named.items():
                        if tensor is not None and tensor.device != device:
                            homes.append((named, name, tensor))
                            named[name] = kind(sent(tensor.detach(), device), tensor.requires_grad)
            return forward(*args, **kwargs)
        finally:
            for named, name, tensor in homes:
                named[name] = tensor

    with replaced_forward(block, run):
        yield


@contextlib.contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within the context a call of the module runs `forward` and the module's hooks."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        module.__dict__.pop("forward")
        if before is not None:
            module.__dict__["forward"] = before


@contextlib.contextmanager
def resident(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the context a module is on `device`; afterwards it is back on its original device.

    Unchanged tensors are restored to the original ones: weights that are memory-mapped from a file stay mapped and take no
    memory. Tensors that were removed from the module meanwhile are not restored.
    """
    with _moved(_tensors(module), module, device):
        yield


@contextlib.contextmanager
def _moved(tensors: Sequence[Tensor], module: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the context some tensors of a module are on `device`."""
    moved = [(tensor, tensor.data) for tensor in tensors if tensor.device != device]
    for tensor, home in moved:
        tensor.data = sent(home, device)
    # In-place changes raise the version, an assigned `.data` has another address: together they show every change.
    before = [(tensor.data_ptr(), tensor._version) for tensor, _ in moved]
    try:
        yield
    finally:
        # What was taken out of the module meanwhile (a solved block's weights) is not brought back.
        left = {id(tensor) for tensor in _tensors(module)} if moved else set()
        for (tensor, home), version in zip(moved, before, strict=True):
            if id(tensor) in left:
                unchanged = (tensor.data_ptr(), tensor._version) == version
                tensor.data = home if unchanged else tensor.data.to(home.device)


def _tensors(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a module that have memory."""
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.device.type != "meta"]


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Within the context products of float32 matrices are not computed in TF32, which has only 10 bits of mantissa.

    Statistics, factors and errors are small differences of large sums. Can be used as a decorator.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def trim() -> None:
    """Return free memory to the system: glibc keeps freed small blocks between blocks in use."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


_PRODUCTS: set[Any] = {functional.linear, functional.scaled_dot_product_attention, functional.conv2d, functional.conv3d}
_PRODUCTS |= {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm}
_FEW = 5  # with fewer rows it costs more to convert a layer's weight
_INSTRUCTIONS = {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float16: ("amx_fp16", "avx512_fp16")}


class FloatProducts(TorchFunctionMode):
    """Context manager: products of layers, attention and matrices convert 16-bit inputs to float32, and return 16 bits.

    A weight is converted when it is used, so a graph holds one more copy of its weights in memory. It is not for fewer than
    five rows, as in most steps of generation.
    """

    def __init__(self, dtype: torch.dtype, but: Tensor | None = None):
        """Args: `dtype`: the 16-bit type; `but`: a weight that is not converted."""
        super().__init__()
        self.dtype, self.but = dtype, but

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        few = func is functional.linear and bool(args) and args[0].numel() < _FEW * args[0].shape[-1]
        if few or func not in _PRODUCTS or any(arg is self.but for arg in args if isinstance(arg, Tensor)):
            return func(*args, **kwargs)
        wide = {key: self._wide(value) for key, value in kwargs.items()}
        output = func(*map(self._wide, args), **wide)
        return output.to(args[0].dtype if args else kwargs["query"].dtype)

    def _wide(self, value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype == self.dtype else value


def float_products(model: Any) -> contextlib.AbstractContextManager[Any]:
    """`FloatProducts` for a model if that is faster; otherwise a context without effect.

    The output head, the largest weight, is not converted, as few tokens reach it.
    """
    return (
        FloatProducts(model.dtype, model.get_output_embeddings().weight)
        if emulated(model.dtype)
        else contextlib.nullcontext()
    )


def widened(module: nn.Module) -> Callable[..., Any]:
    """`module` as a function that computes in float32, if products in its 16-bit type would be emulated; else `module`.

    Its current weights are converted once, and inputs at each call; results have the dtype of the first tensor. Hooks on its
    submodules are still called.
    """
    if not emulated(next(module.parameters()).dtype):
        return module
    weights = {name: value.float() for name, value in module.state_dict(keep_vars=True).items()}

    def wide(value: Tensor) -> Tensor:
        return value.float() if value.is_floating_point() else value

    def run(*args: Any, **kwargs: Any) -> Any:
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        wide_inputs = tree_map_only(Tensor, wide, (args, kwargs))
        return tree_map_only(
            Tensor, lambda tensor: tensor.to(first.dtype), functional_call(module, weights, *wide_inputs)
        )

    return run


def emulated(dtype: torch.dtype) -> bool:
    """Whether models run on the CPU here and it has no instructions for products of this type."""
    if torch.accelerator.is_available() or dtype not in _INSTRUCTIONS:
        return False
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return not any(has.get(name) for name in _INSTRUCTIONS[dtype])
