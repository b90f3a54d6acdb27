"""What the trainings of demo-smol and demo-photo share: steps, an average over the last of them, and a state on disk."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer


class Training:
    """Weights that learn, their average, the optimizers, and how far it is: `step`, and `spent` in seconds."""

    def __init__(self, learned: dict[str, nn.Parameter], state: Path, average: float, *optimizers: Optimizer):
        self.learned, self.state, self.average, self.optimizers = learned, state, average, optimizers
        self.ema = {name: p.detach().clone() for name, p in learned.items()}
        self.step, self.spent = 0, 0.0

    @torch.no_grad()
    def resume(self, start: Path | None = None) -> dict[str, Any]:
        """Go on from the file, if there is one, or begin with the weights in `start`; returns what else the file has."""
        if not self.state.exists():
            for name, tensor in (load_file(start) if start else {}).items():
                if name in self.learned:
                    self.learned[name].copy_(tensor)
                    self.ema[name].copy_(tensor)
            return {}
        state = torch.load(self.state)
        for name, parameter in self.learned.items():
            parameter.copy_(state["learned"][name])
        self.ema, (self.step, self.spent) = state["ema"], state["place"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return state["more"]

    def save(self, **extra: Any) -> None:
        """Write the file, with whatever else should be in it; it is replaced as a whole."""
        learned = {name: p.detach() for name, p in self.learned.items()}
        state = {"learned": learned, "ema": self.ema, "place": (self.step, self.spent), "more": extra}
        part = self.state.with_suffix(".part")
        torch.save(state | {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}, part)
        part.rename(self.state)

    def update(self, rate: float) -> None:
        """Take a step down the gradient that there is."""
        torch.nn.utils.clip_grad_norm_(self.learned.values(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        keep = min(self.average, self.step / (self.step + 10))
        with torch.no_grad():
            for name, parameter in self.learned.items():
                self.ema[name].lerp_(parameter, 1 - keep)

    @torch.no_grad()
    def meet(self, totals: list[float]) -> list[float]:
        """Take the mean of all processes' weights (local SGD, arXiv 1805.09767); returns the first one's `totals`."""
        flat = torch.cat([p.flatten() for p in self.learned.values()])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, part in zip(self.learned.values(), flat.split([p.numel() for p in self.learned.values()]), strict=True):
            p.copy_(part.view_as(p))
        shared = torch.tensor(totals, dtype=torch.float64)
        dist.broadcast(shared, 0)
        return shared.tolist()

    @torch.no_grad()
    def put(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put `values` in place of the weights; returns those that were there."""
        before = {name: p.detach().clone() for name, p in self.learned.items()}
        for name, parameter in self.learned.items():
            parameter.copy_(values[name])
        return before
