"""Allocation rules: the knapsack against trying everything, its bound when it is cut short, the rankings by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from vlmcompress.recipe.allocation import RULES, GroupOption, Unreachable, cost, solve_knapsack

ENTROPY = [3.0, 1.0, 2.0, 4.0]


def random_groups(seed: int, count: int, size: int, step: int = 1) -> dict:
    """Groups with candidates of random sizes (multiples of `step`) and errors, neither sorted nor convex."""
    rng = random.Random(seed)
    return {
        (i // 2, "ab"[i % 2]): [GroupOption(step * rng.randint(1, 60), rng.random() ** 3) for _ in range(size)]
        for i in range(count)
    }


def brute_force(candidates: dict, budget: int) -> float | None:
    """The least error of all combinations within the budget."""
    fits = []
    for picked in itertools.product(*candidates.values()):
        if sum(candidate.nbytes for candidate in picked) <= budget:
            fits.append(sum(candidate.error for candidate in picked))
    return min(fits, default=None)


@pytest.mark.parametrize("seed", range(60))
def test_knapsack_is_optimal(seed):
    candidates = random_groups(seed, count=6, size=4)
    smallest = sum(min(c.nbytes for c in choices) for choices in candidates.values())
    largest = sum(max(c.nbytes for c in choices) for choices in candidates.values())
    for budget in range(smallest - 1, largest + 2, max(1, (largest - smallest) // 7)):
        best = brute_force(candidates, budget)
        if best is None:
            with pytest.raises(Unreachable) as caught:
                RULES["error"].decide(candidates, budget, [])
            assert caught.value.smallest == smallest
            continue
        choice, gap = solve_knapsack(candidates, budget)
        got = cost(candidates, choice)
        assert got.nbytes <= budget and gap == 0
        assert got.error == pytest.approx(best, rel=1e-12)


def decoder(seed: int, layers: int = 80) -> dict:
    """Sizes and errors like those of a decoder: four groups a block, 2/3/4/8 bits, error falling fourfold a bit."""
    rng = random.Random(seed)
    shapes = {"qkv": 30_000_000, "o": 17_000_000, "gate_up": 90_000_000, "down": 45_000_000}
    table = {}
    for layer in range(layers):
        for name, weights in shapes.items():
            scale = rng.lognormvariate(0, 1.5) * weights
            table[layer, name] = [
                GroupOption(int(weights * (bits + 0.125)) // 8, scale * 4.0**-bits * rng.uniform(0.7, 1.4))
                for bits in (2, 3, 4, 8)
            ]
    return table


@pytest.mark.parametrize("seed", range(4))
def test_large_knapsack_is_within_its_bound(seed):
    candidates = decoder(seed)
    weights = 80 * 182_000_000
    budget = int(weights * 3.25 / 8)
    choice, gap = solve_knapsack(candidates, budget)
    got = cost(candidates, choice)
    assert got.nbytes <= budget and gap <= 1e-4 * got.error
    cut, cut_gap = solve_knapsack(candidates, budget, limit=3)
    worse = cost(candidates, cut)
    assert worse.nbytes <= budget and got.error <= worse.error <= got.error + cut_gap + 1e-9 * got.error
    uniform = sum(choices[1].error for choices in candidates.values())
    assert (
        got.error < uniform / 2
    )  # errors differ a lot between groups, so there is much to gain over 3 bits everywhere


def test_the_same_table_gives_the_same_choice_in_any_order():
    candidates = decoder(0, layers=10)
    shuffled = dict(sorted(candidates.items(), key=lambda item: item[0][::-1]))
    budget = int(10 * 182_000_000 * 3.25 / 8)
    assert RULES["error"].decide(candidates, budget, []) == RULES["error"].decide(shuffled, budget, [])


def blocks(sizes=(20, 30, 40, 80), layers: int = 4) -> dict:
    return {(layer, "g"): [GroupOption(size, 1 / size) for size in sizes] for layer in range(layers)}


def test_luq_gives_the_lowest_entropy_the_fewest_bits():
    candidates = blocks()
    # 3.25 units a group: 3 fit everywhere, 4 do not; two blocks at 4 leave 50 for two, which is 20 and 30
    assert RULES["luq"].decide(candidates, 130, ENTROPY) == {(3, "g"): 2, (0, "g"): 2, (2, "g"): 1, (1, "g"): 0}


def test_ranked_rules_at_the_ends_of_the_budget():
    candidates = blocks()
    assert set(RULES["luq"].decide(candidates, 80, ENTROPY).values()) == {0}
    assert set(RULES["luq"].decide(candidates, 1000, ENTROPY).values()) == {3}
    with pytest.raises(Unreachable, match="the smallest possible size is 80"):
        RULES["luq"].decide(candidates, 79, ENTROPY)
    with pytest.raises(ValueError, match="block 4 has no entropy"):
        RULES["luq"].decide(blocks(layers=5), 1000, ENTROPY)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(5))
def test_every_rule_keeps_to_the_budget(name, seed):
    candidates = random_groups(seed, count=8, size=3, step=8)
    rule = RULES[name]
    entropy = ENTROPY if rule.reads_entropy else []
    smallest = sum(min(c.nbytes for c in choices) for choices in candidates.values())
    for budget in range(smallest, 4 * smallest, 97):
        choice = rule.decide(candidates, budget, entropy)
        assert choice.keys() == candidates.keys()
        assert cost(candidates, choice).nbytes <= budget
