"""Allocation by ranks of whole blocks, in two widths: the less important blocks get the narrow one."""

from __future__ import annotations

from collections.abc import Sequence

from vlmcompress.allocation import Candidates, Key, check


def by_rank(candidates: Candidates, budget: int, order: Sequence[int]) -> dict[Key, int]:
    """Give blocks at the front of `order` the smallest candidate and the others a larger one, as many as fit.

    The larger one is the smallest size that does not fit everywhere (the largest, if all fit): with a budget between 3 and 4
    bits that is 2 and 4 bits, as in LUQ. So that no byte is left over for nothing, the first block that cannot get the
    larger one as a whole gets, group by group, the largest that fits, and then those before it.

    Args:
        order: numbers of the blocks, beginning with those that are to lose bits first.
    """
    check(candidates, budget)
    sizes = {
        key: sorted(range(len(own)), key=lambda k: (own[k].nbytes, own[k].error)) for key, own in candidates.items()
    }
    ranks = max(map(len, sizes.values()))

    def at(key: Key, rank: int) -> int:
        return sizes[key][min(rank, len(sizes[key]) - 1)]

    def total(rank: int) -> int:
        return sum(own[at(key, rank)].nbytes for key, own in candidates.items())

    high = next((rank for rank in range(ranks) if total(rank) > budget), ranks - 1)
    choice = {key: at(key, 0) for key in candidates}
    room = budget - total(0)
    place = {layer: rank for rank, layer in enumerate(order)}
    for key in sorted(candidates, key=lambda key: (-place[key[0]], key[1])):
        own = candidates[key]
        for rank in range(high, 0, -1):
            extra = own[at(key, rank)].nbytes - own[choice[key]].nbytes
            if extra <= room:
                choice[key], room = at(key, rank), room - extra
                break
    return choice


def rising(entropy: Sequence[float], layers: Sequence[int]) -> list[int]:
    """Sort blocks by rising entropy. Raises ValueError where the entropy of a block is not known."""
    if lacking := [layer for layer in layers if layer >= len(entropy)]:
        raise ValueError(f"block {lacking[0]} has no entropy")
    return sorted(layers, key=lambda layer: (entropy[layer], layer))
