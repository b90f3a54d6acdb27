"""What holds for every reducer, whatever it does: counts, order, determinism, dtypes, and the identity."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from tests.kit.reducer_data import LAYERS, options, run, signals
from vlmcompress.reduction import methods
from vlmcompress.reduction.methods import REGISTRY, Reducer, Signals

NAMES = REGISTRY.names()
KEEP = [name for name in NAMES if options(name).keep is not None]
FIXED = [name for name in KEEP if REGISTRY.get(name).COUNT == "fixed" and name != "evs"]  # keeps at least a frame
GRIDS = [(1, 6, 8), (1, 7, 5), (3, 4, 5), (1, 1, 9)]
FLOATS = ("features", "keys", "saliency", "windowed", "query", "query_keys")


def same(a, b):
    return torch.equal(a.target, b.target) and torch.equal(a.anchor, b.anchor) and torch.equal(a.weight, b.weight)


@pytest.mark.parametrize("name", NAMES)
def test_module_keeps_to_the_protocol(name):
    method = REGISTRY.get(name)
    assert method.STAGE in ("pixels", "encoder", "projected", "llm") and method.COUNT in ("fixed", "adaptive")
    assert {field.name for field in dataclasses.fields(Signals)} >= method.NEEDS
    assert bool(method.WHY_NOT) is not method.SERVED
    assert (options(name).budget((1, 6, 8)) is None) == (method.COUNT == "adaptive")
    if method.MEDIA == "video":
        assert options(name).budget((1, 6, 8)) == 48  # an image is kept whole
    assert (method.STAGE == "llm") == (method.layer is not None)
    assert isinstance(method, Reducer)


@pytest.mark.parametrize("name", NAMES)
def test_facts_read_from_the_file_are_those_of_the_class(name):
    """`list` and `check` read them without torch."""
    outline, method = REGISTRY.outline(name), REGISTRY.get(name)
    literals = [key for key in vars(Reducer) if key.isupper()]
    assert len(literals) > 8
    assert {key: getattr(outline, key) for key in literals} == {key: getattr(method, key) for key in literals}


@pytest.mark.parametrize("name", FIXED)
def test_count_is_the_budget(name):
    for grid, keep in itertools.product(GRIDS, (0.95, 2 / 3, 0.5, 1 / 3, 0.11)):
        n, expected = math.prod(grid), options(name, keep=keep).budget(grid)
        assert expected == math.floor(keep * n + 0.5) >= 1
        assert len(run(options(name, keep=keep), signals(grid)).anchor) == expected


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_in_raster_order_and_from_the_image(name):
    for grid in GRIDS:
        result = run(options(name), signals(grid)).require_valid()  # anchors ascend, each a source of its own output
        assert 1 <= len(result.anchor) <= math.prod(grid), grid
        assert result.apply(signals(grid).features).isfinite().all(), grid


@pytest.mark.parametrize("name", NAMES)
def test_same_input_same_result(name):
    """The second time in a mode in which torch refuses operations whose order is not fixed, and fills new memory with NaN."""
    expected = run(options(name), signals())
    torch.set_deterministic_debug_mode("error")
    try:
        assert same(run(options(name), signals()), expected)
    finally:
        torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
def test_ties_are_broken_by_index(name):
    """An image without any difference; repeated, and it is a full result, not a crash of a search among equals."""
    flat = signals()
    flat = dataclasses.replace(flat, **{field: torch.ones_like(getattr(flat, field)) for field in FLOATS})
    first, second = (run(options(name, keep=0.4), flat) for _ in range(2))
    assert same(first, second)
    expected = options(name, keep=0.4).budget(flat.grid)
    assert expected is None or len(first.anchor) == expected


@pytest.mark.parametrize("name", NAMES)
def test_dtype_of_the_signals_does_not_matter(name):
    wide, chosen = signals(), options(name)
    narrow = dataclasses.replace(wide, **{field: getattr(wide, field).bfloat16() for field in FLOATS})
    if chosen.MERGES:
        assert same(*(methods.merge_layer(chosen, image, 0, LAYERS) for image in (wide, narrow)))
    else:
        assert same(run(chosen, wide), run(chosen, narrow))


@pytest.mark.parametrize("name", NAMES)
def test_only_needed_signals_are_read(name):
    chosen, full = options(name), signals()
    bare = dataclasses.replace(full, **{field: None for field in (*FLOATS, "heads") if field not in chosen.NEEDS})

    def step(s):
        return methods.merge_layer(chosen, s, 0, LAYERS) if chosen.MERGES else methods.reduce(chosen, s)

    assert same(step(bare), step(full))
    for field in chosen.NEEDS:
        with pytest.raises(ValueError, match=f"needs signals that are missing: {field}"):
            step(dataclasses.replace(bare, **{field: None}))


@pytest.mark.parametrize("name", KEEP)
def test_keeping_all_is_the_identity_bit_for_bit(name):
    x = torch.randn(48, 3).bfloat16()
    result = run(options(name, keep=1.0), signals())
    assert torch.equal(result.apply(x), x) and torch.equal(result.anchor, torch.arange(48))
    near = run(options(name, keep=0.999), signals())  # rounds to all 48: through the method itself
    if REGISTRY.get(name).COUNT == "fixed":
        assert torch.equal(near.apply(x), x)


@pytest.mark.parametrize("name", FIXED)
def test_an_image_too_small_is_kept_whole(name):
    x = torch.randn(4, 3)
    assert torch.equal(run(options(name, keep=0.1), signals((1, 2, 2))).apply(x), x)
    assert run(options(name, keep=0.5), signals((1, 1, 1))).target.tolist() == [0]


@pytest.mark.parametrize("name", KEEP)
def test_a_keep_that_is_no_share_or_leaves_no_token_is_refused(name):
    for keep in (0, -0.5, 1.5, True, "half", None, math.nan):
        with pytest.raises(ValueError, match="keep must be"):
            type(REGISTRY.get(name))(keep=keep)
    for keep in (1e-300, 5e-324, 9e-7):
        with pytest.raises(ValueError, match="keep must be at least 1e-06, got .*, which leaves no token of any image"):
            type(REGISTRY.get(name))(keep=keep)
    assert type(REGISTRY.get(name))(keep=1e-6).keep == 1e-6


def test_whole_numbers_have_an_upper_bound():
    fields = [(name, field.name) for name in NAMES for field in dataclasses.fields(REGISTRY.get(name))]
    whole = [(name, field) for name, field in fields if type(getattr(options(name), field)) is int]
    assert len(whole) > 4
    for name, field in whole:
        most = 2**63 - 1 if field == "seed" else 10**6
        for value in (most + 1, 10**30):
            with pytest.raises(ValueError, match=f"{field} must be at most {most}, got "):
                type(REGISTRY.get(name))(**{field: value})
        assert getattr(type(REGISTRY.get(name))(**{field: most}), field) == most


@pytest.mark.parametrize("name", ["coverage", "dart", "dart-llm", "divprune"])
def test_scale_of_the_features_does_not_matter(name):
    original = signals()
    for factor in (2.0**-20, 3.0, 2.0**15):
        scaled = {field: getattr(original, field) * factor for field in ("features", "keys", "query", "query_keys")}
        assert same(run(options(name), original), run(options(name), dataclasses.replace(original, **scaled)))


@pytest.mark.parametrize("name", ["dart", "dart-llm", "divprune", "fastv"])
def test_order_of_the_tokens_does_not_matter(name):
    """These look at no positions: a shuffled image keeps the same tokens."""
    original, order = signals(), torch.randperm(48, generator=torch.Generator().manual_seed(5))
    shuffled = {field: getattr(original, field)[order] for field in ("features", "keys", "saliency")}
    kept = run(options(name), dataclasses.replace(original, **shuffled)).anchor
    assert torch.equal(order[kept].sort().values, run(options(name), original).anchor)
