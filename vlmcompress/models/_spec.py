"""The spec of a model family: everything that the project knows about it, as data.

All paths are *memory names*: those of `model.named_modules()` in transformers 5. Names on disk follow from
transformers' own mapping (`_names.disk_names`), names in vLLM from `EngineNames`. vLLM's renaming of a name on disk
(`engine_reads`) must give the same result; for some towers it does not with the names under which transformers saves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vlmcompress.models._images import Cut, Sizes

SmoothKind = Literal["norm", "linear"]
Prefixes = tuple[tuple[str, str], ...]
EXPERTS = "experts"
"""Common name of all groups of a mixture's experts."""
HEAD = "head"
"""Name of the output head's group."""
ROW_PARALLEL = frozenset({"o", "down", "fc2", "gdn_out", "conv_out"})
"""Groups whose inputs vLLM splits over devices (`RowParallelLinear`); for others it splits the outputs."""
REPLICATED = frozenset({"per_layer_gate", "per_layer_out"})
"""Groups that vLLM replicates on every device (`ReplicatedLinear`)."""


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers of one block that read the same input.

    Attributes:
        name: name in reports, e.g. `qkv`; it also determines what vLLM splits over devices (`ROW_PARALLEL`). With `{}` in it
            there is one group per expert, whose number also replaces `{}` in `linears` and `smooth`.
        linears: names within the block. Missing ones are left out; a block with none of them has no such group.
        smooth: the op before them, within the block, that can be divided by a per-channel vector while these weights
            are multiplied by it. Of several candidates the first that exists is used.
        smooth_kind: `norm` (its weight, and bias where it has one, is divided; see `ModelSpec.norm_offset`) or `linear`
            (its output rows, weight and bias, are divided).
        fused: whether the engine runs them as one matrix, so that all need the same scheme.
        kept: layers of the block that read the same input but always stay in 16 bits; smoothing applies to them as well.
    """

    name: str
    linears: tuple[str, ...]
    smooth: tuple[str, ...] = ()
    smooth_kind: SmoothKind = "norm"
    fused: bool = False
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """A `LinearGroup` found in a model: full memory names.

    Attributes:
        expert: the expert of a mixture that it belongs to; else None.
    """

    layer: int
    name: str
    linears: tuple[str, ...]
    smooth: str | None = None
    smooth_kind: SmoothKind = "norm"
    fused: bool = False
    kept: tuple[str, ...] = ()
    expert: int | None = None

    @property
    def kind(self) -> str:
        """The name without the number of an expert."""
        return self.name if self.expert is None else self.name.replace(f".{self.expert}.", ".")

    @property
    def split(self) -> Literal["inputs", "outputs", "none"]:
        """Whether vLLM splits the layers' inputs or outputs over several devices, or neither."""
        last = self.name.rpartition(".")[2]
        return "inputs" if last in ROW_PARALLEL else "none" if last in REPLICATED else "outputs"

    @property
    def unit(self) -> str:
        """The part of a block that needs one scheme: the group, or `experts` for all experts of a mixture."""
        return self.name if self.expert is None else EXPERTS


@dataclass(frozen=True)
class MtpHead:
    """A head that drafts tokens for speculative decoding, for which transformers has no module.

    Attributes:
        prefix: prefix of its tensors on disk and of its modules in vLLM; with `joint` that of the decoder's blocks on disk.
        blocks: key in config.json with its number of decoder blocks.
        top: whether vLLM reads that key at the top of config.json; else in the text model's part.
        joint: where the head's blocks are numbered on from the decoder's: the matrix that joins hidden state and embedding,
            which they have alone; else empty.
        engine: with `joint`, the prefix of the blocks' modules in vLLM.
    """

    prefix: str
    blocks: str
    top: bool = False
    joint: str = ""
    engine: str = ""

    @property
    def pattern(self) -> str:
        """What the names of its tensors look like, for messages."""
        return f"{self.prefix}.*.{self.joint}" if self.joint else f"{self.prefix}.*"


