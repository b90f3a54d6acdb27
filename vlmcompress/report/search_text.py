"""What a search found, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmcompress.common.text import duration, points, table, times
from vlmcompress.report import words

GAINS = {
    "throughput": "the requests a second",
    "ttft": "as short a time to the first token",
    "memory": "less memory for weights and cache",
    "cost": "cheaper requests",
}
ROWS = 12


def text(data: Mapping[str, Any]) -> str:
    """A headline, the candidates worth knowing, the verdict, and where the files are."""
    rows: list[tuple[object, ...]] = [("candidate", "gain", "questions", "difference", "chance", "")]
    tried = [one for one in data["candidates"] if one["questions"]][:ROWS]
    rows += [_row(one) for one in tried]
    lines = [headline(data), "", table(rows)]
    if more := len(data["candidates"]) - len(tried):
        lines.append(f"  ... and {more} more in search.json")
    lines += ["", *notes(data), *verdict(data)]
    where = [f"Checkpoint: {data['out']}/winner", f"recipe: {data['out']}/recipe.yaml"] if data["winner"] else []
    return "\n".join([*lines, ", ".join([*where, f"report: {data['files']['html']}"])])


def headline(data: Mapping[str, Any]) -> str:
    """One sentence: what won, by how much, and whether its floor was confirmed; or that nothing did, and what came nearest."""
    floor = words.margin(data["max_drop"])
    if data["winner"]:
        one = next(row for row in data["candidates"] if row["winner"])
        how = "modelled" if one["rough"] else data["gains"]
        gain = f"{one['name']}: {times(one['gain'])} {GAINS[data['optimize']]} ({how})"
        if not (confirmation := data.get("confirmed")):
            return f"{gain}; not confirmed: a loss of at most {floor} has a chance of {100 * one['chance']:.0f}%."
        if confirmation["verdict"] == "pass":
            return f"{gain}, for a loss of at most {floor}."
        if confirmation["verdict"] == "fail":
            return f"{gain}, but it loses more than {floor}."
        return f"{gain}; can't tell if the loss is at most {floor}."
    near = data["nearest"]
    if near is None:
        return f"No candidate gains anything within {floor}."
    change = points(near["difference"])
    return f"No candidate gains anything within {floor}; the nearest is {near['name']}: {change} points, {times(near['gain'])}."


def _row(one: Mapping[str, Any]) -> tuple[object, ...]:
    interval = f"{points(one['difference'])} ({points(one['low'])} to {points(one['high'])})"
    gain = times(one["gain"]) + ("~" if one["rough"] else "")
    why = "winner" if one["winner"] else one["why"]
    return one["name"], gain, one["questions"], interval, f"{100 * one['chance']:.0f}%", why


def notes(data: Mapping[str, Any]) -> list[str]:
    """What the search cost, whether its time ended it, what one more point would buy, and what requests cost."""
    asked = data["questions"]
    lines = [
        f"Asked {asked['asked']:,} questions in {duration(data['seconds'])}; asking every candidate all of them would have "
        f"been {asked['full_grid']:,}."
    ]
    if data["ended_by_budget"]:
        lines.append("The time budget ended the search; run it again with a longer one, and it goes on from here.")
    if other := data["one_more_point"]:
        lines.append(
            f"With a floor of {100 * other['max_drop']:g} points it would be {other['name']}: {times(other['gain'])}, as "
            f"far as {other['questions']:,} questions tell."
        )
    if (price := data.get("price_per_hour")) and data["rate"]:
        before, after = (price / 3.6 / rate for rate in data["rate"])
        lines.append(f"1,000 requests cost {after:.3g} instead of {before:.3g}, at {price:g} an hour.")
    return lines


def verdict(data: Mapping[str, Any]) -> list[str]:
    """Whether the winner was confirmed."""
    if not data["winner"]:
        return []
    found = data.get("confirmed")
    if found is None:
        return ["Not confirmed: the questions of a search flatter its winner. Give --confirm other questions."]
    said = {"pass": "Confirmed", "fail": "Refuted", "inconclusive": "Can't tell"}[found["verdict"]]
    more = f"; about {found['missing']:,} more {found['unit']} would decide" if found["missing"] else ""
    change = f"{points(found['difference'])} points ({points(found['low'])} to {points(found['high'])})"
    shared = f" about {found['images']:,} images" if found["images"] < found["questions"] else ""
    return [f"{said} on {found['questions']:,} other questions{shared}: {change}{more}."]
