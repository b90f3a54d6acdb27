"""The result of `vlmcompress search`, as in `search.json`, as text and as a page with its Pareto plot."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vlmcompress.evaluation.report import words
from vlmcompress.evaluation.report.charts import PAGE, Frame, both, front
from vlmcompress.evaluation.report.html import fill_template
from vlmcompress.evaluation.search.outcome import FILE
from vlmcompress.evaluation.search.speed import GOALS
from vlmcompress.utils.folders import dump, save_files
from vlmcompress.utils.text import duration, points, table, times

GAINS = {
    "throughput": "the requests a second",
    "ttft": "as short a time to the first token",
    "memory": "less memory for weights and cache",
    "cost": "cheaper requests",
}
ROWS = 12  # candidates in the text


def search_text(data: Mapping[str, Any]) -> str:
    """A headline, the main candidates, the verdict, and the paths of the files."""
    tried = [candidate for candidate in data["candidates"] if candidate["questions"]][:ROWS]
    columns = ("name", "gain", "questions", "difference", "chance", "why")
    rows: list[tuple[object, ...]] = [("candidate", *columns[1:5], "")]
    rows += [tuple(row[column] for column in columns) for row in map(_row, tried)]
    lines = [headline(data), "", table(rows)]
    if hidden := len(data["candidates"]) - len(tried):
        lines.append(f"  ... and {hidden} more in search.json")
    lines += ["", *notes(data), *verdict(data)]
    places = [f"Checkpoint: {data['out']}/winner", f"recipe: {data['out']}/recipe.yaml"] if data["winner"] else []
    return "\n".join([*lines, ", ".join([*places, f"report: {data['files']['html']}"])])


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    change = f"{points(row['difference'])} ({points(row['low'])} to {points(row['high'])})" if row["questions"] else ""
    return {
        "name": row["name"],
        "gain": times(row["gain"]) + ("~" if row["rough"] else ""),
        "questions": row["questions"] or "",
        "difference": change,
        "divergence": "" if row["divergence"] is None else f"{row['divergence']:.4f}",
        "chance": f"{100 * row['chance']:.0f}%",
        "why": "winner" if row["winner"] else row["why"],
        "strong": row["winner"],
    }


def headline(data: Mapping[str, Any]) -> str:
    """One sentence: the winner, its gain, and whether the floor was confirmed; or that none won, with the nearest candidate."""
    floor = words.margin(data["max_drop"])
    if data["winner"]:
        winner = next(candidate for candidate in data["candidates"] if candidate["winner"])
        source = "modelled" if winner["rough"] else data["gains"]
        gain = f"{winner['name']}: {times(winner['gain'])} {GAINS[data['optimize']]} ({source})"
        if not (confirmation := data.get("confirmed")):
            chance = 100 * winner["chance"]
            return f"{gain}; not confirmed: a loss of at most {floor} has a chance of {chance:.0f}%."
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


def notes(data: Mapping[str, Any]) -> list[str]:
    """Notes on the cost of the search and on its time limit."""
    questions = data["questions"]
    lines = [
        f"Asked {questions['asked']:,} questions in {duration(data['seconds'])}; asking every candidate all of them would "
        f"have been {questions['full_grid']:,}."
    ]
    if data["ended_by_budget"]:
        lines.append("The time budget ended the search; run it again with a longer one, and it goes on from here.")
    return lines


def verdict(data: Mapping[str, Any]) -> list[str]:
    """Whether the winner was confirmed, as a list of at most one sentence."""
    if not data["winner"]:
        return []
    c = data.get("confirmed")
    if c is None:
        return ["Not confirmed: the questions of a search flatter its winner. Give --confirm other questions."]
    judged = {"pass": "Confirmed", "fail": "Refuted", "inconclusive": "Can't tell"}[c["verdict"]]
    missing = f"; about {c['missing']:,} more {c['unit']} would decide" if c["missing"] else ""
    change = f"{points(c['difference'])} points ({points(c['low'])} to {points(c['high'])})"
    shared = f" about {c['images']:,} images" if c["images"] < c["questions"] else ""
    return [f"{judged} on {c['questions']:,} other questions{shared}: {change}{missing}."]


def page(data: Mapping[str, Any]) -> str:
    """The content of `report.html`."""
    return fill_template(
        "search.html.j2",
        data=data,
        chart=both(partial(_chart, data)),
        confirmed=data.get("confirmed"),
        headline=headline(data),
        verdict=verdict(data),
        notes=notes(data),
        rows=[_row(candidate) for candidate in data["candidates"]],
        goal=GOALS[data["optimize"]],
        duration=duration,
    )


def _chart(data: Mapping[str, Any], frame: Frame = PAGE) -> Markup:
    return front(data["candidates"], data["max_drop"], GOALS[data["optimize"]], data.get("confirmed"), frame)


def write_search_report(data: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Write `report.html` and `search.json` into the folder of a search; kind -> path."""
    return save_files(folder, {"json": (FILE, dump(data)), "html": ("report.html", page(data))})
