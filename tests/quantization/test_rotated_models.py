"""A rotated model gives the answers of the original, in every family for which that can be; the others are refused."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
from torch import nn

from tests.kit.inputs import encode
from tests.kit.spread import spread
from vlmcompress import models
from vlmcompress.export import rotate
from vlmcompress.models import Source, head_on_disk, with_head
from vlmcompress.reduction.methods import Signals
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.registry import REDUCERS

REFUSED = {
    "cohere2-vision": "q_proj reads the stream without a norm that is known",
    "exaone4-5": "its head that drafts tokens reads the stream, too",
    "gemma3": r"norms compute x \* \(1 \+ weight\)",
    "gemma4": "post_attention_layernorm normalizes what a branch puts out",
    "gemma4-moe": "its router and its experts",
    "gemma4-unified": "post_attention_layernorm normalizes what a branch puts out",
    "glm-ocr": "post_self_attn_layernorm normalizes what a branch puts out",
    "glm4v": "post_self_attn_layernorm normalizes what a branch puts out",
    "glm4v-moe": "its router and its experts",
    "qwen3-5": r"norms compute x \* \(1 \+ weight\)",
    "qwen3-5-moe": r"norms compute x \* \(1 \+ weight\)",
    "qwen3-vl-moe": "its router and its experts",
}


@pytest.fixture
def pair(family, checkpoint, tmp_path):
    """The model of a family in float32 as it is, and rotated."""
    if family in REFUSED:
        pytest.skip("refused")
    source = spread(checkpoint(family), tmp_path / "model")
    rotate.write_rotated(Source.of(source), tmp_path / "rotated", rotate.Rotations("hadamard", 1))
    return tuple(models.load(folder, dtype=torch.float32) for folder in (source, tmp_path / "rotated"))


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_rotations_are_refused(name, checkpoint, tmp_path):
    with pytest.raises(UserError, match=f"a rotation does not leave {name} as it is: .*{REFUSED[name]}"):
        rotate.write_rotated(Source.of(checkpoint(name)), tmp_path / "rotated", rotate.Rotations("hadamard", 1))
    assert not (tmp_path / "rotated").exists()


@pytest.mark.representatives
def test_rotated_models_answer_the_same_with_other_weights(pair):
    """Logits, and the tokens that a reducer keeps by what the projector puts out; the stream itself is another one.

    A head that shared the embedding's weights is stored, under a name that vLLM finds, and config.json declares it.
    """
    before, after = pair
    batch = encode(before, 2)
    draw = torch.Generator().manual_seed(0)  # images of one colour have tokens that are all alike
    batch["pixel_values"] = torch.randn(batch["pixel_values"].shape, generator=draw)
    with torch.no_grad():
        expected, logits = before.model(**batch).logits, after.model(**batch).logits
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    stream = models.stream(before.model, before.spec)
    for name in {*stream.rows, *(f"{linear}.weight" for linear in (*stream.readers, *stream.writers))}:
        assert not torch.allclose(before.model.get_parameter(name), after.model.get_parameter(name), atol=1e-3), name
    assert all((after.model.get_submodule(norm).weight == 1).all() for norm in stream.norms)
    old, new = (_projected(vlm, stream.writers[-1 - _deep(vlm)], batch) for vlm in pair)
    assert not torch.allclose(old, new, atol=1e-3) and torch.allclose(old.norm(dim=1), new.norm(dim=1), rtol=1e-4)
    reducer = dataclasses.replace(REDUCERS.get("divprune"), keep=0.5)
    grid = (1, 1, len(old))
    kept = [reducer.reduce(Signals(grid=grid, features=rows)).anchor for rows in (old, new)]
    assert torch.equal(*kept)
    _require_equal_head(before, after)


def _require_equal_head(before, after) -> None:
    source = Source.of(after.path)
    assert models.tied_names(after.model) == {} and models.unfound(source.names, source.spec, source.stored) == {}
    planned = with_head(Source.of(before.path))
    assert (planned.stored, planned.names) == (source.stored, source.names)
    if models.tied_names(before.model):
        config = json.loads((after.path / "config.json").read_text())
        assert config["tie_word_embeddings"] is False and config["text_config"]["tie_word_embeddings"] is False


def _deep(vlm) -> int:
    """How many projectors come after the one that makes visual tokens."""
    return len(getattr(vlm.model.config.vision_config, "deepstack_visual_indexes", None) or ())


def _projected(vlm, layer: str, batch) -> torch.Tensor:
    """What the projector's last layer puts out, `[tokens, width]`."""
    captured = []
    handle = vlm.model.get_submodule(layer).register_forward_hook(lambda _, __, out: captured.append(out))
    with torch.no_grad():
        vlm.model(**batch)
    handle.remove()
    return captured[0].reshape(-1, captured[0].shape[-1])


