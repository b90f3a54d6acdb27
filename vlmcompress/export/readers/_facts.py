"""The facts about a checkpoint that decide which engines load it, and those for launch files, read from its config.json.

Untrusted names (folders, architectures) are reduced to characters without a meaning in shells, YAML and Markdown, so that
launch files need no quoting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vlmcompress.reduction.support import PREFIX

_KEPT = re.compile(r"-:(?!.*(?:vision|visual|mtp)).*layers")  # GPTQ's pattern of layers that are not quantized
_COUNTS = (1, 2, 4, 8)
_FILL = 0.6  # share of the memory for weights before another GPU is added; the rest is KV cache
_SHARE = 0.92  # of device memory that vLLM 0.32 takes by default


@dataclass(frozen=True)
class QuantizedGroup:
    """How some layers are quantized.

    Attributes:
        kind: `int` or `float`; bits: of a weight; strategy: `group`, `channel`, `tensor`, `tensor_group` or `block`.
        size: weights that share a scale, for strategies that have one.
        symmetric: whether there are no zero points.
        activations: bits of quantized activations, None for 16-bit ones; dynamic: whether their scale is computed at run time.
        packing: `format` of the group, such as `pack-quantized`; for GPTQ its `checkpoint_format`.
        whole: whether its target is the class `Linear`, not names.
    """

    kind: str
    bits: int
    strategy: str
    size: int | None = None
    symmetric: bool = True
    activations: int | None = None
    dynamic: bool = True
    packing: str = ""
    whole: bool = True


_ALGORITHMS = {
    "FP8": QuantizedGroup("float", 8, "tensor", activations=8, dynamic=False),
    "FP8_PER_CHANNEL_PER_TOKEN": QuantizedGroup("float", 8, "channel", activations=8),
    "NVFP4": QuantizedGroup("float", 4, "tensor_group", 16, activations=4),
    "W4A16_NVFP4": QuantizedGroup("float", 4, "tensor_group", 16),
}
"""ModelOpt's algorithms."""


@dataclass(frozen=True)
class Machine:
    """The fields of a target for launch files; see `targets.Target`."""

    title: str
    memory: float | None
    capability: tuple[int, int] | None


@dataclass(frozen=True)
class Reducer:
    """A checkpoint's reducer: its label, whether requests may set its share, whether vLLM serves it."""

    label: str
    takes_shares: bool
    served: bool


