"""The checks: each compares answers of the engines and returns its finding in words, or raises UserError.

The first line of a check's docstring states what must hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vlmcompress.engines.vllm.conformance._compare import Pair, same
from vlmcompress.engines.vllm.conformance._findings import Findings
from vlmcompress.engines.vllm.conformance._plan import SAMPLES, SCHEMA
from vlmcompress.engines.vllm.conformance._questions import KINDS
from vlmcompress.engines.vllm.conformance._reference import Expected
from vlmcompress.errors import UserError

APART = {"float32": 1e-4}
HALF_APART = 0.05  # probabilities of one token may differ by so much in types of 16 bits


def counts(found: Findings) -> str:
    """Prompts have exactly the tokens that transformers expects."""
    records = found.round("plain", "alone") | found.round("plain", "turn") | found.round("plain", "large")
    for name, record in records.items():
        if name and record["prompt"] != found.exact[name].prompt:
            wanted = len(found.exact[name].prompt)
            raise UserError(
                f"the prompt of '{name}' has {len(record['prompt'])} tokens, or others, not the {wanted} due"
            )
    kept = [count for name in records if name for count in found.exact[name].kept]
    visual = f", {min(kept)} to {max(kept)} tokens an image" if kept else ""
    return f"{len(records) - 1} prompts as budgeted, token by token{visual}"


def budgets(found: Findings) -> str:
    """The largest image fits the memory set aside for it, also where a step has room for a part of it only."""
    about, small = found.engine("plain")["about"], found.engine("chunks")["about"]
    (record,) = (record for name, record in found.round("plain", "large").items() if name)
    largest = max([sum(found.exact["large"].kept), 1])
    if largest > about["image_tokens"]:
        raise UserError(f"an image of {largest} tokens, but vLLM plans for at most {about['image_tokens']}")
    said = same([Pair("large", record["tokens"][0], found.round("chunks", "large")["large"])], small["dtype"])
    return f"{largest} tokens of {about['image_tokens']} planned; in steps of {small['step_tokens']}: {said}"


def parity(found: Findings) -> str:
    """Greedy tokens equal those of transformers, both one by one and in mixed batches."""
    said, comparable = [], _comparable(found)
    for name in ("alone", "mixed"):
        records = found.round("plain", name)
        pairs = [Pair(key, found.exact[key].tokens, record) for key, record in records.items() if key in comparable]
        said.append(f"{name} {same(pairs, found.dtype('plain'))}")
    return f"{found.dtype('plain')}, {', '.join(KINDS)}: {'; '.join(said)}"


def _comparable(found: Findings) -> set[str]:
    """Ids of questions that must be answered as transformers does.

    In a type with rounding errors the engines may keep other tokens of an image, and answer from them; how often they
    agree nevertheless is what `agreement` looks at.
    """
    exact = found.dtype("plain") == "float32"
    records = found.round("plain", "alone")
    return {name for name, record in records.items() if exact or _as_expected(record, found, name)}


def agreement(found: Findings) -> str:
    """In the checkpoint's own type the engines agree with a reducer as often as without."""
    served = _agreed(found, found.reduced, "served")
    total = len(found.questions.plain)
    text = f"{found.dtype('served')}: {served} of {total} answers as transformers gives them"
    if found.reducer is None:
        return text
    bare = _agreed(found, found.unreduced, "unreduced")
    rates = [served / total, bare / total]
    error = math.sqrt(sum(rate * (1 - rate) for rate in rates) / total)
    text += f", unreduced {bare}"
    if rates[0] < rates[1] - max(2 * error, 1.5 / total):
        raise UserError(text)
    return text


def _agreed(found: Findings, expected: Mapping[str, Expected], engine: str) -> int:
    """Number of answers that are the same, up to the token that ends them."""

    def answer(tokens: list[int]) -> list[int]:
        end = next((at for at, token in enumerate(tokens) if token in found.ends), len(tokens))
        return tokens[:end]

    records = found.round(engine, "agree")
    return sum(answer(record["tokens"][0]) == answer(expected[name].tokens) for name, record in records.items() if name)