@pytest.mark.parametrize("kind", ["hadamard", "random"])
def test_heads_of_values_have_rotations_of_their_own(kind, checkpoint, tmp_path):
    """Oracle: dense products. `v` gets R1 on its columns and R2 of each head on its rows, `o` R2 of the head that it reads."""
    source = Source.of(spread(checkpoint("qwen2-vl"), tmp_path / "model"))
    rotations = rotate.Rotations(kind, 4)
    stream = models.stream(source.meta_model, source.spec)
    vlm = models.load(source.path, dtype=torch.float64)
    gains = vlm.model.state_dict()
    result = rotate.changes(stream, rotations, gains.__getitem__)
    r1 = rotations.stream(stream.width).matrix()
    for block, values in enumerate(stream.values):
        assert values.heads == 2 * values.kv_heads
        v, o = vlm.model.get_submodule(values.v), vlm.model.get_submodule(values.o)
        g = vlm.model.get_submodule(stream.readers[values.v]).weight
        new_v, new_o = result[f"{values.v}.weight"](v.weight), result[f"{values.o}.weight"](o.weight)
        new_bias = result[f"{values.v}.bias"](v.bias)
        for head in range(values.heads):
            kv, w = head // 2, values.width
            r2 = rotations.head(block, kv, w).matrix()
            rows, columns = slice(kv * w, kv * w + w), slice(head * w, head * w + w)
            assert torch.allclose(new_v[rows], r2.T @ (v.weight[rows] * g) @ r1)
            assert torch.allclose(new_bias[rows], v.bias[rows] @ r2)
            assert torch.allclose(new_o[:, columns], r1.T @ o.weight[:, columns] @ r2)


def test_names_as_transformers_saves_them(checkpoint, tmp_path):
    """Where the embedding has not the hub's name, the head that is added has transformers', too."""
    source = Source.of(spread(checkpoint("llava-onevision", hub_names=False), tmp_path / "model"))
    rotate.write_rotated(source, tmp_path / "rotated", rotate.Rotations("hadamard", 1))
    assert head_on_disk(source) in Source.of(tmp_path / "rotated").stored
    models.load(tmp_path / "rotated")


class _OneMore(nn.Module):
    """A norm as Gemma has it."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


def test_norms_other_than_rms_are_refused(loaded):
    """A norm that subtracts the mean, one of `1 + weight`, a parameter of no known use, a head that drafts tokens."""
    vlm = loaded("llava")
    stem = "model.language_model"
    cases = {
        "subtract the mean": (f"{stem}.norm", nn.LayerNorm(128, bias=False)),
        "does not multiply by its weight": (f"{stem}.layers.1.input_layernorm", _OneMore(128)),
        "nothing is known about what model.language_model.layers.0.scale": (f"{stem}.layers.0.scale", _OneMore(4)),
        "no norm after its blocks": (f"{stem}.norm", nn.Identity()),
        "projector does not end in a linear layer": ("model.multi_modal_projector.behind", _OneMore(128)),
    }
    for reason, (path, module) in cases.items():
        model = copy.deepcopy(vlm.model)
        model.get_submodule(path.rpartition(".")[0]).add_module(path.rpartition(".")[2], module)
        with pytest.raises(UserError, match=reason):
            models.stream(model, vlm.spec)
