"""Plain data as an lm-eval task: each row a conversation about images, scored by exact match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.task import ConfigurableTask

from vlmcompress.data.samples import Sample
from vlmcompress.evaluation import benchmarks, local_data

SCORING = "Exact match after case folding, collapsing spaces and dropping a final full stop."


class Documents(list):
    """Rows with the part of the interface of `datasets.Dataset` that lm-eval uses; their images stay files."""

    @property
    def features(self) -> dict[str, Any]:
        return dict.fromkeys(self[0])

    def __getitem__(self, key: Any) -> Any:
        """A row by number, or a column by name."""
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)

    def select(self, indices: Sequence[int]) -> Documents:
        return Documents(self[index] for index in indices)


class Conversations(ConfigurableTask):
    """A task whose prompts are the samples' turns as they are.

    Args:
        samples: the samples, each with an answer.
        ids: their ids in the data; None where the data have none.
    """

    def __init__(self, name: str, samples: Sequence[Sample], ids: Sequence[str | None]):
        rows = Documents(
            {
                "id": identity,
                "family": sample.family,
                "question": sample.question,
                "answer": sample.answer,
                "images": sample.images,
                "turns": sample.prompt(),
            }
            for sample, identity in zip(samples, ids, strict=True)
        )
        longest = max(len(sample.answer or "") for sample in samples)
        super().__init__(
            config={
                "task": name,
                "custom_dataset": lambda **_: {"test": rows},
                "test_split": "test",
                "doc_to_text": "question",
                "doc_to_target": "answer",
                "doc_to_image": local_data.images,
                "process_results": benchmarks.exact,
                "generation_kwargs": {
                    "until": [],
                    "max_gen_toks": max(32, longest),
                    "do_sample": False,
                    "temperature": 0.0,
                },
                "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
                "metadata": {"scoring": SCORING},
            }
        )

    def fewshot_context(self, doc: dict[str, Any], *_: Any, chat_template: Callable[..., str], **__: Any) -> str:
        """Render a sample's turns, with a system prompt and earlier answers if the data have them."""
        return chat_template(doc["turns"])
