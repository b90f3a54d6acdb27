"""The checks of a checkpoint's conformance: each compares answers of the engines and returns its finding in words, or raises
UserError.

The first line of a check's docstring states what must hold. Continuations may part only where two tokens are nearly equally
likely.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vlmcompress.engines.vllm.conformance_plan import KINDS, SAMPLES, SCHEMA, Questions
from vlmcompress.engines.vllm.conformance_reference import Expected
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.support import chooses_images
from vlmcompress.utils.errors import UserError

TIES = {"float32": 1e-3}
HALF_TIE = 0.25  # nats: logits of about 16 are 1/8 apart in bfloat16
APART = {"float32": 1e-4}
HALF_APART = 0.05  # probabilities of one token may differ by so much in types of 16 bits


@dataclass(frozen=True)
class Pair:
    """The expected continuation of a request, and the engine's record of it."""

    id: str
    expected: Sequence[int]
    record: dict[str, Any]

    def margin(self) -> float:
        """Log-probability of the engine's token above that of the expected one where they part, in nats.

        0 when they don't part, infinity when the expected one was not among the likeliest.
        """
        got = self.record["tokens"][0]
        at = next((at for at, (a, b) in enumerate(zip(got, self.expected, strict=False)) if a != b), None)
        if at is None:
            return 0.0 if len(got) == len(self.expected) else math.inf
        likely = dict(map(tuple, self.record["best"][at]))
        return abs(likely.get(got[at], math.inf) - likely.get(self.expected[at], -math.inf))


def same(pairs: Iterable[Pair], dtype: str) -> str:
    """Compare pairs; return in words how many are the same.

    Raises:
        UserError: a pair differs, and no tie explains it.
    """
    margins = {pair.id: pair.margin() for pair in pairs}
    limit = TIES.get(dtype, HALF_TIE)
    wrong = [name for name, margin in margins.items() if margin > limit]
    if wrong:
        first = f"first '{wrong[0]}', by {margins[wrong[0]]:.2g} nats"
        raise UserError(f"{len(wrong)} of {len(margins)} answers differ, {first}")
    ties = [margin for margin in margins.values() if margin]
    tied = f", {len(ties)} of them but for ties within {max(ties):.1g} nats" if ties else ""
    return f"{len(margins)} of {len(margins)} answers equal{tied}"


@dataclass
class Answers:
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
        records = self.engines[name]
        if "error" in records:
            raise UserError(f"vLLM failed: {records['error'][:300]}")
        return records

    def round(self, engine: str, name: str) -> dict[str, Any]:
        """Records of a round by request."""
        return self.engine(engine)["rounds"][name]

    def dtype(self, engine: str) -> str:
        """The type in which an engine ran."""
        return self.engine(engine)["about"]["dtype"]

    def expect_in_type_of(self, engine: str) -> None:
        """Expect equal answers in the type in which the engine ran, where that is not float32."""
        about = self.engines[engine].get("about")
        if about and about["dtype"] != "float32":
            self.exact = self.reduced

    def same_as_plain(self, engine: str, *rounds: str, leave: tuple[str, ...] = ()) -> str:
        """Compare rounds with the answers of the engine without caches."""
        plain = self.round("plain", "alone") | self.round("plain", "turn")
        pairs = [
            Pair(f"{name}, {each}", plain[name]["tokens"][0], record)
            for each in rounds
            for name, record in self.round(engine, each).items()
            if name and name not in leave
        ]
        return same(pairs, self.dtype(engine))


def counts(answers: Answers) -> str:
    """Prompts have exactly the tokens that transformers expects."""
    records = answers.round("plain", "alone") | answers.round("plain", "turn") | answers.round("plain", "large")
    for name, record in records.items():
        if name and record["prompt"] != answers.exact[name].prompt:
            count = len(answers.exact[name].prompt)
            raise UserError(
                f"the prompt of '{name}' has {len(record['prompt'])} tokens, or others, not the {count} due"
            )
    kept = [count for name in records if name for count in answers.exact[name].kept]
    visual = f", {min(kept)} to {max(kept)} tokens an image" if kept else ""
    return f"{len(records) - 1} prompts as budgeted, token by token{visual}"


