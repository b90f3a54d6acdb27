"""Statistics of a mixture's experts: of the tokens routed to each, and of further tokens for experts that get too few.

An expert that gets fewer tokens than its input has channels has a Gram matrix of low rank, to which error feedback and
clipping would overfit. Such an expert also runs on other tokens of its layer, drawn uniformly, until it has seen as many
tokens as channels; they count like its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress.models import Expert, Experts, Group
from vlmcompress.models.devices import widened
from vlmcompress.numerics.statistics.balance import MODALITIES
from vlmcompress.numerics.statistics.collect import Collector
from vlmcompress.numerics.statistics.inputs import SAMPLE
from vlmcompress.numerics.statistics.tokens import Drawn, Reservoir, Split, split_modalities, splits
from vlmcompress.utils import distributed


def mixtures(model: nn.Module) -> list[Experts]:
    """The mixtures of experts of a model or a block."""
    return [module for module in model.modules() if isinstance(module, Experts)]


@contextmanager
def routed_to_all(model: nn.Module) -> Iterator[None]:
    """Within the context every expert gets all tokens."""
    layers = mixtures(model)
    try:
        for mixture in layers:
            mixture.all_tokens = True
        yield
    finally:
        for mixture in layers:
            mixture.all_tokens = False


class LayerDraw:
    """Stratified subsample for experts with too few tokens: at most `width` tokens, each modality with its share.

    Args:
        counts: modality -> number of tokens in all samples.
        masks: modality of each sample's tokens.
        batches: indices of each batch's samples.
        width: channels of a layer's input.
        seed: seed of the draw.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        masks: Sequence[Tensor],
        batches: Sequence[Sequence[int]],
        width: int,
        seed: int,
    ):
        self.tokens, self.width, self.seed = sum(counts.values()), width, seed
        self.room = {name: min(count, -(-width * count // self.tokens)) for name, count in counts.items() if count}
        self.splits = splits(masks, batches, self.room, seed)


class Routed:
    """Records the tokens that the experts of one block get.

    Attributes:
        owners: index of a group of linear layers -> its expert.
        counts: after `fill`, index of such a group -> number of tokens it has seen in all workers, by modality.
        borrowed: after `fill`, index of the first group of an expert -> how many of these tokens were not routed to it.
    """

    def __init__(self, mixture: Experts, owners: Mapping[int, Expert], draw: LayerDraw, device: torch.device):
        self.mixture, self.owners, self.draw, self.device = mixture, owners, draw, device
        self.counts: dict[int, dict[str, int]] = {}
        self.borrowed: dict[int, int] = {}
        self._codes = torch.empty(0, dtype=torch.long)  # modality of each token of the current batch
        self._drawn: Mapping[str, Drawn] = {}
        self._kept = {name: torch.zeros(room, draw.width, device=device) for name, room in draw.room.items()}
        self._samples: dict[tuple[int, str], Reservoir] = {}

    @staticmethod
    def of(model: nn.Module, groups: Sequence[Group], draw: LayerDraw, device: torch.device) -> Routed | None:
        """The recorder for the experts that contain some of a block's groups; None if there are none."""
        paths = {
            index: group.linears[0].rpartition(".")[0] for index, group in enumerate(groups) if group.expert is not None
        }
        if not paths:
            return None
        owners: dict[int, Any] = {index: model.get_submodule(path) for index, path in paths.items()}
        mixture: Any = model.get_submodule(next(iter(paths.values())).rpartition(".")[0])
        return Routed(mixture, owners, draw, device)

    def begin(self, number: int, split: Split) -> None:
        """Prepare for a batch, with its tokens by modality."""
        self._codes, self._drawn = split.codes(self.device), self.draw.splits[number].drawn

    def watching(self) -> Any:
        """Record the drawn rows of the layer's input until the returned handle is removed."""

        def keep(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            for name, (places, chosen) in self._drawn.items():
                rows = args[0].index_select(0, chosen.to(self.device)).float()
                self._kept[name].index_copy_(0, places.to(self.device), rows)

        return self.mixture.register_forward_pre_hook(keep)

    def split(self, index: int) -> Split:
        """Modalities of the rows that a group's expert is processing, and which of them are sampled."""
        rows = self.owners[index].rows
        assert rows is not None
        routed = split_modalities(self._codes[rows])
        for name, number in routed.count.items() if distributed.is_main() else ():
            sample = self._samples.setdefault((index, name), Reservoir(SAMPLE, self.draw.seed))
            places, chosen = sample.draw(number)
            indices = routed.rows[name]
            routed.drawn[name] = places, chosen if indices is None else indices[chosen]
        return routed.to(self.device)

    def fill(self, collectors: Sequence[Collector]) -> None:
        """Run experts that saw too few tokens on other tokens of the layer. Every worker calls this, after its last batch."""
        # As many tokens as the Gram matrix [in, in] has rows, below which it is singular.
        least, counts = min(self.draw.width, self.draw.tokens), self._counted(collectors)
        firsts = {id(self.owners[index]): index for index in sorted(self.owners, reverse=True)}
        missing = {index: least - sum(counts[index].values()) for index in sorted(firsts.values())}
        self.borrowed = {index: count for index, count in missing.items() if count > 0}
        if self.borrowed:
            names = list(self.draw.room)
            rows = torch.cat([distributed.all_sum(self._kept[name]) for name in names])
            codes = torch.cat([torch.full((self.draw.room[name],), MODALITIES.index(name) + 1) for name in names])
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.draw.seed))
            for index in distributed.shard(list(self.borrowed)):
                chosen, expert = order[: self.borrowed[index]], self.owners[index]
                # The expert's hooks record these rows with these modalities.
                self._codes = codes[chosen].to(self.device)
                expert.rows = torch.arange(len(chosen), device=self.device)
                try:
                    widened(expert)(rows[chosen.to(self.device)].to(next(expert.parameters()).dtype))
                finally:
                    expert.rows = None
        self.counts = self._counted(collectors)

    def _counted(self, collectors: Sequence[Collector]) -> dict[int, dict[str, int]]:
        """Number of tokens that the experts have seen so far in all workers, by modality."""
        counts = torch.tensor([[collectors[index].count[name] for name in MODALITIES] for index in self.owners])
        rows = distributed.all_sum(counts.to(self.device)).tolist()
        return {index: dict(zip(MODALITIES, row, strict=True)) for index, row in zip(self.owners, rows, strict=True)}
