"""The fast evaluator of reducers against generation, one question at a time, and figures against sums written out."""

from __future__ import annotations

import argparse
import json
import re
import sys

import pytest
import torch

from tests.kit.places import DEMOS, ROOT
from vlmcompress import models
from vlmcompress.models import VLM
from vlmcompress.models.data import Sample, bundled_data, load_samples
from vlmcompress.models.data.encode import encode_prompt
from vlmcompress.reduction.choice import ReducerChoice, parse_reducer
from vlmcompress.reduction.hooks import attach

sys.path.insert(0, str(ROOT / "scripts" / "measure"))
import bench_reducers
import reduced_answers
import reducers_table

MODELS = ("demo-llava", "demo-qwen")
PER_FAMILY = 2
# One of each way: rows and question, within the language model, where the encoder is read, in its
# layers, and while the answer grows.
REDUCERS = [
    "relevance:0.25",
    "fastv:0.25,layer=1",
    "vscan:0.25,shallow=1,window=3",
    "dyrate:factor=0.5",
]


@pytest.fixture(
    scope="module", params=[pytest.param(m, marks=[pytest.mark.slow] * (m != "demo-llava")) for m in MODELS]
)
def asker_and_samples(request: pytest.FixtureRequest) -> tuple[reduced_answers.Asker, list[Sample]]:
    """A demo model and neighbouring questions of each family with images: some share theirs, some have two."""
    everything = load_samples(bundled_data(DEMOS / request.param, "validation"), samples=None, seed=0)
    families = sorted({s.family for s in everything if s.images})
    samples = [s for f in families for s in [o for o in everything if o.family == f][:PER_FAMILY]]
    vlm = models.load(DEMOS / request.param)
    return reduced_answers.Asker(vlm, reduced_answers.prepare(vlm, samples)), samples


def generated(vlm: VLM, sample: Sample, chosen: ReducerChoice | None) -> tuple[bool, int, int]:
    """Whether generation gives the answer and its end, how many visual tokens were dropped, and how many all caches hold."""
    inputs = encode_prompt(sample, vlm)
    answer = reduced_answers.prepare(vlm, [sample]).questions[0].answer
    settings = {"max_new_tokens": len(answer), "do_sample": False, "return_dict_in_generate": True}
    with torch.no_grad():
        if chosen is None:
            out, dropped = vlm.model.generate(**inputs, **settings), 0
        else:
            with attach(vlm, chosen) as attached:
                out = vlm.model.generate(**inputs, **settings)
            dropped = sum(len(unit.columns) - len(unit.reduction.anchor) for unit in attached.reduced_units)
    ids, lengths = inputs["input_ids"], [part.keys.shape[2] for part in out.past_key_values.layers]
    visual = int((ids == getattr(vlm.model.config, vlm.spec.image_token)).sum())
    held = sum(lengths) - len(lengths) * (out.sequences.shape[1] - 1 - visual)
    return out.sequences[0, ids.shape[1] :].tolist() == answer.tolist(), dropped, held


@pytest.mark.parametrize("reduce", [None, *REDUCERS])
def test_exact_match_is_that_of_generation(
    asker_and_samples: tuple[reduced_answers.Asker, list[Sample]], reduce: str | None
) -> None:
    asker, samples = asker_and_samples
    if reduce and reduce.startswith("vscan") and not asker.vlm.spec.tower.cls:
        pytest.skip("the encoder has no CLS")
    chosen = parse_reducer(reduce) if reduce else None
    answers = asker.ask(chosen)
    one_by_one = [generated(asker.vlm, sample, chosen) for sample in samples]
    assert answers.exact.tolist() == [right for right, *_ in one_by_one]
    assert (answers.before - answers.after).tolist() == [dropped for _, dropped, _ in one_by_one]
    assert answers.held.tolist() == [held for *_, held in one_by_one]
    assert answers.exact.sum() > 0 and (reduce is None or answers.exact.sum() < len(samples))
    assert reduce is None or 0 < float(answers.after.sum() / answers.before.sum()) < 0.9


QUESTIONS = [Sample(str(number), [], "q", "a", family) for number, family in enumerate(["read", "locate"] * 10)]


