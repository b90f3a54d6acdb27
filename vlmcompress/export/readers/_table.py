"""The table of engines and formats: what each engine reads, with which packages, and the evidence.

`run` names the test or script that loaded such files; `read` names the engine's source file, and nothing was run. Formats are
those of `vlmcompress.export.formats` by name; `Numbers` describe single schemes in a cell.

transformers and GPTQModel were run once (versions in eval/readers.json): transformers 5.13 and
5.14 load no checkpoint of compressed-tensors with packed weights, 5.23 and 5.24 give zero points a wrong shape
(`mismatched sizes`), and every version initializes an embedding by a `weight`, which a packed one does not have
(`PreTrainedModel._init_weights`). GPTQModel looks for transformers' memory names of tensors, which the files of some families
have; for others it silently loads AWQ without weights. SGLang 0.5.23: `srt/layers/quantization`
(`gptq/schemes/gptq_linear.py`: the fallback kernel for Marlin was removed; `modelopt_quant.py`), `srt/models`. LMDeploy 0.18.0:
`turbomind/converter.py` reads only `config_groups.group_0`, `turbomind/weight_format.py`, `turbomind/supported_models.py`; if
TurboMind does not support the architecture, it silently falls back to its PyTorch engine, so such models are refused.
TensorRT-LLM (snapshots of 2026): `models/quant_config_utils.py`, `docs/source/models/supported-models.md`; it checks the bits
but not the type of 8-bit weights, so that it would read INT8 as FP8, which is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vlmcompress.export.readers._facts import QuantizedGroup


@dataclass(frozen=True)
class Numbers:
    """Config groups that an engine reads. An empty tuple or None allows everything; `activations=(None,)` only 16 bits."""

    kind: str
    bits: tuple[int, ...] = ()
    strategies: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    activations: tuple[int | None, ...] = ()
    symmetric: bool | None = None
    dynamic: bool | None = None
    packings: tuple[str, ...] = ()

    def holds(self, group: QuantizedGroup) -> bool:
        """Whether a config group is among them."""
        allowed = (
            *((self.bits, group.bits), (self.strategies, group.strategy), (self.sizes, group.size)),
            *((self.activations, group.activations), (self.packings, group.packing)),
        )
        return (
            group.kind == self.kind
            and all(not values or value in values for values, value in allowed)
            and self.symmetric in (None, group.symmetric)
            and (group.activations is None or self.dynamic in (None, group.dynamic))
        )


@dataclass(frozen=True)
class Cell:
    """The part of a format that an engine reads.

    Attributes:
        text: a description of it that follows "reads".
        evidence: `run: TEST OR SCRIPT` or `read: SOURCE`.
        takes: config groups that are read; empty: all.
        several: whether a checkpoint may have several schemes.
        whole: False: several config groups are read only if none has the target `Linear`.
        first: the name that a sole config group must have; empty: any.
        vocabulary: whether the token embedding may be quantized.
        experts: architectures whose mixture of experts is read; None: all.
        kept_layers: whether layers of decoder blocks may be left in 16 bits.
        needs: packages required besides the engine, by their names for pip.
        instead: trait of a checkpoint (a property of `LoadFacts`) -> packages that replace `needs`.
        notes: trait -> a note for users.
        loader: traits with which only `vlmcompress.models.open_model` loads it.
        lacking: architecture -> why this one is not read.
    """

    text: str
    evidence: str
    takes: tuple[Numbers, ...] = ()
    several: bool = True
    whole: bool = True
    first: str = ""
    vocabulary: bool = True
    experts: frozenset[str] | None = None
    kept_layers: bool = True
    needs: tuple[str, ...] = ()
    instead: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    loader: tuple[str, ...] = ()
    lacking: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineFormats:
    """An engine and the formats that it reads, by their names.

    Attributes:
        title: its name; version: the version that the facts are for.
        formats: format -> the part that is read, or why nothing is.
        other: message for a format that is not among them, with `{}` for its name.
        architectures: supported ones; None: all of ours. `absent`: message for another one, with `{}` for its name.
        reducers: `served` by our plugin, `attached` by our code, `none`, its `own`, or the methods that our code
            attaches there.
    """

    title: str
    version: str
    formats: Mapping[str, Cell | str]
    other: str = "it is not known to read the format {}"
    architectures: frozenset[str] | None = None
    absent: str = "it has no class of its own for {}"
    reducers: str | tuple[str, ...] = "none"


_EVERY = "every scheme"
_16_BITS = "16 bits"
_MEASURED = "run: scripts/measure/format_table.py"
_LOADED = "run: eval/readers.json"
_TENSORS = ("compressed-tensors", "accelerate")
_NO_ZERO_POINTS = "4 and 8 bits without zero points"
_SYMMETRIC = Numbers("int", (4, 8), symmetric=True)
_PACKED_4 = Numbers("int", (4,), activations=(None,))
_NVFP4 = ("tensor_group",)

_VLLM = {
    "bf16": Cell(_16_BITS, _MEASURED),
    "compressed-tensors": Cell(_EVERY, _MEASURED),
    "awq": Cell("4 bits", _MEASURED, (_PACKED_4,), vocabulary=False),
    "gptq": Cell(_NO_ZERO_POINTS, _MEASURED, (_SYMMETRIC,), vocabulary=False),
    "gptq-v2": Cell(_NO_ZERO_POINTS, _MEASURED, (_SYMMETRIC,), vocabulary=False),
    "modelopt": Cell(_EVERY, _MEASURED),
    "fp8": Cell(_EVERY, "read: quantization/fp8.py"),
}
_ONE_WIDTH = "one scheme for all layers of the decoder blocks"  # optimum does not read `dynamic`
_TRANSFORMERS: dict[str, Cell | str] = {
    "bf16": Cell(_16_BITS, _LOADED, loader=("experts",)),
    "compressed-tensors": Cell(
        f"{_EVERY}; a quantized token embedding and experts by `vlmcompress.models.open_model`",
        _LOADED,
        needs=("transformers>=5.15", *_TENSORS),
        instead={"zero_points": ("transformers>=5.15,<5.23", *_TENSORS)},
        notes={
            "zero_points": "transformers 5.23 and 5.24 load no zero points, but with "
            "`quantization_config=CompressedTensorsConfig(dequantize=True)`, where one scheme is for all layers"
        },
        loader=("embeddings", "experts"),
    ),
    "awq": Cell(
        "4 bits",
        _LOADED,
        (_PACKED_4,),
        vocabulary=False,
        experts=frozenset(),
        needs=("transformers>=5.15", "gptqmodel", "accelerate"),
    ),
    **dict.fromkeys(
        ("gptq", "gptq-v2"),
        Cell(
            _ONE_WIDTH,
            _LOADED,
            several=False,
            vocabulary=False,
            experts=frozenset(),
            kept_layers=False,
            needs=("transformers>=5.15", "gptqmodel", "optimum", "accelerate"),
            lacking=dict.fromkeys(
                ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
                "optimum finds no decoder blocks in it",
            ),
        ),
    ),
    "modelopt": "it does not know ModelOpt's files, of which it loads codes without their scales",
}


def _classes(*names: str) -> frozenset[str]:
    """Architectures, by what their names begin with; several in one string."""
    return frozenset(f"{name}ForConditionalGeneration" for name in " ".join(names).split())


_EXPERTS = _classes("Glm4vMoe Qwen3_5Moe")
_GPTQMODEL = {
    "awq": Cell("4 bits", _LOADED, (_PACKED_4,), vocabulary=False, experts=_EXPERTS),
    **dict.fromkeys(("gptq", "gptq-v2"), Cell(_EVERY, _LOADED, vocabulary=False, experts=_EXPERTS)),
}
_READ_SGLANG = "read: srt/layers/quantization"
_SGLANG = {
    "bf16": Cell(_16_BITS, "read: srt/models"),
    "compressed-tensors": Cell(
        "4 and 8 bits, INT8, FP8 and NVFP4, with the token embedding in 16 bits",
        _READ_SGLANG,
        (
            Numbers("int", (4, 8), activations=(None,)),
            Numbers("int", (8,), ("channel", "tensor"), activations=(8,)),
            Numbers("float", (8,), ("channel", "tensor", "block"), activations=(8,)),
            Numbers("float", (4,), _NVFP4),
        ),
        vocabulary=False,
    ),
    "awq": Cell("4 bits", _READ_SGLANG, (_PACKED_4,), vocabulary=False),
    **dict.fromkeys(("gptq", "gptq-v2"), Cell(_NO_ZERO_POINTS, _READ_SGLANG, (_SYMMETRIC,), vocabulary=False)),
    "modelopt": Cell(
        "FP8 with fixed scales, and NVFP4",
        _READ_SGLANG,
        (Numbers("float", (8,), ("tensor",), activations=(8,), dynamic=False), Numbers("float", (4,), _NVFP4)),
    ),
}
_READ_LMDEPLOY = "read: turbomind"
_LMDEPLOY = {
    "bf16": Cell(_16_BITS, _READ_LMDEPLOY),
    "compressed-tensors": Cell(
        "4 bits in groups of 32 or 128, one scheme for all layers",
        _READ_LMDEPLOY,
        (Numbers("int", (4,), ("group",), (32, 128), (None,), packings=("pack-quantized",)),),
        several=False,
        first="group_0",
        vocabulary=False,
    ),
    "awq": Cell("4 bits in groups of 128", _READ_LMDEPLOY, (Numbers("int", (4,), sizes=(128,)),), vocabulary=False),
    "gptq": Cell(
        "4 bits in groups of 128 without zero points",
        _READ_LMDEPLOY,
        (Numbers("int", (4,), sizes=(128,), symmetric=True),),
        several=False,
        vocabulary=False,
    ),
}
_READ_TENSORRT = "read: models/quant_config_utils.py"
_TENSORRT = {
    "bf16": Cell(_16_BITS, _READ_TENSORRT),
    "compressed-tensors": Cell(
        "FP8 by row with dynamic activations, FP8 in blocks, and NVFP4",
        _READ_TENSORRT,
        (
            Numbers("float", (8,), ("channel",), activations=(8,), dynamic=True),
            Numbers("float", (8,), ("block",), activations=(8,)),
            Numbers("float", (4,), _NVFP4, (16,), (4,)),
        ),
        whole=False,
        vocabulary=False,
    ),
    "modelopt": Cell(_EVERY, _READ_TENSORRT),
}
_QWEN = "Qwen2VL Qwen2_5_VL Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe"
_RUN_MLX = "run: tests/engines/test_mlx.py"
_MLX = {
    "bf16": Cell(f"{_16_BITS}, with config.json as published", _RUN_MLX),
    "mlx": Cell("all that is written", _RUN_MLX),
    "compressed-tensors": Cell(
        "4 bits in groups of 32, 64 or 128 without zero points, FP8 and NVFP4; for others take --format mlx",
        "read: mlx_vlm/utils.py",
        (
            Numbers("int", (4,), ("group",), (32, 64, 128), (None,), symmetric=True),
            Numbers("float", (8,), ("channel", "tensor", "block")),
            Numbers("float", (4,), _NVFP4),
        ),
        vocabulary=False,
    ),
}

ENGINES: Mapping[str, EngineFormats] = {
    "vllm": EngineFormats("vLLM", "0.32", _VLLM, reducers="served"),
    "transformers": EngineFormats(
        "transformers",
        "5.15 to 5.24",
        _TRANSFORMERS,
        other="it does not load the format {}",
        reducers="attached",
    ),
    "gptqmodel": EngineFormats(
        "GPTQModel",
        "7.7",
        _GPTQMODEL,
        other="it reads AWQ and GPTQ, not {}",
        architectures=_classes("Gemma4 Lfm2Vl Qwen3VL Qwen3_5") | _EXPERTS,
        absent="it finds no weights of {} under the names that its files have",
    ),
    "sglang": EngineFormats(
        "SGLang",
        "0.5.23",
        _SGLANG,
        architectures=_classes("Llava Gemma3 Lfm2Vl", _QWEN) | {"InternVLChatModel"},
    ),
    "lmdeploy": EngineFormats(
        "LMDeploy",
        "0.18.0",
        _LMDEPLOY,
        other="its TurboMind engine does not read the format {}",
        architectures=_classes("Qwen2VL Qwen2_5_VL Qwen3_5 Qwen3_5Moe InternVL") | {"InternVLChatModel"},
        absent="its TurboMind engine does not know {}",
    ),
    "tensorrt-llm": EngineFormats(
        "TensorRT-LLM",
        "of 2026",
        _TENSORRT,
        other="it is not known to read the format {} without building an engine",
        architectures=_classes("LlavaNext Gemma3", _QWEN),
        absent="its PyTorch backend has no {} with images",
    ),
    "llamacpp": EngineFormats(
        "llama.cpp",
        "of xllamacpp 2026.10",
        {"gguf": Cell("all that is written", "run: tests/engines/test_llamacpp.py")},
        other="it reads GGUF, not {}",
        reducers="own",
    ),
    "openvino": EngineFormats(
        "OpenVINO GenAI",
        "2026.4",
        {"openvino": Cell("all that is written", "run: tests/engines/test_openvino.py")},
        other="it reads graphs of its own, not {}",
        reducers="own",
    ),
    "mlx": EngineFormats(
        "mlx-vlm",
        "0.7.10",
        _MLX,
        other="it does not load the format {}; take --format mlx",
        # not LLaVA-NeXT, whose tiles mlx-vlm 0.7.10 puts together in another way: its answers about images are wrong
        architectures=_classes(
            *(_QWEN, "Gemma3 Gemma4 Glm4v Glm4vMoe Idefics3 SmolVLM InternVL Lfm2Vl Llava LlavaOnevision Mistral3")
        ),
        absent="it has no class for {} that answers as transformers' does",
        reducers=("coverage", "divprune", "pool", "uniform"),
    ),
}
"""The engines by name, in the order in which they are named to people."""