@dataclass(frozen=True)
class MlxClass:
    """How mlx-vlm's class of a family differs from transformers'.

    Attributes:
        head: whether it always has an output head of its own, always ties it to the embedding, or follows config.json.
        decoder: the only model type of a decoder that it has; empty: as transformers.
        full_attention: the config key with the distance between layers of full attention, which it takes for regular; empty:
            it reads `layer_types`, or has layers of one kind.
        tower_type: whether it reads the model's own type in `vision_config`.
        flat: whether it reads the decoder's entries at the top of config.json.
        fewer_tokens: whether `engines/mlx_reducers.py` was run with it.
    """

    head: Literal["own", "tied", "either"] = "either"
    decoder: str = ""
    full_attention: str = ""
    tower_type: bool = False
    flat: bool = False
    fewer_tokens: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineNames:
    """What names of a family become in vLLM and on the hub; of prefixes the first match wins.

    Attributes:
        prefixes: memory prefix -> prefix in vLLM; other names do not change.
        mapper: prefix on disk -> prefix in vLLM: the `hf_to_vllm_mapper` of vLLM's class.
        parts: path component -> its name in vLLM, anywhere in the rest of the path.
        hub: memory prefix -> prefix in the family's checkpoints on the hub, which all readers know.
    """

    prefixes: Prefixes = ()
    mapper: Prefixes = ()
    parts: tuple[tuple[str, str], ...] = ()
    hub: Prefixes = ()


