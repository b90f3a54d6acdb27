"""The layers that read and write a decoder's residual stream, found in the meta model: those that a rotation changes.

Embedding, attention's `o`, the MLP's `down` and the projector's last layer write rows into the stream; `qkv`, `gate_up` and
the output head read them after an RMSNorm. If every writer writes `y R` instead of `y` and every reader is adapted, nothing
else changes, as `rms(y R) = rms(y)` for an orthogonal R. The norms' gains must have been merged into their readers.

The family's groups determine readers and writers: a group with a norm for smoothing reads, one whose outputs are as wide as
the stream writes. Every tensor must be of a known kind, and each norm is tested numerically, so that architectures with other
parts (a norm on a branch's output, a convolution, a router, subtraction of the mean) are refused rather than broken.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from vlmcompress.models._modules import decoder_blocks, decoder_layers, mtp_tensors
from vlmcompress.models._names import tied_names
from vlmcompress.models._spec import Group, ModelSpec
from vlmcompress.utils.errors import UserError


@dataclass(frozen=True)
class Values:
    """The value heads of one attention: rows of `v` and columns of `o` that belong together.

    Attributes:
        v, o: memory names of the linear layers.
        heads: number of query heads; `kv_heads`: number of value heads, each shared by equally many query heads.
        width: channels of a head.
    """

    v: str
    o: str
    heads: int
    kv_heads: int
    width: int


@dataclass
class Stream:
    """The residual stream of a decoder, by memory names.

    Attributes:
        width: number of channels.
        embedding: the parameter of the token embedding.
        head: the output head's linear layer; `tied`: whether it shares the embedding's weight.
        rows: parameters whose rows are vectors of the stream: the embedding and, in LLaVA-NeXT, the newline.
        readers: linear layer -> the norm before it.
        writers: linear layers.
        values: the value heads of each attention.
    """

    width: int
    embedding: str
    head: str
    tied: bool
    rows: list[str] = field(default_factory=list)
    readers: dict[str, str] = field(default_factory=dict)
    writers: list[str] = field(default_factory=list)
    values: list[Values] = field(default_factory=list)

    @property
    def norms(self) -> list[str]:
        """The norms whose gains are merged into the readers."""
        return list(dict.fromkeys(self.readers.values()))


def stream(meta_model: PreTrainedModel, spec: ModelSpec, stored: Collection[str] = ()) -> Stream:
    """Describe the residual stream of a model.

    Args:
        meta_model: the model on the meta device.
        stored: tensor names of its checkpoint.

    Raises:
        UserError: a rotation of the stream would change this model's outputs; the message says why.
    """
    _require_rotatable(spec, stored)
    config = meta_model.config.get_text_config()
    embedding = meta_model.get_input_embeddings()
    name = next(key for key, value in meta_model.named_parameters() if value is embedding.weight)
    head, width = f"{spec.lm_head}.weight", int(embedding.get_parameter("weight").shape[1])
    parameters = {key for key, _ in meta_model.named_parameters()}
    newlines = [
        newline for newline in spec.images.newlines if newline in parameters
    ]  # their rows enter the stream as well
    residual = Stream(width, name, spec.lm_head, head in tied_names(meta_model), rows=[name, *newlines])
    templates = {template.name: template for template in spec.groups}
    for path, groups in zip(decoder_layers(meta_model, spec), decoder_blocks(meta_model, spec), strict=True):
        for group in groups:
            if group.name not in templates:
                raise _rotation_error(spec, f"nothing is known about {group.linears[0]}")
            if group.smooth and group.smooth_kind == "norm":
                # A reader sees norm(x) * gain: W (gain * R'Rx) needs the gain in W before W is rotated.
                residual.readers |= dict.fromkeys(group.linears, group.smooth)
            elif all(meta_model.get_submodule(linear).out_features == width for linear in group.linears):
                # A writer adds to the stream, so its outputs are rotated.
                residual.writers += group.linears
            else:
                raise _rotation_error(spec, f"{group.linears[0]} reads the stream without a norm that is known")
            template = templates[group.name]
            if group.name == "o" and template.smooth_kind == "linear":
                residual.values += _values(meta_model, f"{path}.{template.smooth[0]}", group, config)
    _require_known_blocks(meta_model, spec, residual)
    residual.writers += [_last_linear(meta_model, root, spec, width) for root in _projectors(meta_model, spec)]
    residual.readers[spec.lm_head] = _final_norm(meta_model, spec, embedding)
    _require_known_rest(meta_model, spec, residual)
    for norm in residual.norms:
        _require_rms_norm(meta_model.get_submodule(norm), norm, spec)
    return residual


def _require_rotatable(spec: ModelSpec, stored: Collection[str]) -> None:
    """Raise `UserError` for families that cannot be rotated according to their spec."""
    if spec.norm_offset:
        reason = "and its blocks have more that acts on the stream than attention and MLP after a norm each"
        raise _rotation_error(spec, f"its norms compute x * (1 + weight), {reason}")
    if spec.experts:
        raise _rotation_error(
            spec, "its router and its experts read the stream by a norm that none of them can take in alone"
        )
    if mtp_tensors(spec, stored):
        raise _rotation_error(spec, "its head that drafts tokens reads the stream, too")


def _rotation_error(spec: ModelSpec, why: str) -> UserError:
    return UserError(f"a rotation does not leave {spec.family} as it is: {why}; leave out --rotate")


def _values(meta_model: nn.Module, v: str, group: Group, config: object) -> Iterator[Values]:
    """The value heads of a block's attention, if it has a separate layer for values."""
    modules = dict(meta_model.named_modules())
    heads, o = getattr(config, "num_attention_heads", 0), group.linears[0]
    if v not in modules or not heads or modules[o].in_features % heads:
        return
    width = modules[o].in_features // heads
    kv_heads, rest = divmod(modules[v].out_features, width)
    if not rest and kv_heads and heads % kv_heads == 0:
        yield Values(v, o, heads, kv_heads, width)