def budgets(answers: Answers) -> str:
    """The largest image fits the memory set aside for it, also where a step has room for a part of it only."""
    about, small = answers.engine("plain")["about"], answers.engine("chunks")["about"]
    (record,) = (record for name, record in answers.round("plain", "large").items() if name)
    largest = max([sum(answers.exact["large"].kept), 1])
    if largest > about["image_tokens"]:
        raise UserError(f"an image of {largest} tokens, but vLLM plans for at most {about['image_tokens']}")
    said = same([Pair("large", record["tokens"][0], answers.round("chunks", "large")["large"])], small["dtype"])
    return f"{largest} tokens of {about['image_tokens']} planned; in steps of {small['step_tokens']}: {said}"


def parity(answers: Answers) -> str:
    """Greedy tokens equal those of transformers, both one by one and in mixed batches."""
    said, comparable = [], _comparable(answers)
    for name in ("alone", "mixed"):
        records = answers.round("plain", name)
        pairs = [Pair(key, answers.exact[key].tokens, record) for key, record in records.items() if key in comparable]
        said.append(f"{name} {same(pairs, answers.dtype('plain'))}")
    return f"{answers.dtype('plain')}, {', '.join(KINDS)}: {'; '.join(said)}"


def _comparable(answers: Answers) -> set[str]:
    """Ids of questions that must be answered as transformers does.

    In a type with rounding errors the engines may keep other tokens of an image, and answer from them; how often they
    agree nevertheless is what `agreement` looks at.
    """
    exact = answers.dtype("plain") == "float32"
    records = answers.round("plain", "alone")
    return {name for name, record in records.items() if exact or _as_expected(record, answers, name)}


def agreement(answers: Answers) -> str:
    """In the checkpoint's own type the engines agree with a reducer as often as without."""
    served = _agreed(answers, answers.reduced, "served")
    total = len(answers.questions.plain)
    text = f"{answers.dtype('served')}: {served} of {total} answers as transformers gives them"
    if answers.reducer is None:
        return text
    bare = _agreed(answers, answers.unreduced, "unreduced")
    rates = [served / total, bare / total]
    error = math.sqrt(sum(rate * (1 - rate) for rate in rates) / total)
    text += f", unreduced {bare}"
    if rates[0] < rates[1] - max(2 * error, 1.5 / total):
        raise UserError(text)
    return text


def _agreed(answers: Answers, expected: Mapping[str, Expected], engine: str) -> int:
    """Number of answers that are the same, up to the token that ends them."""

    def answer(tokens: list[int]) -> list[int]:
        end = next((at for at, token in enumerate(tokens) if token in answers.ends), len(tokens))
        return tokens[:end]

    records = answers.round(engine, "agree")
    return sum(answer(record["tokens"][0]) == answer(expected[name].tokens) for name, record in records.items() if name)


def positions(answers: Answers) -> str:
    """Every token, visual, behind an image or generated, has the position that it has in transformers.

    In a type with rounding errors the engines may keep other tokens of an image, each at its place in the full prompt.
    """
    records = answers.round("plain", "alone") | answers.round("plain", "turn")
    equal = 0
    for name, record in records.items():
        same_ones = _as_expected(record, answers, name)
        equal += same_ones
        if not same_ones and (answers.dtype("plain") == "float32" or not _within(record, answers, name)):
            raise UserError(f"'{name}' has other positions than in transformers")
    others = f", {len(records) - equal} of them with other tokens kept" if equal < len(records) else ""
    return f"{len(records)} prompts and their continuations at the positions that transformers gives{others}"


def _as_expected(record: Mapping[str, Any], answers: Answers, name: str) -> bool:
    """Whether the positions are those of transformers, so that the same tokens were kept."""
    return bool(record["positions"] == answers.exact[name].positions.tolist())