@dataclass(frozen=True, kw_only=True)
class Tower:
    """What can be done within a family's vision tower.

    Attributes:
        cls: model type of the tower if it has a CLS token and blocks whose `self_attn` gives its attention; else None.
        units: source of a visual token: one row of the tower's output (`patch`), the rows of a square (`block`), or of tiles
            that are put together after the tower, cropped or scaled down (`packed`).
        whole: whether every device holds the whole tower, as when vLLM runs transformers' module; otherwise layers are split.
        joint: names within a block of the attention and of the norm after it, between which rows can be merged, in
            transformers and in vLLM; None if tokens cannot be merged in the tower.
        merging: model types of towers in which they can -> rows that are features: all (`full`) or those after CLS
            (`default`).
        unreduced: model types of towers whose tokens cannot be reduced, with the reason.
        blocks: part of the class name of blocks that identifies this tower in models without a family here.
        mend: function of a loaded model that corrects what transformers' tower computes otherwise than its authors' code;
            None: nothing.
    """

    cls: str | None = None
    units: Literal["patch", "block", "packed"] = "block"
    whole: bool = False
    joint: tuple[str, str] | None = None
    merging: tuple[tuple[str, str], ...] = ()
    unreduced: tuple[tuple[str, str], ...] = ()
    blocks: str | None = None
    mend: Callable[[Any], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Images:
    """How images and videos of a family become visual tokens, and where these stand.

    Attributes:
        placeholders: function of the model's config that computes the processor settings for as many placeholders as features;
            settings of the image processor have the prefix `image_processor.`. None: unknown, so messages about a mismatch
            cannot name a setting.
        processor: function of the model's config that returns the image processor's attributes that `layout` reads, for
            folders without one; None: config.json does not determine them.
        sizes: function that lists processor settings with which images have fewer tokens; None if images of all sizes have
            equally many tokens.
        recommended: the most visual tokens of an image that the family's model cards recommend; None: they recommend nothing.
        video: function of `(processor, frames, width, height)` that computes the grid `(frames, rows, columns)` of a video's
            tokens; raises ValueError for sizes that the processor refuses. None: videos are not counted.
        token_side: function of the model's config: side of the square of patches that merging, pixel shuffle or pooling joins
            into a visual token; None: 1.
        newlines: parameters outside the projector whose rows are inserted between visual tokens.
        levels: function of config.json's content: the number of rows that the decoder gets of each visual token, in its
            embedding's place or before some of its blocks; None: 1.
        features: function of what transformers' `get_image_features` returns that picks the rows of one level; None:
            `pooler_output`.
        positions: `1d`, or `mrope` when visual tokens carry (time, row, column) positions.
        grid: arrangement of an image's visual tokens, for reducers: `patches`, the encoder's patches, for one image size;
            `thw`, by the processor's `image_grid_thw`; `tiles`, square tiles of one size; `shapes`, tiles by
            `spatial_shapes`; `anyres`, by `layout` from `image_sizes`; None if they cannot be reduced.
    """

    placeholders: Callable[[Any], dict[str, Any]] | None = None
    processor: Callable[[Any], Any] | None = None
    sizes: Sizes | None = None
    recommended: int | None = None
    video: Callable[[Any, int, int, int], tuple[int, int, int]] | None = None
    token_side: Callable[[Any], int] | None = None
    newlines: tuple[str, ...] = ()
    levels: Callable[[Mapping[str, Any]], int] | None = None
    features: Callable[[Any], Any] | None = None
    positions: Literal["1d", "mrope"] = "1d"
    grid: Literal["patches", "thw", "tiles", "shapes", "anyres"] | None = None


@dataclass(frozen=True, kw_only=True)
class Engines:
    """What engines do differently with a family.

    Attributes:
        head_shares: whether vLLM's class ties the output head to the embedding regardless of config.json.
        embedding_whole: whether vLLM's class builds the token embedding without a quantization config.
        kv_scales: whether vLLM's class reads scales of an FP8 cache of keys and values from a checkpoint.
        text_defaults: of `text_config`: entries that vLLM reads but transformers may omit -> transformers' value.
        vllm_cpu: why vLLM's CPU build cannot run the family; None if it can.
        vllm_differs: of config.json, and whether vLLM is the CPU build: what vLLM computes otherwise than transformers.
        tool_calls: vLLM's parser for the family's tool calls, and a string in the chat template that identifies their
            format; None if vLLM has no such parser.
        mlx: how mlx-vlm's class differs, for families that it has.
    """

    head_shares: bool = False
    embedding_whole: bool = False
    kv_scales: bool = True
    text_defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda text: {}
    vllm_cpu: str | None = None
    vllm_differs: Callable[[Mapping[str, Any], bool], str | None] = lambda config, cpu: None
    tool_calls: tuple[str, str] | None = None
    mlx: MlxClass = MlxClass()


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One family of vision-language models. The first eight fields are what a new family needs.

    Attributes:
        family: name, equal to the file's recipe name.
        model_types: `model_type` values of config.json.
        groups: linear groups of one decoder block.
        vision: paths of the vision tower's roots; `projector`: paths of the modules between the tower and the LLM.
        vision_layers: path of the list of tower blocks, empty if there is no tower; `vision_groups`: linear groups of one of
            them, none where vLLM cannot run the tower quantized.
        layout: function that computes which part of an image of a given size each visual token shows.
        image_token: the config key with the id of the placeholder of one visual token.
        layers: path of the list of decoder blocks.
        norm: the norm between the last block and the output head, next to the list of blocks.
        norm_offset: norms compute `x * (offset + weight)`; 1.0 in Gemma, else 0.0.
        inner: modules of a decoder block, by the end of their names, whose parameters act within a branch, between the layers
            that read and those that write the residual stream.
        experts: the experts of a mixture within a block, fused in transformers and separate here (`_experts`); None: none.
        router: the module that routes tokens to experts, with a weight that engines run as a linear layer, always in 16
            bits.
        mixed_blocks: layers other than causal attention that mix tokens in the decoder, for messages; None if there are none.
        float32: parameters, by parts of their names, that may be stored in float32 independently of the other weights' type,
            as engines compute with them in float32.
        mtp: the head for speculative decoding that the family's checkpoints may have; else None.
    """

    family: str
    model_types: tuple[str, ...]
    groups: tuple[LinearGroup, ...]
    vision: tuple[str, ...]
    projector: tuple[str, ...]
    vision_layers: str
    vision_groups: tuple[LinearGroup, ...]
    layout: Cut
    image_token: str = "image_token_id"
    layers: str = "model.language_model.layers"
    norm: str = "norm"
    norm_offset: float = 0.0
    lm_head: str = "lm_head"
    inner: tuple[str, ...] = ("self_attn.q_norm", "self_attn.k_norm")
    experts: str | None = None
    router: str | None = None
    mixed_blocks: str | None = None
    float32: tuple[str, ...] = ()
    mtp: MtpHead | None = None
    names: EngineNames = EngineNames()
    tower: Tower = Tower()
    images: Images = Images()
    engine: Engines = Engines()

    def completed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The content of a config.json with missing `text_defaults` filled in."""
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            return dict(config)
        return {**config, "text_config": {**self.engine.text_defaults(text), **text}}

    def engine_name(self, memory_name: str) -> str:
        """The name of a module or tensor in vLLM, before vLLM fuses it (`q_proj` is part of `qkv_proj` there)."""
        return self._in_engine(_moved(memory_name, self.names.prefixes))

    def engine_reads(self, disk_name: str) -> str:
        """The parameter name to which vLLM maps a tensor's name on disk."""
        return self._in_engine(_moved(disk_name, self.names.mapper))

    def hub_name(self, memory_name: str) -> str:
        """The name of a tensor in the family's checkpoints on the hub."""
        return _moved(memory_name, self.names.hub)

    def _in_engine(self, name: str) -> str:
        parts = dict(self.names.parts)
        return ".".join(parts.get(part, part) for part in name.split("."))


def _moved(name: str, prefixes: Prefixes) -> str:
    """The name with its first matching prefix replaced."""
    for old, new in prefixes:
        if name == old or name.startswith(old + "."):
            return new + name[len(old) :]
    return name


# Llama, Mistral, Qwen2, Qwen3
QKV = LinearGroup(
    "qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("input_layernorm",), "norm", fused=True
)
ATTENTION_OUT = LinearGroup("o", ("self_attn.o_proj",), ("self_attn.v_proj",), "linear")
GATE_UP = LinearGroup("gate_up", ("mlp.gate_proj", "mlp.up_proj"), ("post_attention_layernorm",), "norm", fused=True)
DOWN = LinearGroup("down", ("mlp.down_proj",), ("mlp.up_proj",), "linear")
LLAMA = (QKV, ATTENTION_OUT, GATE_UP, DOWN)

# A mixture of experts. The norm before it feeds the router and all experts, so no scale can be folded into it.
EXPERT_GROUPS = (
    LinearGroup(
        "experts.{}.gate_up",
        ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        fused=True,
    ),
    LinearGroup("experts.{}.down", ("mlp.experts.{}.down_proj",), ("mlp.experts.{}.up_proj",), "linear"),
)
SHARED_EXPERT = (
    LinearGroup(
        "shared_expert.gate_up",
        ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        fused=True,
        kept=("mlp.shared_expert_gate",),
    ),
    LinearGroup("shared_expert.down", ("mlp.shared_expert.down_proj",), ("mlp.shared_expert.up_proj",), "linear"),
)

# Gated DeltaNet. The gated norm before `out_proj` has one weight for all heads, so no scale can be folded into it.
GATED_DELTA_NET = (
    LinearGroup(
        "gdn_in",
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        ("input_layernorm",),
        fused=True,
        kept=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    ),
    LinearGroup("gdn_out", ("linear_attn.out_proj",)),
)

# The vision tower of Qwen3-VL and Qwen3.5
QWEN3_TOWER = (
    LinearGroup("qkv", ("attn.qkv",), ("norm1",)),
    LinearGroup("o", ("attn.proj",)),
    LinearGroup("fc1", ("mlp.linear_fc1",), ("norm2",)),
    LinearGroup("fc2", ("mlp.linear_fc2",)),
)

MTP = MtpHead("mtp", "mtp_num_hidden_layers")  # Qwen3.5: multi-token prediction

# CLIP and SigLIP. A GELU is between fc1 and fc2, so fc2 has no op to smooth into.
CLIP = (
    LinearGroup(
        "qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("layer_norm1",), "norm", fused=True
    ),
    LinearGroup("o", ("self_attn.out_proj",), ("self_attn.v_proj",), "linear"),
    LinearGroup("fc1", ("mlp.fc1",), ("layer_norm2",), "norm"),
    LinearGroup("fc2", ("mlp.fc2",)),
)

CLIP_TOWERS = (("clip_vision_model", "default"), ("siglip_vision_model", "full"))

# The LLaVA shape in vLLM: everything that transformers keeps under `model.` is top-level there, as it is on the hub.
LLAVA_MAPPER: Prefixes = (
    ("model.language_model", "language_model.model"),
    ("model.vision_tower", "vision_tower"),
    ("model.multi_modal_projector", "multi_modal_projector"),
    ("model.image_newline", "image_newline"),
    ("lm_head", "language_model.lm_head"),
)
# CLIP and SigLIP are a module inside the tower there; transformers 5 has none, and saves none.
LLAVA_ENGINE: Prefixes = (("model.vision_tower", "vision_tower.vision_model"), *LLAVA_MAPPER)
LLAVA_NAMES = EngineNames(prefixes=LLAVA_ENGINE, mapper=LLAVA_MAPPER, hub=LLAVA_ENGINE)
QWEN_ENGINE: Prefixes = (
    ("model.language_model", "language_model.model"),
    ("model.visual", "visual"),
    ("lm_head", "language_model.lm_head"),
)
# Qwen2-VL and Qwen2.5-VL, older than the names of transformers 5
QWEN2_MAPPER: Prefixes = (*QWEN_ENGINE, ("model", "language_model.model"))
QWEN2_HUB: Prefixes = (("model.language_model", "model"), ("model.visual", "visual"))
