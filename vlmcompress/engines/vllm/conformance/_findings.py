"""The findings: all answers of the engines and of transformers, for `_checks`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vlmcompress.engines.vllm.conformance._compare import Pair, same
from vlmcompress.engines.vllm.conformance._questions import Questions
from vlmcompress.engines.vllm.conformance._reference import Expected
from vlmcompress.errors import UserError
from vlmcompress.hf_hooks.support import chooses_images
from vlmcompress.recipe.reducer import ReducerChoice


@dataclass
class Findings:
    """All answers of the engines and of transformers.

    Attributes:
        exact: transformers' results by question, in the type in which answers must be equal.
        reduced, unreduced: transformers' results in the checkpoint's own type, with its reducer and without; the same two
            results if it has none.
        ends: tokens that end an answer.
        engines: what each engine gave.
        names: what vLLM says of the tensors' names.
    """

    questions: Questions
    reducer: ReducerChoice | None
    ends: set[int]
    exact: dict[str, Expected]
    reduced: dict[str, Expected]
    unreduced: dict[str, Expected]
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    names: str = ""

    @property
    def asks(self) -> bool:
        """Whether the kept tokens of an image depend on the question, so that it is encoded anew for another one."""
        return self.reducer is not None and self.reducer.asks and not chooses_images(self.reducer.module)

    def engine(self, name: str) -> dict[str, Any]:
        """Records of an engine. UserError if it failed."""
        found = self.engines[name]
        if "error" in found:
            raise UserError(f"vLLM failed: {found['error'][:300]}")
        return found

    def round(self, engine: str, name: str) -> dict[str, Any]:
        """Records of a round by request."""
        return self.engine(engine)["rounds"][name]

    def dtype(self, engine: str) -> str:
        """The type in which an engine ran."""
        return self.engine(engine)["about"]["dtype"]

    def in_type_of(self, engine: str) -> None:
        """Expect equal answers in the type in which the engine ran, where that is not float32."""
        about = self.engines[engine].get("about")
        if about and about["dtype"] != "float32":
            self.exact = self.reduced

    def as_plain(self, engine: str, *rounds: str, leave: tuple[str, ...] = ()) -> str:
        """Compare rounds with the answers of the engine without caches."""
        plain = self.round("plain", "alone") | self.round("plain", "turn")
        pairs = [
            Pair(f"{name}, {each}", plain[name]["tokens"][0], record)
            for each in rounds
            for name, record in self.round(engine, each).items()
            if name and name not in leave
        ]
        return same(pairs, self.dtype(engine))