def _within(record: Mapping[str, Any], answers: Answers, name: str) -> bool:
    """Whether the prompt's positions, but for a prefix from the cache, are some of those of the full one, in order, with the
    same last one, and each token of the answer, however long it is, stands one behind the token before it."""
    got, full = (torch.as_tensor(rows).T.tolist() for rows in (record["positions"], answers.unreduced[name].positions))
    prompt, last = len(answers.reduced[name].prompt) - record["cached"], full[len(answers.unreduced[name].prompt) - 1]
    rest = iter(full)  # `in` consumes it, so that only positions in order are contained
    behind = [[row + step for row in last] for step in range(1, len(record["tokens"][0]))]
    in_order = all(position in rest for position in got[:prompt])
    return got[prompt - 1 : prompt] == [last] and got[prompt:] == behind and in_order


def far(answers: Answers) -> str:
    """Positions beyond 256 are exact in a type of eight bits' precision."""
    record = answers.round("served", "far")["far"]
    high = [max(position) for position in zip(*record["positions"], strict=True) if max(position) > 256]
    if not _within(record, answers, "far"):
        raise UserError("positions of the reduced prompt are not those of its tokens in the full one")
    if not any(position % 2 for position in high):
        raise UserError(f"no odd one among {len(high)} positions beyond 256")
    total = len(record["positions"][0])
    return f"{answers.dtype('served')}: {len(high)} of {total} positions beyond 256, up to {max(high)}, all exact"


def prefix_cache(answers: Answers) -> str:
    """Answers from cached prefixes are the same."""
    said = answers.same_as_plain("caches", "cold", "again", "together")
    (first,), (second,) = (
        [record for name, record in answers.round("caches", each).items() if name] for each in ("long", "long again")
    )
    longer = same([Pair("far", first["tokens"][0], second)], answers.dtype("caches"))
    if not answers.engine("caches")["about"]["prefix_caching"]:
        return f"{said}; vLLM's CPU build keeps no prefix of a decoder with recurrent states, so none was asked for"
    again = [record for name, record in answers.round("caches", "again").items() if name] + [second]
    hits = sum(record["cached"] for record in again)
    if not hits:
        raise UserError("asked again, no prompt had a token from the prefix cache")
    total = sum(len(record["prompt"]) for record in again)
    return f"{said}, of a long prompt {longer}; {hits} of {total} prompt tokens from the cache"


def chunked(answers: Answers) -> str:
    """Answers to prompts that are cut within an image are the same."""
    return (
        f"steps of {answers.engine('chunks')['about']['step_tokens']} tokens: {answers.same_as_plain('chunks', 'cut')}"
    )


def encoder_cache(answers: Answers) -> str:
    """Answers from cached encoder outputs are the same, and images seen before are not encoded again."""
    said = answers.same_as_plain("caches", "warm", "repeat")
    cold, warm = (
        sum(record["encoded"] for record in answers.round("caches", each).values()) for each in ("cold", "warm")
    )
    repeated = sum(record["encoded"] for record in answers.round("caches", "repeat").values())
    if warm or bool(repeated) != answers.asks or not cold:
        raise UserError(f"{cold} images encoded at first, {warm} again, {repeated} for other words about one of them")
    return f"{said}; {cold} images encoded once, none again{', but for other words' if answers.asks else ''}"


def names(answers: Answers) -> str:
    """An image has another name in the caches of another reducer, at the same path."""
    if answers.reducer is None:
        return "no reducer to tell apart"
    first = answers.questions.plain[0].id
    served = answers.round("served", "agree")[first]["media"]
    others = [answers.round("unreduced", "agree")[first]["media"], answers.round("other", "one")[first]["media"]]
    if not served or any(set(served) & set(other) for other in others):
        raise UserError(f"image {served} has the same name with another reducer or without one")
    return "an image has a name of its own with this reducer, with another one and without"


def turn(answers: Answers) -> str:
    """Answers to the second turn of a conversation are the same, from the cache, too."""
    record = answers.round("plain", "turn")["turn"]
    alone = same([Pair("turn", answers.exact["turn"].tokens, record)], answers.dtype("plain"))
    cached = answers.round("caches", "repeat")["turn"]["cached"]
    return f"as transformers: {alone}; {cached} tokens cached: {answers.same_as_plain('caches', 'repeat', leave=('again',))}"


