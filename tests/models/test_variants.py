"""Published models that are of a family but have another decoder than its tiny checkpoint: the same data describes them."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.kit.inputs import encode
from tests.kit.tiny import build
from vlmcompress import models
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve


@pytest.fixture(scope="module")
def internvl3_5(tmp_path_factory):
    return build("internvl3_5", tmp_path_factory.mktemp("internvl3_5"))


def test_internvl3_5_is_an_internvl(internvl3_5, checkpoint):
    """Its groups are those of InternVL, each with what it smooths, and only the norms of queries and keys are new to it."""
    internvl, meta_model = models.build_meta_model(checkpoint("internvl")), models.build_meta_model(internvl3_5)
    spec = models.spec_for(models.read_config(internvl3_5))
    assert spec.family == "internvl" and models.resolve_groups(meta_model, spec) == models.resolve_groups(
        internvl, spec
    )
    names = models.disk_names(meta_model, models.tensor_headers(internvl3_5))
    assert models.unfound(names, spec) == {} and names == {memory: spec.hub_name(memory) for memory in names}
    new = {name.rpartition("self_attn.")[2] for name in names.keys() - internvl.state_dict().keys()}
    assert new == {"q_norm.weight", "k_norm.weight"}


def test_internvl3_5_is_quantized_and_served(internvl3_5, samples, tmp_path):
    """Quantized with smoothing it loads in transformers and answers much as before."""
    keys = {"model": str(internvl3_5), "out": str(tmp_path / "out"), "scheme": "awq"}
    quantize(resolve(keys | {"calibrate": {"data": str(samples), "samples": 4}}).recipe)
    vlm = models.load(internvl3_5)
    with models.quiet_transformers():
        model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype="auto").eval()
    batch = encode(vlm, 1)
    with torch.no_grad():
        before, after = vlm.model(**batch).logits.float(), model(**batch).logits.float()
    assert torch.nn.functional.cosine_similarity(before, after, dim=-1).min() > 0.94