@dataclass(frozen=True)
class LoadFacts:
    """Facts about a checkpoint.

    Attributes:
        name: name on the server: that of the folder, in characters that need no quoting.
        architecture: of the original, without the prefix for a reducer.
        method: `quant_method` of config.json; None if nothing is quantized.
        groups: name -> quantization of layers: the config groups of compressed-tensors, or equivalent groups for the settings
            of AWQ and GPTQ or the algorithms of ModelOpt.
        embeddings: whether the token embedding is quantized.
        experts: whether the decoder is a mixture of experts.
        kept_layers: whether GPTQ's patterns leave layers of decoder blocks in 16 bits.
        kv_fp8: whether there are scales for an FP8 KV cache.
        max_len: tokens of context; heads: attention heads of the decoder; None if config.json has no value.
        weights: bytes of the weights.
        code: whether the checkpoint includes Python code.
        draft: method of speculative decoding by the checkpoint's own head; empty: it has none.
        splits: numbers of GPUs over which its layers can be split; None: any that divides the heads.
        image_tokens: least and most visual tokens of an image by the processor; None: unknown, or of no such kind.
        generation: numbers of generation_config.json; stops: texts of the tokens that end an answer.
    """

    name: str
    architecture: str = ""
    method: str | None = None
    groups: Mapping[str, QuantizedGroup] = field(default_factory=dict)
    embeddings: bool = False
    experts: bool = False
    kept_layers: bool = False
    kv_fp8: bool = False
    max_len: int | None = None
    heads: int | None = None
    weights: int = 0
    code: bool = False
    draft: str = ""
    machine: Machine | None = None
    reducer: Reducer | None = None
    splits: tuple[int, ...] | None = None
    image_tokens: tuple[int, int] | None = None
    generation: Mapping[str, float] = field(default_factory=dict)
    stops: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """The smallest number of GPUs (a power of two up to 8 that divides the heads and splits no group of weights) that holds
        the weights with room for a KV cache; 1 if the machine is unknown."""
        if self.machine is None or not self.machine.memory or self.machine.capability is None:
            return 1
        counts = [count for count in _COUNTS if not (self.heads or 1) % count and count in (self.splits or _COUNTS)]
        room = _FILL * _SHARE * self.machine.memory * 1e9
        return next((count for count in counts if self.weights <= count * room), counts[-1])

    @property
    def format(self) -> str:
        """The format's name in `vlmcompress.export.formats`, or else the method's."""
        second = any(group.packing == "gptq_v2" for group in self.groups.values())
        return "bf16" if self.method is None else "gptq-v2" if self.method == "gptq" and second else self.method

    @property
    def zero_points(self) -> bool:
        """Whether some weights are asymmetric."""
        return any(not group.symmetric for group in self.groups.values())

    @property
    def several(self) -> bool:
        """Whether the checkpoint has several schemes."""
        return len({replace(group, whole=True) for group in self.groups.values()}) > 1

    @property
    def resource(self) -> str:
        """The name in the form of Kubernetes and Compose: RFC 1123, lower case, at most 40 characters."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower())[:40].strip("-") or "model"


def gather_facts(
    config: Mapping[str, Any],
    name: str,
    *,
    weights: int = 0,
    machine: Machine | None = None,
    reducer: Reducer | None = None,
    experts: bool = False,
    draft: str = "",
    splits: tuple[int, ...] | None = None,
) -> LoadFacts:
    """Gather the facts.

    Args:
        config: content of config.json; invalid values count as missing.
        name: the checkpoint's name, of any characters.
        weights: bytes of all tensors.
        experts: whether the decoder is a mixture of experts.
        draft: method of speculative decoding by the checkpoint's own head; empty: it has none.
        splits: numbers of GPUs over which its layers can be split; None: unknown.
    """
    text = _mapping(config.get("text_config")) or config
    quantization = _mapping(config.get("quantization_config"))
    names = [name for name in config.get("architectures") or [] if isinstance(name, str)]
    lists = (group.get("targets") for group in map(_mapping, _mapping(quantization.get("config_groups")).values()))
    targets = [str(target) for targets in lists if isinstance(targets, list) for target in targets]
    return LoadFacts(
        name=plain_name(name) or "model",
        architecture=plain_name(names[0]).removeprefix(PREFIX) if names else "",
        method=plain_name(str(quantization["quant_method"])) if "quant_method" in quantization else None,
        groups=_groups(quantization),
        embeddings=any("embed" in target.lower() for target in targets),
        experts=experts,
        kept_layers=any(_KEPT.match(str(key)) for key in _mapping(quantization.get("dynamic"))),
        kv_fp8=bool(quantization.get("kv_cache_scheme")) or quantization.get("kv_cache_quant_algo") == "FP8",
        max_len=_count(text.get("max_position_embeddings")),
        heads=_count(text.get("num_attention_heads")),
        weights=weights,
        code=bool(config.get("auto_map")),
        draft=draft,
        machine=machine,
        reducer=reducer,
        splits=splits,
    )


def plain_name(name: str) -> str:
    """The name reduced to ASCII letters, digits, `_`, `-` and `.`, without leading or trailing `-` and `.`."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:96]


def _groups(quantization: Mapping[str, Any]) -> dict[str, QuantizedGroup]:
    if _count(quantization.get("bits")):  # AWQ and GPTQ, the latter with overrides for matching layers
        overrides = {key: _mapping(value) for key, value in _mapping(quantization.get("dynamic")).items()}
        others = {
            str(key): _numbers({**quantization, **value})
            for key, value in overrides.items()
            if not key.startswith("-:")
        }
        return {"": _numbers(quantization), **others}
    if "quant_algo" in quantization:  # ModelOpt, with an algorithm per layer for mixed precision
        layers = [_mapping(layer) for layer in _mapping(quantization.get("quantized_layers")).values()] or [
            quantization
        ]
        names = {plain_name(str(layer.get("quant_algo"))).upper() for layer in layers}
        return {name: _ALGORITHMS[name] for name in sorted(names) if name in _ALGORITHMS}
    return {
        plain_name(str(key)): _group(_mapping(group), str(quantization.get("format", "")))
        for key, group in _mapping(quantization.get("config_groups")).items()
    }


def _numbers(quantization: Mapping[str, Any]) -> QuantizedGroup:
    """The group for the settings of AWQ and GPTQ."""
    size = _count(quantization.get("group_size"))
    return QuantizedGroup(
        kind="int",
        bits=_count(quantization.get("bits")) or 0,
        strategy="group" if size else "channel",
        size=size,
        symmetric=bool(quantization.get("sym", not quantization.get("zero_point", False))),
        packing=str(quantization.get("checkpoint_format") or ""),
    )


def _group(group: Mapping[str, Any], packing: str) -> QuantizedGroup:
    weights, inputs = _mapping(group.get("weights")), _mapping(group.get("input_activations"))
    return QuantizedGroup(
        kind=str(weights.get("type", "int")),
        bits=_count(weights.get("num_bits")) or 0,
        strategy=str(weights.get("strategy", "")),
        size=_count(weights.get("group_size")),
        symmetric=bool(weights.get("symmetric", True)),
        activations=_count(inputs.get("num_bits")),
        dynamic=bool(inputs.get("dynamic", True)),
        packing=str(group.get("format") or packing),
        whole=group.get("targets") == ["Linear"],
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
