"""The plan: engines, their settings, and the rounds of questions for each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmcompress.checkpoint import reducer_block
from vlmcompress.engines.vllm.conformance._questions import Questions
from vlmcompress.recipe.reducer import ReducerChoice

TOKENS = 8
FEW = 8
JSON_TOKENS = 48
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "sure": {"type": "boolean"},
        "count": {"enum": [1, 2, 3]},
    },
    "required": ["colour", "sure", "count"],
    "additionalProperties": False,
}
ALL_TOKENS = {"max_tokens": TOKENS, "ignore_eos": True}
SAMPLES, SAMPLED = 3, ALL_TOKENS | {"temperature": 1.0, "seed": 11}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

Round = dict[str, Any]


def unreduced(config: Mapping[str, Any]) -> dict[str, Any]:
    """Make the config.json of a checkpoint without its reducer."""
    names = [name.removeprefix(reducer_block.PREFIX) for name in config["architectures"]]
    return {key: value for key, value in config.items() if key != reducer_block.KEY} | {"architectures": names}


def engines(view: Path, config: Mapping[str, Any], questions: Questions, exact: str, cut: int) -> list[dict[str, Any]]:
    """All engines, in the order in which they run.

    Args:
        view: folder with the checkpoint's files; the engines write their config.json there, so all know it by one path.
        config: config.json of the checkpoint.
        exact: type in which answers must be equal: "float32", or "auto" where weights have no such form. vLLM takes "auto"
            for "float32", too, where it can't compute a model in float32.
        cut: number of tokens of a step, so small that every image is cut.
    """
    reducer = found.reducer if (found := reducer_block.read(config)) else None
    asked, few = [question.id for question in questions.plain], questions.few(FEW)
    off: dict[str, Any] = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0, "max_num_seqs": FEW}

    def engine(name: str, rounds: list[Round], own: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        limits = {"image": 2, "video": 0, "audio": 0}
        common = {"dtype": exact, "max_model_len": -1, "limit_mm_per_prompt": limits, "seed": 0}
        return {
            "name": name,
            "model": str(view),
            "config": dict(own or config),
            "options": common | options,
            "rounds": rounds,
        }

    all_engines = [
        engine("plain", _plain(asked, few), **off),
        engine("caches", _cached(few), enable_prefix_caching=True, max_num_seqs=FEW),
        engine("chunks", _chunked(few), **off | {"max_num_seqs": min(4, cut), "max_num_batched_tokens": cut}),
        engine("served", _served(asked, few), dtype="auto", enable_prefix_caching=True, max_num_seqs=FEW),
    ]
    if reducer is not None:
        agree, one, other = (
            _round("agree", asked),
            _round("one", few[:1]),
            reducer_block.write(config, another(reducer)),
        )
        all_engines += [
            engine("unreduced", [agree], unreduced(config), dtype="auto", max_num_seqs=FEW),
            engine("other", [one], other, dtype="auto", max_num_seqs=FEW),
        ]
    # The last one: it imports numba, and vLLM 0.32, which looks into all modules, starts no engine behind that.
    all_engines.append(engine("ngram", [_round("few", few)], **off, speculative_config=NGRAM))
    return all_engines


def another(reducer: ReducerChoice) -> ReducerChoice:
    """A reducer that keeps as many tokens as `reducer` could, chosen otherwise: only its name tells them apart."""
    from vlmcompress.recipe import reducer as chosen

    other = "uniform" if reducer.method != "uniform" else "random"
    keep = 0.5 if reducer.options.keep is None else reducer.options.keep
    return chosen.choose(other, {"keep": keep}, "another")


def _round(name: str, ask: list[str], **more: Any) -> Round:
    """Make a round for `worker`: the requests `ask`, greedily unless `more` says otherwise."""
    return {"name": name, "ask": ask, "sampling": ALL_TOKENS, **more}


def _plain(asked: list[str], few: list[str]) -> list[Round]:
    """Rounds without caches and cut prompts: one request after the other, then all mixed."""
    return [
        _round("alone", asked, alone=True),
        _round("mixed", asked),
        _round("turn", ["again", "turn"], alone=True),
        _round("large", ["large"]),
        _round("sampled", few[:3], sampling=SAMPLED | {"n": SAMPLES}),
        *(_round(f"sample {n}", few[:3], sampling=SAMPLED | {"seed": SAMPLED["seed"] + n}) for n in range(SAMPLES)),
    ]


def _cached(few: list[str]) -> list[Round]:
    """Rounds with prefixes and encoder outputs from caches."""
    return [
        _round("cold", few, alone=True),
        _round("again", few, alone=True),
        _round("together", few),
        _round("long", ["far"], alone=True),  # a prefix is kept in blocks, of hundreds of tokens with recurrent states
        _round("long again", ["far"], alone=True),
        _round("warm", few, alone=True, reset=["prefix"]),
        _round("repeat", ["again", "turn"], alone=True),
    ]


def _chunked(few: list[str]) -> list[Round]:
    """Rounds with prompts in pieces that end within images; the third step is in the middle of an image."""
    return [
        _round("cut", few),
        _round("abort", few, steps=3, abort=few[:2]),
        _round("after", few),
        _round("large", ["large"]),
    ]


def _served(asked: list[str], few: list[str]) -> list[Round]:
    """Rounds with the settings of `vllm serve`, in the checkpoint's own type."""
    forced = {"max_tokens": JSON_TOKENS, "json": SCHEMA}
    return [
        _round("agree", asked),
        _round("far", ["far"], alone=True),
        _round("json", few, sampling=forced),
        _round("stream", few[:1], stream=True, alone=True, sampling=forced),
        _round("whole", few[:1], alone=True, sampling=forced),
        _round("abort", few, steps=2, abort=few[:2]),
        _round("after", few),
    ]