def structured(answers: Answers) -> str:
    """Answers keep to a JSON schema."""
    records = {name: record for name, record in answers.round("served", "json").items() if name}
    for name, record in records.items():
        text = record["text"][0]
        try:
            values = json.loads(text)
        except ValueError as error:
            raise UserError(f"'{name}' gave no JSON: {text[:80]!r}") from error
        kinds: dict[str, Any] = SCHEMA["properties"]  # type: ignore[assignment]
        right = values.keys() == kinds.keys() and type(values["sure"]) is bool
        if not right or any("enum" in kind and values[key] not in kind["enum"] for key, kind in kinds.items()):
            raise UserError(f"'{name}' does not keep to the schema: {text[:80]!r}")
    return f"{len(records)} of {len(records)} answers keep to a JSON schema"


def streaming(answers: Answers) -> str:
    """The pieces of a streamed answer make up the answer."""
    first = answers.questions.plain[0].id
    pieces = answers.round("served", "stream")[first]["pieces"]
    whole = answers.round("served", "whole")[first]["text"][0]
    if "".join(pieces) != whole or (len(pieces) < 2 and len(whole) > 1):
        raise UserError(f"streamed {''.join(pieces)[:80]!r}, whole {whole[:80]!r}")
    if not whole:
        return "the answer has no text, streamed and whole"
    return f"{len(pieces)} pieces make up the whole answer"


def logprobs(answers: Answers) -> str:
    """Reported log-probabilities are those of transformers, and the greedy token has the highest."""
    largest, records, comparable = 0.0, answers.round("plain", "alone"), _comparable(answers)
    for name, record in records.items():
        for token, step in zip(record["tokens"][0], record["best"], strict=True):
            values = dict(map(tuple, step))
            if values[token] < max(values.values()):
                raise UserError(f"'{name}': a greedy token is not the likeliest")
        if name in comparable:
            first = answers.exact[name].first
            gaps = [abs(math.exp(value) - math.exp(first[token])) for token, value in record["best"][0]]
            largest = max([largest, *gaps])
    if largest > APART.get(answers.dtype("plain"), HALF_APART):
        raise UserError(f"probabilities differ from transformers' by up to {largest:.2g}")
    return f"of {len(comparable)} first tokens: probabilities as transformers' to {largest:.1g}"


def several(answers: Answers) -> str:
    """The `n` answers to one prompt are those that their seeds give one by one."""
    together = {name: record for name, record in answers.round("plain", "sampled").items() if name}
    for name, record in together.items():
        single = [answers.round("plain", f"sample {n}")[name]["tokens"][0] for n in range(SAMPLES)]
        if sorted(record["tokens"]) != sorted(single):
            raise UserError(f"'{name}': {SAMPLES} answers at once are not those of their seeds")
    return f"n={SAMPLES} gives the {SAMPLES} answers of its seeds, {len(together)} prompts"


def abort(answers: Answers) -> str:
    """Requests that are aborted, one of them in the middle of an image, leave nothing behind and harm no other."""
    leave = tuple(answers.questions.few(2))
    for engine in ("chunks", "served"):
        about = answers.engine(engine)["about"]
        if about["unfinished"] or about["kv_usage"]:
            raise UserError(
                f"{about['unfinished']} requests and {about['kv_usage']:.1%} of the KV cache are still held"
            )
    beside = answers.same_as_plain("chunks", "abort", leave=leave)
    return f"{beside} beside them, {answers.same_as_plain('chunks', 'after')} later"


def speculation(answers: Answers) -> str:
    """N-gram speculation gives the same answers, or vLLM says why not."""
    if error := answers.engines["ngram"].get("error"):
        return f"refused: {error[:200]}"
    return answers.same_as_plain("ngram", "few")


CHECKS: dict[str, Callable[[Answers], str]] = {
    "exact count": counts,
    "budgets": budgets,
    "parity": parity,
    "agreement": agreement,
    "positions": positions,
    "far positions": far,
    "prefix cache": prefix_cache,
    "chunked prefill": chunked,
    "encoder cache": encoder_cache,
    "cache names": names,
    "second turn": turn,
    "structured output": structured,
    "streaming": streaming,
    "log-probabilities": logprobs,
    "several answers": several,
    "abort": abort,
    "n-gram speculation": speculation,
}
