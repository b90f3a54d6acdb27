"""Every family through the whole pipeline: calibrate on images, quantize, write, reload."""

from __future__ import annotations

import pytest
import torch

from tests.kit.families import RECIPES
from tests.kit.inputs import encode
from vlmcompress import models
from vlmcompress.evaluation.doctor import files as doctor

pytestmark = pytest.mark.representatives


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_models_reload_in_transformers_and_answer_alike(family, recipe, quantized, checkpoint, loaded):
    """No missing or unexpected key, nothing that the doctor objects to, and logits near those of the source."""
    out = quantized(family, recipe)
    failed = [check for check in doctor.diagnose(out, source=checkpoint(family)) if not check.ok]
    assert not failed, failed
    with models.quiet_transformers():
        model, info = models.open_model(out, dtype="auto")
    assert not any(info.values()), info
    source = loaded(family)
    batch = encode(source, 1)
    with torch.no_grad():
        before, after = source.model(**batch).logits.float(), model.eval()(**batch).logits.float()
    assert torch.nn.functional.cosine_similarity(before, after, dim=-1).min() > 0.94
    assert not torch.equal(before, after)
