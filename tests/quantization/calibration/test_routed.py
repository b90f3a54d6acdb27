"""Experts of a mixture: each is seen with the tokens that are routed to it, with others where these are few, or with all."""

from __future__ import annotations

import pytest
import torch

from tests.kit.batched_samples import samples, wide
from vlmcompress.models import decoder_blocks
from vlmcompress.models.data import encode
from vlmcompress.numerics.statistics.inputs import MODALITIES, STATISTICS
from vlmcompress.quantization.calibration.capture import CaptureSpec, capture_blocks
from vlmcompress.quantization.calibration.routed import mixtures, routed_to_all

FAMILY = "qwen3-vl-moe"


@pytest.fixture(scope="module")
def vlm(loaded):
    return wide(loaded(FAMILY))


def given(vlm, batches) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The oracle: inputs of the mixture `[tokens, width]`, their experts `[tokens, k]` and modalities, sample by sample."""
    collected = []
    (mixture,) = mixtures(vlm.model)
    hook = mixture.register_forward_pre_hook(lambda _, args: collected.append(args[:2]))
    for batch in batches:
        with torch.no_grad():
            vlm.model(**{key: value for key, value in batch.items() if key != "modality"}, use_cache=False)
    hook.remove()
    rows, chosen = (torch.cat([call[place] for call in collected]) for place in (0, 1))
    return rows, chosen, torch.cat([batch["modality"].flatten() for batch in batches])


def observed(vlm, batches, **options) -> dict:
    """(expert, kind of its group) -> statistics."""
    blocks = decoder_blocks(vlm.model, vlm.spec)
    captures = [captured for _, captured in capture_blocks(vlm, blocks, batches, CaptureSpec(STATISTICS, **options))]
    groups = [(block, group) for block, groups in enumerate(blocks) for group in groups if group.expert is not None]
    return {(group.expert, group.kind): captures[block].stats[group.name] for block, group in groups}


def check(vlm, stats: dict, number: int, rows: torch.Tensor, codes: torch.Tensor) -> None:
    """Both groups of an expert have the statistics of exactly these tokens."""
    (mixture,) = mixtures(vlm.model)
    expert = mixture[number]
    with torch.no_grad():
        inner = expert.act_fn(expert.gate_proj(rows)) * expert.up_proj(rows)
    for kind, x in (("experts.gate_up", rows), ("experts.down", inner)):
        group_stats = stats[number, kind]
        assert group_stats.routed and group_stats.count == {
            name: int((codes == i).sum()) for i, name in enumerate(MODALITIES, 1)
        }
        for code, name in enumerate(MODALITIES, start=1):
            rows_of_code = x[codes == code].double()
            if not len(rows_of_code):
                continue
            gram = rows_of_code.T @ rows_of_code
            assert (group_stats.gram({name: 1.0}).cpu().double() - gram).norm() <= 2e-5 * gram.norm()
            torch.testing.assert_close(
                group_stats._absmax[name].cpu().double(), rows_of_code.abs().amax(0), rtol=1e-3, atol=1e-4
            )
            kept = group_stats.sample()[name].cpu()
            assert (
                len(kept) == min(64, len(rows_of_code))
                and (torch.cdist(kept.double(), rows_of_code).amin(1) < 0.05).all()
            )


def test_an_expert_counts_the_tokens_routed_to_it(vlm):
    """With tokens enough for each expert, each has those of its own."""
    batches = encode(samples() * 4, vlm)
    rows, chosen, codes = given(vlm, batches)
    stats = observed(vlm, batches)
    for number in range(4):
        routed_rows = (chosen == number).any(1) & (codes > 0)
        assert routed_rows.sum() >= rows.shape[1] and stats[number, "experts.gate_up"].borrowed == 0
        check(vlm, stats, number, rows[routed_rows], codes[routed_rows])


def test_few_tokens(vlm):
    """An expert that saw fewer tokens than its input has channels is shown others, drawn from the layer's."""
    batches = encode(samples()[:1], vlm)
    rows, chosen, codes = given(vlm, batches)
    stats, tokens = observed(vlm, batches), int((codes > 0).sum())
    assert tokens < rows.shape[1], "all of the layer's tokens are drawn then, and which come first is known"
    together = torch.cat([(codes == code).nonzero()[:, 0] for code in range(1, 4)])
    order = together[torch.randperm(tokens, generator=torch.Generator().manual_seed(0))]
    for number in range(4):
        routed_rows = ((chosen == number).any(1) & (codes > 0)).nonzero()[:, 0]
        missing = tokens - len(routed_rows)
        assert 0 < missing == stats[number, "experts.gate_up"].borrowed
        both = torch.cat([routed_rows, order[:missing]])
        check(vlm, stats, number, rows[both], codes[both])


def test_all_tokens(vlm):
    """Every expert sees every token, and what the model answers stays as it was."""
    batches = encode(samples()[:2], vlm)
    rows, chosen, codes = given(vlm, batches)
    stats = observed(vlm, batches, all_experts=True)
    for number in range(4):
        check(vlm, stats, number, rows[codes > 0], codes[codes > 0])
    with torch.no_grad():
        plain = vlm.model(**{key: value for key, value in batches[0].items() if key != "modality"}).logits
        with routed_to_all(vlm.model):
            torch.testing.assert_close(
                vlm.model(**{key: value for key, value in batches[0].items() if key != "modality"}).logits, plain
            )
    assert not any(experts.all_tokens for experts in mixtures(vlm.model))