def positions(found: Findings) -> str:
    """Every token, visual, behind an image or generated, has the position that it has in transformers.

    In a type with rounding errors the engines may keep other tokens of an image, each at its place in the full prompt.
    """
    records = found.round("plain", "alone") | found.round("plain", "turn")
    equal = 0
    for name, record in records.items():
        same_ones = _as_expected(record, found, name)
        equal += same_ones
        if not same_ones and (found.dtype("plain") == "float32" or not _within(record, found, name)):
            raise UserError(f"'{name}' has other positions than in transformers")
    others = f", {len(records) - equal} of them with other tokens kept" if equal < len(records) else ""
    return f"{len(records)} prompts and their continuations at the positions that transformers gives{others}"


def _as_expected(record: Mapping[str, Any], found: Findings, name: str) -> bool:
    """Whether the positions are those of transformers, so that the same tokens were kept."""
    return bool(record["positions"] == found.exact[name].positions.tolist())


def _within(record: Mapping[str, Any], found: Findings, name: str) -> bool:
    """Whether the prompt's positions, but for a prefix from the cache, are some of those of the full one, in order, with the
    same last one, and each token of the answer, however long it is, stands one behind the token before it."""
    got, full = (torch.as_tensor(rows).T.tolist() for rows in (record["positions"], found.unreduced[name].positions))
    prompt, last = len(found.reduced[name].prompt) - record["cached"], full[len(found.unreduced[name].prompt) - 1]
    left, answer = iter(full), range(1, len(record["tokens"][0]))
    behind = [[row + step for row in last] for step in answer]
    return got[prompt - 1 : prompt] == [last] and got[prompt:] == behind and all(one in left for one in got[:prompt])


def far(found: Findings) -> str:
    """Positions beyond 256 are exact in a type of eight bits' precision."""
    record = found.round("served", "far")["far"]
    high = [max(one) for one in zip(*record["positions"], strict=True) if max(one) > 256]
    if not _within(record, found, "far"):
        raise UserError("positions of the reduced prompt are not those of its tokens in the full one")
    if not any(one % 2 for one in high):
        raise UserError(f"no odd one among {len(high)} positions beyond 256")
    total = len(record["positions"][0])
    return f"{found.dtype('served')}: {len(high)} of {total} positions beyond 256, up to {max(high)}, all exact"


def prefix_cache(found: Findings) -> str:
    """Answers from cached prefixes are the same."""
    said = found.as_plain("caches", "cold", "again", "together")
    (first,), (second,) = (
        [record for name, record in found.round("caches", each).items() if name] for each in ("long", "long again")
    )
    longer = same([Pair("far", first["tokens"][0], second)], found.dtype("caches"))
    if not found.engine("caches")["about"]["prefix_caching"]:
        return f"{said}; vLLM's CPU build keeps no prefix of a decoder with recurrent states, so none was asked for"
    again = [record for name, record in found.round("caches", "again").items() if name] + [second]
    hits = sum(record["cached"] for record in again)
    if not hits:
        raise UserError("asked again, no prompt had a token from the prefix cache")
    total = sum(len(record["prompt"]) for record in again)
    return f"{said}, of a long prompt {longer}; {hits} of {total} prompt tokens from the cache"


def chunked(found: Findings) -> str:
    """Answers to prompts that are cut within an image are the same."""
    return f"steps of {found.engine('chunks')['about']['step_tokens']} tokens: {found.as_plain('chunks', 'cut')}"


def encoder_cache(found: Findings) -> str:
    """Answers from cached encoder outputs are the same, and images seen before are not encoded again."""
    said = found.as_plain("caches", "warm", "repeat")
    cold, warm = (
        sum(record["encoded"] for record in found.round("caches", each).values()) for each in ("cold", "warm")
    )
    repeated = sum(record["encoded"] for record in found.round("caches", "repeat").values())
    if warm or bool(repeated) != found.asks or not cold:
        raise UserError(f"{cold} images encoded at first, {warm} again, {repeated} for other words about one of them")
    return f"{said}; {cold} images encoded once, none again{', but for other words' if found.asks else ''}"


