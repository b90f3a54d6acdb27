"""The divergence against torch's own from full distributions."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import kl_div

from vlmcompress.training import teacher_cache


def logits(vocabulary: int = 50, tokens: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return 3 * torch.randn(tokens, vocabulary), 3 * torch.randn(tokens, vocabulary)


def exact(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    return kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean()


def test_the_divergence_over_a_whole_vocabulary_is_exact():
    teacher, student = logits()
    divergence = teacher_cache.teacher_divergence(teacher_cache.teacher_targets(teacher), student)
    assert torch.allclose(divergence, exact(teacher, student), rtol=1e-5)


def test_the_divergence_over_likely_tokens_is_that_of_the_coarser_distributions():
    teacher, student = logits()
    kept = teacher_cache.teacher_targets(teacher, whole=10, top=8)
    assert kept["logs"].shape == kept["ids"].shape == (4, 8)
    sums = []
    for p, q, ids in zip(teacher.double().softmax(-1), student.double().softmax(-1), kept["ids"], strict=True):
        chosen = ids.tolist()
        others = [token for token in range(50) if token not in chosen]
        outcomes = [(p[token], q[token]) for token in chosen] + [(p[others].sum(), q[others].sum())]
        sums.append(sum(float(a * (a.log() - b.log())) for a, b in outcomes))
    divergence = float(teacher_cache.teacher_divergence(kept, student))
    assert divergence == pytest.approx(sum(sums) / 4, rel=1e-4)
    assert divergence <= float(exact(teacher, student))


@pytest.mark.parametrize("whole", [10, 100])
def test_the_divergence_from_itself_is_zero_and_has_a_gradient(whole):
    teacher, student = logits()
    kept = teacher_cache.teacher_targets(teacher, whole=whole, top=8)
    assert abs(float(teacher_cache.teacher_divergence(kept, teacher))) < 1e-5
    student.requires_grad_()
    teacher_cache.teacher_divergence(kept, student).backward()
    assert student.grad.isfinite().all() and student.grad.abs().sum() > 0


def test_a_certain_teacher_has_no_remaining_probability():
    teacher = torch.full((2, 50), -1e4)
    teacher[:, 3] = 0
    student = torch.randn(2, 50, requires_grad=True)
    divergence = teacher_cache.teacher_divergence(teacher_cache.teacher_targets(teacher, whole=10, top=8), student)
    assert torch.allclose(divergence, -student.log_softmax(-1)[:, 3].mean(), rtol=1e-5)
    divergence.backward()
    assert student.grad.isfinite().all()


def test_other_numbers_of_tokens_are_refused():
    teacher, student = logits()
    with pytest.raises(ValueError, match="the teacher has 4 answer tokens, the student 3"):
        teacher_cache.teacher_divergence(teacher_cache.teacher_targets(teacher), student[:3])
