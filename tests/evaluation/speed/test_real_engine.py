"""The benchmark in the real engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from vlmcompress.cli import main
from vlmcompress.engines.vllm.serve import vllm_server
from vlmcompress.evaluation.results import Results
from vlmcompress.evaluation.speed import client, counters, serving
from vlmcompress.evaluation.speed.client import parse_load
from vlmcompress.evaluation.speed.prompts import open_prompts
from vlmcompress.evaluation.speed.runs import run
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.utils.errors import UserError

MODEL = Path("eval/demo/demo-llava")
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
TOKENS = 81  # of an image: a 9 x 9 grid


def make_plan(**changes) -> serving.BenchPlan:
    settings = {
        "paths": {"baseline": MODEL, "candidate": MODEL},
        "prompts": open_prompts(None, MODEL, MODEL, 6, 0),
        "load": parse_load("closed:3"),
        "out_tokens": 5,
        "repeats": 1,
        "slo": {},
    }
    return serving.BenchPlan(**settings | changes)


@pytest.mark.slow
@pytest.mark.engine
def test_caches_show_in_the_counters(quick_engines, monkeypatch) -> None:
    """With caches on a repeated burst is seen by the check of the work; and the server's counts of tokens are right."""
    # No process for the worker, which would import vLLM again.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    plan = make_plan()
    flags = ["--enable-prefix-caching", *serving.FLAGS[2:]]
    with vllm_server(MODEL, flags=flags, images=1, speculative=json.dumps(NGRAM)) as running:
        start = counters.counters(running)
        outcomes, duration = serving.burst(plan, "candidate", running, 0, lambda *_: None)
        assert [o.error for o in outcomes] == [""] * 6
        assert {o.output_tokens for o in outcomes} == {5}
        assert {o.visual_tokens for o in outcomes} == {TOKENS}
        assert all(0 < o.ttft <= o.e2e <= duration and len(o.itl) <= 4 for o in outcomes)
        fresh = counters.counters(running)
        counted = fresh.since(start)
        assert counted.media_hits == 0
        serving.require_work(plan, running, outcomes, replace(counted, prefix_hits=0.0))  # of the common system prompt
        with pytest.raises(UserError, match="stopped after 5 of 9 tokens"):
            serving.require_work(make_plan(out_tokens=9), running, outcomes, counted)

        again, _ = serving.burst(plan, "candidate", running, 0, lambda *_: None)
        counted = counters.counters(running).since(fresh)
        assert counted.media_hits == 6
        assert (
            0 <= counted.accepted <= counted.drafted <= NGRAM["num_speculative_tokens"] * counted.drafts
            and counted.drafts
        )
        assert sum(counted.accepted_at) == counted.accepted and len(counted.accepted_at) == 2
        assert 0 < counted.decode_seconds < sum(outcome.e2e for outcome in again)
        with pytest.raises(UserError, match="demo-llava took .* and 6 images from a cache"):
            serving.require_work(plan, running, again, counted)

        with_image = plan.prompts.conversations[0]
        text = [{"role": "user", "content": [part for part in with_image[0]["content"] if part["type"] == "text"]}]
        bodies = [client.encode_request(running.name, messages, 5) for messages in (with_image, text)]
        with_tokens, twin = client.send(running.url, bodies, parse_load("closed:1"))[0]
        assert twin.visual_tokens == 0
        assert TOKENS <= with_tokens.prompt_tokens - twin.prompt_tokens <= TOKENS + 2  # line breaks around the image
        with pytest.raises(UserError, match="counts no visual tokens"):
            serving.require_work(plan, running, [twin], counted)

        cache = counters.cache_config(running)
        assert cache["enable_prefix_caching"] == "True"
        assert int(cache["kv_cache_size_tokens"]) * 2048 == int(cache["kv_cache_memory_bytes"])
    with pytest.raises(UserError, match="demo-llava has ended"):
        counters.counters(running)
    outcomes, _ = serving.burst(plan, "candidate", running, 0, lambda *_: None)
    with pytest.raises(UserError, match="answered none of 6 requests, the first failed with .*Connect"):
        serving.require_work(plan, running, outcomes, counted)