def _projectors(meta_model: nn.Module, spec: ModelSpec) -> Iterator[str]:
    """Names of the projectors; for a `ModuleList` the names of its members."""
    for root in spec.projector:
        module = meta_model.get_submodule(root)
        yield from (f"{root}.{i}" for i in range(len(module))) if isinstance(module, nn.ModuleList) else (root,)


def _last_linear(meta_model: nn.Module, root: str, spec: ModelSpec, width: int) -> str:
    """The layer of a projector that outputs visual tokens: the last one with parameters. `UserError` if it is not linear."""
    owners = [
        (name, module)
        for name, module in meta_model.get_submodule(root).named_modules(prefix=root)
        if any(True for _ in module.parameters(recurse=False))
    ]
    if not owners or not isinstance(owners[-1][1], nn.Linear) or owners[-1][1].out_features != width:
        raise _rotation_error(spec, f"{root} does not end in a linear layer that gives visual tokens")
    return owners[-1][0]


def _final_norm(meta_model: nn.Module, spec: ModelSpec, embedding: nn.Module) -> str:
    """The norm before the output head: the only other module with parameters next to the decoder's blocks and embedding."""
    stem, _, layers = spec.layers.rpartition(".")
    others = [
        name
        for name, module in meta_model.get_submodule(stem).named_children()
        if name != layers and module is not embedding and any(True for _ in module.parameters())
    ]
    if len(others) != 1:
        raise _rotation_error(spec, f"its decoder has {', '.join(others) or 'no norm'} after its blocks")
    return f"{stem}.{others[0]}"


def _described(residual: Stream) -> set[str]:
    """Names of the parameters of the stream's readers, writers, norms and rows."""
    linears = {f"{name}.{leaf}" for name in (*residual.readers, *residual.writers) for leaf in ("weight", "bias")}
    return {*residual.rows, *linears, *(f"{name}.weight" for name in residual.norms)}


def _require_known_blocks(meta_model: nn.Module, spec: ModelSpec, residual: Stream) -> None:
    """Raise `UserError` for blocks with parameters other than readers, writers, norms and layers within a branch."""
    parameters = _described(residual)
    for name, _ in meta_model.get_submodule(spec.layers).named_parameters(prefix=spec.layers):
        module = name.rpartition(".")[0]
        if name in parameters or module.endswith(spec.inner):
            continue
        if "norm" in module.rpartition(".")[2]:
            raise _rotation_error(spec, f"{module} normalizes what a branch puts out")
        raise _rotation_error(spec, f"nothing is known about what {name} does to the stream")


def _require_known_rest(meta_model: nn.Module, spec: ModelSpec, residual: Stream) -> None:
    """Raise `UserError` for unknown parameters outside blocks, tower and projector."""
    parameters, roots = _described(residual), (*spec.vision, *spec.projector, spec.layers)
    for name, _ in meta_model.named_parameters(remove_duplicate=False):
        if name not in parameters and not name.startswith(tuple(f"{root}." for root in roots)):
            raise _rotation_error(spec, f"nothing is known about what {name} does to the stream")


def _require_rms_norm(module: nn.Module, name: str, spec: ModelSpec) -> None:
    """Raise `UserError` for a norm that is not RMSNorm: tested on random rows for its gain and equivariance to reflections."""
    norm: nn.Module = copy.deepcopy(module).to_empty(device="cpu").float()
    draw, weight = torch.Generator().manual_seed(0), norm.get_parameter("weight")
    width = len(weight)
    x, v = torch.randn(3, width, generator=draw) + 1, torch.randn(width, generator=draw)
    with torch.no_grad():
        weight.fill_(2.0)
        twice = norm(x)
        weight.fill_(1.0)
        plain = norm(x)
        # RMSNorm commutes with every rotation; LayerNorm, which subtracts the mean, does not. One reflection distinguishes
        # them.
        mirrored = norm(_mirrored(x, v))
    if not torch.allclose(twice, 2 * plain, atol=1e-4):
        raise _rotation_error(spec, f"{name} does not multiply by its weight")
    if not torch.allclose(mirrored, _mirrored(plain, v), atol=1e-4):
        raise _rotation_error(spec, f"{name} does more than divide by the root mean square, such as subtract the mean")


def _mirrored(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows reflected at the plane that is orthogonal to `v`."""
    return x - 2 * (x @ v)[:, None] * v / v.square().sum()
