"""PyramidDrop's schedule: the published arithmetic by hand, shares of caches summed up block by block, and what is refused."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest

from tests.kit.reducer_data import best, options, run, signals
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.methods import REGISTRY, Reduction
from vlmcompress.utils.errors import UserError

LLAVA = (1, 24, 24)


def tera(counts: list[int]) -> float:
    """The paper's multiply-adds of LLaVA-1.5-7B's blocks for so many image tokens in each, in 10^12."""
    width, inner = 4096, 11008
    return sum(n * (4 * width**2 + 3 * width * inner) + 2 * n * n * width for n in counts) / 1e12


def test_published_ratio_and_stages():
    """Half of them after 8, 16 and 24 of 32 blocks; the paper's table has 3.82 and 1.78 TFLOPs."""
    chosen = parse_reducer("pyramiddrop:ratio=0.5")
    counts = chosen.left(LLAVA, 32)
    assert counts == [576] * 8 + [288] * 8 + [144] * 8 + [72] * 8
    assert [layer for layer, _ in chosen.options.drops(32)] == [8, 16, 24]
    assert Fraction(sum(counts), 32 * 576) == Fraction(15, 32) == Fraction(chosen.options.keep)
    assert (round(tera([576] * 32), 2), round(tera(counts), 2)) == (3.82, 1.78)


@pytest.mark.parametrize(("stages", "blocks"), itertools.product((2, 3, 4, 7), (7, 28, 32, 80)))
def test_stages_are_of_like_length(stages, blocks):
    """As many rows as `keep` says, but for rounding; a prompt of 10^6 tokens leaves it no room."""
    chosen = parse_reducer(f"pyramiddrop:0.6,stages={stages}")
    counts = chosen.left((1, 1000, 1000), blocks)
    lengths = [len(list(same)) for _, same in itertools.groupby(counts)]
    assert len(lengths) == stages and sum(lengths) == blocks and max(lengths) - min(lengths) <= 1
    assert counts[0] == 10**6 and sum(counts) / blocks == pytest.approx(0.6e6, abs=1)
    kept = [count for count, _ in itertools.groupby(counts)]
    ratios = [after / before for before, after in itertools.pairwise(kept)]
    assert ratios == pytest.approx([ratios[0]] * (stages - 1), abs=2e-3) and ratios[0] < 1


def test_share_of_few_blocks():
    """Of 5 blocks the last stage has two: 5 * 0.5 = 1 + r + r^2 + 2 r^3, whose root is near 0.6106."""
    shares = [layer_share[1].share for layer_share in parse_reducer("pyramiddrop:0.5").options.drops(5)]
    assert 1 + shares[0] + shares[1] + 2 * shares[2] == pytest.approx(2.5, abs=1e-12)
    assert [layer for layer, _ in parse_reducer("pyramiddrop:0.5").options.drops(5)] == [1, 2, 3]


@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize("ratio", [1e-3, 0.5, 0.9, 1])
def test_keep_follows_from_the_ratio(stages, ratio):
    choice = parse_reducer(f"pyramiddrop:0.7,stages={stages},ratio={ratio}")
    assert choice.options.keep == pytest.approx(sum(ratio**stage for stage in range(stages)) / stages, rel=1e-12)
    assert parse_reducer(str(choice)) == choice == parse_reducer(f"pyramiddrop:stages={stages},ratio={ratio}")
    back = parse_reducer(f"pyramiddrop:{choice.options.keep!r},stages={stages}").options
    shares = [[drop.share for _, drop in stage_options.drops(32 * 21)] for stage_options in (choice.options, back)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-9)


def test_a_drop_takes_from_what_is_left():
    """Counts are of all tokens; the most attended of those that are left stay, and at least one."""
    original, chosen = signals(), options("pyramiddrop", ratio=0.2, stages=4)
    scores, left = original.saliency.tolist(), list(range(48))
    merged = Reduction.identity(48)
    for (_, drop), share in zip(chosen.drops(4), (0.2, 0.04, 0.008), strict=True):
        without = dict.fromkeys(("features", "keys", "windowed"))
        stage = {"merged": merged, "saliency": original.saliency[merged.anchor]}
        now = type(original)(**vars(original) | without | stage)
        merged = merged.then(run("pyramiddrop", now, drop))
        count = max(1, math.floor(share * 48 + 0.5))
        left = sorted(left[index] for index in best([scores[index] for index in left], count))
        assert merged.anchor.tolist() == left
    assert len(left) == 1


def test_an_image_of_few_tokens_is_kept_whole_in_all_blocks():
    """Of 2 tokens a share of 0.2 rounds to none."""
    assert parse_reducer("pyramiddrop:0.2,stages=8").left((1, 1, 2), 8) == [2] * 8
    assert parse_reducer("pyramiddrop:0.2,stages=8").left((1, 1, 3), 8) == [3] + [1] * 7
    assert parse_reducer("pyramiddrop:1").left((1, 1, 3), 8) == [3] * 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ratio=0", "ratio must be a number above 0 and at most 1, got 0"),
        ("ratio=1.5", "ratio must be a number above 0 and at most 1, got 1.5"),
        ("ratio=half", "ratio is 'half', should be a number"),
        ("stages=1", "stages must be a whole number of at least 2, got 1"),
        ("ratio=1e-3,stages=9223372036854775807", "keep must be at least 1e-06"),
    ],
)
def test_options_that_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_reducer(f"pyramiddrop:{text}")


def test_schedules_that_a_model_has_no_room_for():
    kind = REGISTRY.get("pyramiddrop").Options
    with pytest.raises(ValueError, match="2 blocks do not divide into 4 stages; give stages=2 or fewer"):
        kind().drops(2)
    with pytest.raises(
        ValueError, match=r"keep=0.25 is out of reach, .* 4 stages, 8 of 32 blocks, .* more than 0.25, or more stages"
    ):
        kind(keep=0.25).drops(32)
    assert len(kind(keep=0.25, stages=5).drops(32)) == 4
