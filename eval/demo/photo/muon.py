"""Muon in float32: `torch.optim.Muon` orthogonalizes in BF16, which costs 50 times as much on processors without BF16."""

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of a step of Newton-Schulz, as in `torch.optim.Muon`
STEPS, MOMENTUM, DECAY = 4, 0.95, 0.01


class Muon(Optimizer):
    """For matrices: steps along the orthogonalized momentum (Nesterov's), as large as AdamW's."""

    def __init__(self, matrices: list[torch.nn.Parameter]):
        super().__init__(matrices, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - MOMENTUM)
                change = orthogonal(matrix.grad.lerp(momentum, MOMENTUM)) * 0.2 * max(matrix.shape) ** 0.5
                matrix.mul_(1 - group["lr"] * DECAY).sub_(change, alpha=group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """`matrix` with singular values near 1 (0.7 to 1.2), by Newton-Schulz; [rows, columns]."""
    a, b, c = COEFFICIENTS
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide
