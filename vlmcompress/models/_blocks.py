"""Data that several families share: groups of linear layers, and what their parts are called in vLLM and on the hub."""

from __future__ import annotations

from vlmcompress.models._spec import Draft, LinearGroup, Prefixes

# Llama, Mistral, Qwen2, Qwen3
QKV = LinearGroup(
    "qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("input_layernorm",), "norm", fused=True
)
ATTENTION_OUT = LinearGroup("o", ("self_attn.o_proj",), ("self_attn.v_proj",), "linear")
GATE_UP = LinearGroup("gate_up", ("mlp.gate_proj", "mlp.up_proj"), ("post_attention_layernorm",), "norm", fused=True)
DOWN = LinearGroup("down", ("mlp.down_proj",), ("mlp.up_proj",), "linear")
LLAMA = (QKV, ATTENTION_OUT, GATE_UP, DOWN)

# A mixture of experts. The norm before it feeds the router and all experts, so it takes no scale in.
EXPERTS = (
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

# Gated DeltaNet. The gated norm before `out_proj` has one weight for all heads, so it can take no scale in.
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

MTP = Draft("mtp", "mtp_num_hidden_layers")  # Qwen3.5: multi-token prediction

# CLIP and SigLIP. A GELU sits between fc1 and fc2, so fc2 has no op to smooth into.
CLIP = (
    LinearGroup(
        "qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("layer_norm1",), "norm", fused=True
    ),
    LinearGroup("o", ("self_attn.out_proj",), ("self_attn.v_proj",), "linear"),
    LinearGroup("fc1", ("mlp.fc1",), ("layer_norm2",), "norm"),
    LinearGroup("fc2", ("mlp.fc2",)),
)

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
QWEN_ENGINE: Prefixes = (
    ("model.language_model", "language_model.model"),
    ("model.visual", "visual"),
    ("lm_head", "language_model.lm_head"),
)
# Qwen2-VL and Qwen2.5-VL, older than the names of transformers 5
QWEN2_MAPPER: Prefixes = (*QWEN_ENGINE, ("model", "language_model.model"))
QWEN2_HUB: Prefixes = (("model.language_model", "model"), ("model.visual", "visual"))