def row(reduce: str, right: int, kept: int, **extra: object) -> dict:
    """Of 20 questions the first `right` are answered; `kept` of 100 tokens are left."""
    chosen = parse_reducer(reduce) if reduce != "full" else None
    measured_row: dict = {
        "model": "m",
        "split": "test",
        "per_family": None,
        "reduce": reduce,
        "group": "full",
        "seconds": 1.0,
    }
    if chosen:
        options = {"keep": getattr(chosen.reducer, "keep", None), "seed": getattr(chosen.reducer, "seed", 0)}
        measured_row |= {"group": chosen.method, "method": chosen.method, "options": options, "seed": options["seed"]}
        measured_row |= {"stage": chosen.reducer.STAGE}
    answers = {"before": 100, "after": kept, "cached": kept / 100, "exact": "1" * right + "0" * (20 - right)}
    return measured_row | answers | extra


def measured() -> list[dict]:
    chance = [row(f"random:{keep},seed={seed}", right, int(100 * keep)) for keep, rights in ((0.5, (10, 12)), (0.25, (4, 6)))
              for seed, right in enumerate(rights)]  # fmt: skip
    return [row("full", 20, 100), *chance, row("dart:0.5", 19, 50), row("fastv:0.5", 9, 50, cached=0.75)]


def test_figures_against_sums_written_out() -> None:
    results = reducers_table.summarise(measured(), {"m": QUESTIONS})
    by_group = {(figure["group"], figure["keep"]): figure for figure in results["figures"]}
    dart, fastv, half = by_group["dart", 0.5], by_group["fastv", 0.5], by_group["random", 0.5]
    assert half["exact"] == 0.55 and half["seeds"] == 2
    assert dart["full"][0] == -0.05 and dart["random"][0] == 0.4 and dart["random"][1] > 0
    assert fastv["random"][0] == -0.1
    # of the caches it keeps 75%: halfway between random's 55% and the full model's 100%
    assert fastv["random_cached"][0] == pytest.approx(0.45 - (0.55 + 1) / 2)


def test_new_figures_take_the_place_of_earlier_ones() -> None:
    results = reducers_table.summarise(measured(), {"m": QUESTIONS})
    better = [row("full", 20, 100), row("random:0.5,seed=0", 10, 50), row("dart:0.5", 20, 50)]
    joined = reducers_table.joined(results, reducers_table.summarise(better, {"m": QUESTIONS}))
    exact = {figure["reduce"]: figure["exact"] for figure in joined["figures"]}
    assert exact["dart:0.5"] == 1 and exact["fastv:0.5"] == 0.45 and len(joined["figures"]) == len(results["figures"])
    with pytest.raises(ValueError, match="full differs"):
        reducers_table.joined(results | {"full": {"m": 0.9}}, results)


def test_the_interval_to_random_counts_its_seeds() -> None:
    """Variance over questions, as if one seed had the mean of both, plus that of the mean of seeds."""
    answers = reducers_table.Answers(measured(), QUESTIONS)
    low, high = answers._than_random(answers.full, 0.5)[1:]
    d = 1 - torch.tensor([1.0] * 10 + [0.5] * 2 + [0.0] * 8)
    error = (float(d.var(correction=0)) / 20 + 0.005 / 2) ** 0.5  # var(0.5, 0.6) = 0.005
    assert (high - low) / 2 == pytest.approx(1.96 * error, abs=1e-5)
    assert answers._than_random(answers.full, 0.2) is None


def test_the_table_and_the_picture_show_what_was_measured() -> None:
    results = reducers_table.summarise(measured(), {"m": QUESTIONS})
    text = reducers_table.render(results)
    assert re.search(r"\| `fastv` \|  \| -55\.0 ±[\d.]+ o \|  \|", text)
    assert re.search(r"\| `dart` \|  \| -5\.0 ±[\d.]+ \|  \|", text)
    assert json.loads(reducers_table.dump(results)) == results
    picture = reducers_table.plot(results, "m")
    assert picture.count("<circle") == 3 and "dart:0.5: 95.0%, 50% kept" in picture


def test_settings_are_distinct_and_go_with_some_model() -> None:
    keys = [setting.key for setting in bench_reducers.settings()]
    assert len(keys) == len(set(keys)) and keys[0] == "full"


def test_the_share_of_the_caches(asker_and_samples: tuple[reduced_answers.Asker, list[Sample]]) -> None:
    """Of four blocks; counts are whole numbers in each, so the share is not exactly that."""
    asker, chosen = asker_and_samples[0], parse_reducer("fastv:0.25,layer=1")
    row = bench_reducers.describe(asker, bench_reducers.Setting(chosen, chosen.method), "any", argparse.Namespace())
    assert row["cached"] == pytest.approx(0.4375, abs=0.01)
    assert row["after"] / row["before"] == pytest.approx(0.25, abs=0.01)