def names(found: Findings) -> str:
    """An image has another name in the caches of another reducer, at the same path."""
    if found.reducer is None:
        return "no reducer to tell apart"
    first = found.questions.plain[0].id
    served = found.round("served", "agree")[first]["media"]
    others = [found.round("unreduced", "agree")[first]["media"], found.round("other", "one")[first]["media"]]
    if not served or any(set(served) & set(other) for other in others):
        raise UserError(f"image {served} has the same name with another reducer or without one")
    return "an image has a name of its own with this reducer, with another one and without"


def turn(found: Findings) -> str:
    """Answers to the second turn of a conversation are the same, from the cache, too."""
    record = found.round("plain", "turn")["turn"]
    alone = same([Pair("turn", found.exact["turn"].tokens, record)], found.dtype("plain"))
    cached = found.round("caches", "repeat")["turn"]["cached"]
    return f"as transformers: {alone}; {cached} tokens cached: {found.as_plain('caches', 'repeat', leave=('again',))}"


def structured(found: Findings) -> str:
    """Answers keep to a JSON schema."""
    records = {name: record for name, record in found.round("served", "json").items() if name}
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


def streaming(found: Findings) -> str:
    """The pieces of a streamed answer make up the answer."""
    first = found.questions.plain[0].id
    pieces = found.round("served", "stream")[first]["pieces"]
    whole = found.round("served", "whole")[first]["text"][0]
    if "".join(pieces) != whole or (len(pieces) < 2 and len(whole) > 1):
        raise UserError(f"streamed {''.join(pieces)[:80]!r}, whole {whole[:80]!r}")
    if not whole:
        return "the answer has no text, streamed and whole"
    return f"{len(pieces)} pieces make up the whole answer"


def logprobs(found: Findings) -> str:
    """Reported log-probabilities are those of transformers, and the greedy token has the highest."""
    largest, records, comparable = 0.0, found.round("plain", "alone"), _comparable(found)
    for name, record in records.items():
        for token, step in zip(record["tokens"][0], record["best"], strict=True):
            values = dict(map(tuple, step))
            if values[token] < max(values.values()):
                raise UserError(f"'{name}': a greedy token is not the likeliest")
        if name in comparable:
            first = found.exact[name].first
            gaps = [abs(math.exp(value) - math.exp(first[token])) for token, value in record["best"][0]]
            largest = max([largest, *gaps])
    if largest > APART.get(found.dtype("plain"), HALF_APART):
        raise UserError(f"probabilities differ from transformers' by up to {largest:.2g}")
    return f"of {len(comparable)} first tokens: probabilities as transformers' to {largest:.1g}"


def several(found: Findings) -> str:
    """The `n` answers to one prompt are those that their seeds give one by one."""
    together = {name: record for name, record in found.round("plain", "sampled").items() if name}
    for name, record in together.items():
        single = [found.round("plain", f"sample {n}")[name]["tokens"][0] for n in range(SAMPLES)]
        if sorted(record["tokens"]) != sorted(single):
            raise UserError(f"'{name}': {SAMPLES} answers at once are not those of their seeds")
    return f"n={SAMPLES} gives the {SAMPLES} answers of its seeds, {len(together)} prompts"


def abort(found: Findings) -> str:
    """Requests that are aborted, one of them in the middle of an image, leave nothing behind and harm no other."""
    leave = tuple(found.questions.few(2))
    for engine in ("chunks", "served"):
        about = found.engine(engine)["about"]
        if about["unfinished"] or about["kv_usage"]:
            raise UserError(
                f"{about['unfinished']} requests and {about['kv_usage']:.1%} of the KV cache are still held"
            )
    return f"{found.as_plain('chunks', 'abort', leave=leave)} beside them, {found.as_plain('chunks', 'after')} later"


def speculation(found: Findings) -> str:
    """N-gram speculation gives the same answers, or vLLM says why not."""
    if error := found.engines["ngram"].get("error"):
        return f"refused: {error[:200]}"
    return found.as_plain("ngram", "few")


CHECKS: dict[str, Callable[[Findings], str]] = {
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