@pytest.mark.slow
@pytest.mark.engine
def test_requests_set_their_shares(tmp_path: Path, quick_engines) -> None:
    """A candidate whose reducer takes shares counts the tokens that each row asks for, and its original all of them."""
    reducer = "coverage:0.5,keep_max=1"
    quantize(resolve({"model": str(MODEL), "out": str(tmp_path / "out"), "scheme": "none", "reduce": reducer}).recipe)
    Image.new("RGB", (80, 80), "red").save(tmp_path / "red.png")
    rows = [{"image": "red.png", "question": f"{keep}?", "answer": "", "keep": keep} for keep in (0.25, 1, 9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    bench = run(tmp_path / "out", MODEL, data=tmp_path / "rows.jsonl", load="closed:3", requests=3, repeats=1).bench
    assert bench is not None
    assert [record.visual_tokens for record in bench.runs] == [3 * TOKENS, round(TOKENS / 4) + TOKENS + 9]


@pytest.fixture(scope="module")
def results() -> Results:
    speculation = {"speculative": {"candidate": json.dumps(NGRAM)}}
    return run(
        MODEL,
        MODEL,
        load="closed:3",
        requests=6,
        out_tokens=5,
        repeats=1,
        slo={"e2e": 60_000},
        **speculation,
    )


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(3600)  # two starts of the engine
def test_whole_benchmark(results: Results) -> None:
    """Both sides, with the same work."""
    bench = results.bench
    assert bench is not None
    assert bench.order == ["baseline", "candidate"]
    assert [(r.mode, r.state, r.side) for r in bench.runs] == [("serve", "cold", s) for s in ("baseline", "candidate")]
    for record in bench.runs:
        assert (record.completed, record.failed) == (6, 0)
        assert (record.visual_tokens, record.output_tokens) == (6 * TOKENS, 30)
        assert bool(record.drafts) is (record.side == "candidate") and record.accepted <= record.drafted
        assert sum(record.accepted_at) == record.accepted
        assert record.goodput == pytest.approx(6 / record.duration)
    ratio = bench.summary["serve"]["cold"]["request_throughput"]
    assert ratio.low <= ratio.gain <= ratio.high
    assert 0.2 < ratio.gain < 5  # the same model
    assert results.candidate.engine["version"].startswith("0.")
    assert bench.memory["baseline"] == bench.memory["candidate"]
    assert bench.memory["baseline"].kv_cache_tokens == 524_288  # of 2,048 bytes in 1 GiB
    assert Results.model_validate(json.loads(json.dumps(results.to_dict()))) == results


@pytest.mark.slow
@pytest.mark.engine
def test_a_server_that_cannot_start_shows_its_error() -> None:
    with pytest.raises(UserError, match="server could not start .*no-such-flag"):
        run(MODEL, MODEL, requests=1, repeats=1, flags=["--no-such-flag"])


@pytest.mark.slow
def test_gguf_is_served_by_llama_cpp(tmp_path, quick_engines) -> None:
    """Cold runs alone, with as many visual tokens as transformers makes of the images, each token counted."""
    out = tmp_path / "tiny-gguf"
    assert main(["quantize", str(MODEL), "--scheme", "none", "--format", "gguf", "-o", str(out)]) == 0
    settings = {"load": "closed:2", "requests": 4, "out_tokens": 5, "repeats": 1}
    bench = run(out, out, **settings).bench
    assert bench is not None
    assert [(r.mode, r.state, r.side) for r in bench.runs] == [("serve", "cold", s) for s in ("baseline", "candidate")]
    for record in bench.runs:
        assert (record.completed, record.failed) == (4, 0)
        assert record.output_tokens == 20 and record.visual_tokens >= 4 * TOKENS
