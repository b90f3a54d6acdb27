"""DINOv2 ViT-S/14 as a CLIP tower, the same function: what a LLaVA of transformers and vLLM loads with no code of ours.

Two things of CLIP are in the way. It has no LayerScale: the factors go into the rows of the layers before them. And
it has a norm before its blocks, which would take each token's length away. 64 added channels of large constants,
which cancel in the mean, make that norm's variance the same for all tokens, so that with a gain of its root the other
384 channels pass as they are, and the added ones end there (gain 0). In the blocks they are zeros: every layer that
adds to the stream is centred first, which no norm of the blocks notices, and then a norm over 448 channels differs
from that over 384 by a factor, sqrt(6 / 7), which goes into its gain and epsilon. The seventh head that 448 channels
bring has zeros for weights.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPVisionConfig

WIDTH, HEADS, LAYERS, PATCH, PIXELS = 384, 6, 12, 14, 224
HEAD = WIDTH // HEADS
PADDED = WIDTH + HEAD
SIDE = PIXELS // PATCH
EPSILON = 1e-6
DEVIATION = 64.0  # of the padded stream before the first norm; a power of 2, so that BF16 has it exactly
# Squares of 24 threes and 8 ones sum to 224, half of the 448 channels, so +-3 and +-1 have a variance of 1 over all of them.
CONSTANTS = torch.tensor([3.0] * 24 + [1.0] * 8).repeat_interleave(2) * torch.tensor([1.0, -1.0]).repeat(32) * DEVIATION

Weights = dict[str, Tensor]


def clip_config(layers: int = LAYERS) -> CLIPVisionConfig:
    """The config of the tower; as LLaVA has it, a last layer is there and not used."""
    return CLIPVisionConfig(
        hidden_size=PADDED, intermediate_size=4 * WIDTH, num_hidden_layers=layers + 1, num_attention_heads=HEADS + 1,
        image_size=PIXELS, patch_size=PATCH, hidden_act="gelu", layer_norm_eps=EPSILON * WIDTH / PADDED,
        projection_dim=PADDED,
    )  # fmt: skip


def as_clip(dino: Weights, layers: int = LAYERS) -> Weights:
    """The tensors of a `CLIPVisionModel` that computes what DINOv2 computes, the mean of each token taken away.

    dino: tensors by the names of transformers' `Dinov2Model`, float32.
    """
    table = _positions(dino["embeddings.position_embeddings"])
    cls, patches = dino["embeddings.cls_token"][0], table[1:] + dino["embeddings.patch_embeddings.projection.bias"]
    stream = torch.cat([_centred(table[:1] + cls), _centred(patches)])
    out = {
        "embeddings.class_embedding": torch.zeros(PADDED),
        "embeddings.position_embedding.weight": torch.cat([stream, CONSTANTS.expand(len(stream), -1)], 1),
        "embeddings.patch_embedding.weight": _rows(
            _centred_rows(dino["embeddings.patch_embeddings.projection.weight"])
        ),
        "pre_layrnorm.weight": _rows(torch.full((WIDTH,), DEVIATION)),
        "pre_layrnorm.bias": torch.zeros(PADDED),
        "post_layernorm.weight": torch.ones(PADDED),
        "post_layernorm.bias": torch.zeros(PADDED),
    }
    for k in range(layers):
        out |= {f"encoder.layers.{k}.{name}": value for name, value in _block(dino, f"encoder.layer.{k}.").items()}
    last = {name: value for name, value in out.items() if name.startswith(f"encoder.layers.{layers - 1}.")}
    out |= {name.replace(f"layers.{layers - 1}.", f"layers.{layers}."): value for name, value in last.items()}
    return out


def _block(dino: Weights, prefix: str) -> Weights:
    out: Weights = {}
    for number, part in (("1", "layer_norm1"), ("2", "layer_norm2")):
        out[f"{part}.weight"] = _rows(dino[f"{prefix}norm{number}.weight"]) * (WIDTH / PADDED) ** 0.5
        out[f"{part}.bias"] = _rows(dino[f"{prefix}norm{number}.bias"])
    for name in ("query", "key", "value"):
        source, target = f"{prefix}attention.attention.{name}.", f"self_attn.{name[0]}_proj."
        out[target + "weight"] = _columns(_rows(dino[source + "weight"]))
        out[target + "bias"] = _rows(dino[source + "bias"])
    for source, target, scale in (
        ("attention.output.dense", "self_attn.out_proj", "layer_scale1.lambda1"),
        ("mlp.fc2", "mlp.fc2", "layer_scale2.lambda1"),
    ):
        factor = dino[prefix + scale]
        weight = _rows(_centred_rows(dino[f"{prefix}{source}.weight"] * factor[:, None]))
        out[f"{target}.weight"] = _columns(weight) if "out_proj" in target else weight
        out[f"{target}.bias"] = _rows(_centred(dino[f"{prefix}{source}.bias"] * factor))
    out["mlp.fc1.weight"] = _columns(dino[f"{prefix}mlp.fc1.weight"])
    out["mlp.fc1.bias"] = dino[f"{prefix}mlp.fc1.bias"]
    return out


def _positions(table: Tensor) -> Tensor:
    """[1 + 256, 384] of DINOv2's table for images of 518 pixels, interpolated as `Dinov2Model` does."""
    side = int((table.shape[1] - 1) ** 0.5)
    grid = table[:, 1:].reshape(1, side, side, WIDTH).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(SIDE, SIDE), mode="bicubic", align_corners=False)
    return torch.cat([table[0, :1], grid.flatten(2)[0].T])


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _centred_rows(weight: Tensor) -> Tensor:
    """The weight of a layer whose outputs have a mean of 0."""
    return weight - weight.mean(0, keepdim=True)


def _rows(x: Tensor) -> Tensor:
    """Zeros below, up to the padded width."""
    return torch.cat([x, x.new_zeros(PADDED - len(x), *x.shape[1:])])


def _columns(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(len(x), PADDED - x.shape[1])], 1)
