"""Stock lm-eval gives a model the same scores as we do.

Its own `hf-multimodal` and one of our engines answer the same samples of the same task files, greedily and in float32, so
that no answer depends on a rounding.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.places import DEMOS
from vlmcompress.engines import EngineSettings, get_engine
from vlmcompress.evaluation.accuracy.ask import ask_suite
from vlmcompress.evaluation.accuracy.tasks import LoadedSuite, load_suite, quiet_lm_eval, task_metric


def stock(model: str, suite: LoadedSuite) -> tuple[dict[str, float], dict[str, str]]:
    """Run lm-eval's `hf-multimodal`; returns scores by task and answers by sample id.

    Tasks run one by one, as lm-eval takes several for text only if the first is.
    """
    from lm_eval.api.registry import get_model
    from lm_eval.evaluator import simple_evaluate

    arguments = {"pretrained": model, "dtype": "float32", "device": "cpu", "batch_size": 8}
    lm = get_model("hf-multimodal")(**arguments)
    places = {(place.task, place.index): place.id for place in suite.places}
    scores, answers = {}, {}
    for name, task in suite.tasks.items():
        with quiet_lm_eval():
            evaluated: Any = simple_evaluate(lm, tasks=[task], bootstrap_iters=0, apply_chat_template=True)
        scores[name] = evaluated["results"][name][f"{task_metric(task)},none"]
        answers |= {places[name, row["doc_id"]]: row["filtered_resps"][0].strip() for row in evaluated["samples"][name]}
    return scores, answers


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(("name", "engine"), [("demo-llava", "vllm"), ("demo-qwen", "hf")])
def test_scores_are_those_of_stock_lm_eval(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    model = str(DEMOS / name)
    suite = load_suite("world", None, candidate=model, baseline=model, limit=40)
    answered = ask_suite(model, suite, get_engine(engine), EngineSettings(dtype="float32"))
    ours = {task: answered.metrics[task][task_metric(suite.tasks[task])] for task in suite.tasks}
    theirs, answers = stock(model, suite)
    assert ours == theirs and len(ours) == 10 and sum(ours.values()) / 10 > 0.8
    assert len(suite) == 40 and all(answers[sample.id] == sample.text for sample in answered.samples)
