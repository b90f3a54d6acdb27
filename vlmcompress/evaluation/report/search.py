"""The result of `vlmcompress search`, as in `search.json`, as text and as a page with its Pareto plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vlmcompress.evaluation.report import html, plots, words
from vlmcompress.evaluation.report.document import Lines, Plots, Section, Table, note, verdict_cell
from vlmcompress.evaluation.search.outcome import FILE
from vlmcompress.evaluation.search.speed import GOALS
from vlmcompress.utils.folders import dump, save_files
from vlmcompress.utils.text import duration, points, table, times

GAINS = {
    "throughput": "the requests a second",
    "ttft": "as short a time to the first token",
    "memory": "less memory for weights and cache",
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
        "chance": f"{100 * row['chance']:.0f}%",
        "why": "winner" if row["winner"] else row["why"],
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
    confirmed, goal = data.get("confirmed"), GOALS[data["optimize"]]
    tried = [row for row in data["candidates"] if row["questions"]]
    numbers = {row["name"]: number for number, row in enumerate(tried, start=1)}
    sections = []
    if tried:
        front = plots.undominated([(row["gain"], row["difference"]) for row in tried])
        dots = [
            {
                "number": numbers[row["name"]],
                **{key: row[key] for key in ("name", "gain", "difference", "low", "high")},
                "tone": "mark" if (row["gain"], row["difference"]) in front else "even",
                "strong": row["winner"],
            }
            for row in tried
        ]
        if confirmed and tried[0]["winner"]:
            ends = {key: confirmed[key] for key in ("difference", "low", "high")}
            name = f"the winner on {confirmed['questions']:,} other questions"
            dots.append({"number": "?", "name": name, "gain": tried[0]["gain"], **ends, "tone": confirmed["verdict"]})
        best = "; ".join(f"{dot['name']} {times(dot['gain'])}" for dot in dots if dot["tone"] == "mark")
        label = f"Difference in accuracy against gain ({goal}) of {len(tried)} candidates; the front: {best}"
        plot = plots.scatter(dots, goal, data["max_drop"], label)
        legend = (
            "Numbers are those of the table. A dot is a candidate that was asked questions, with the 95% interval of its "
            "loss. The ring is the winner; filled: no other candidate gains as much and lost less; the shaded region is below "
            "the floor."
        )
        legend += " The question mark is the winner on questions that the search never saw." if confirmed else ""
        title = "Difference in accuracy, points"
        sections.append(Section("", [Plots([(title, plot)]), Lines([legend], "legend")]))
    columns = ("gain", "questions", "difference", "chance", "why")
    rows = []
    for row in data["candidates"]:
        name = f"{numbers[row['name']]} {row['name']}" if row["name"] in numbers else row["name"]
        rows.append((name, *(str(_row(row)[column]) for column in columns)))
    gains = (
        f"Gains are {data['gains']}, and times the original's; ~ marks those that are modelled alone. Chance: that other "
        "questions confirm the floor."
    )
    head = ["candidate", "gain", "questions", "difference, points", "chance", "why it lost"]
    winners = [number for number, row in enumerate(data["candidates"]) if row["winner"]]
    sections.append(Section("Candidates", [note(gains), Table(head, rows, "cards", winners)]))
    if left_out := data["left_out"]:
        lines = [f"{name}: {why}" for name, why in left_out.items()]
        sections.append(Section("Left out", [Lines(lines, "list")]))
    where = f", on {data['target']}" if data["target"] else ""
    heading = Markup("{} {}").format(data["model"], verdict_cell(confirmed["verdict"])) if confirmed else data["model"]
    return html.page(
        f"Search on {data['model']}",
        [headline(data), *verdict(data)],
        sections,
        heading=heading,
        eyebrow=f"{goal} under a floor of {100 * data['max_drop']:g} points{where}",
        verdict=confirmed["verdict"] if confirmed else None,
        notes=notes(data),
    )


def write_search_report(data: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Write `report.html` and `search.json` into the folder of a search; kind -> path."""
    return save_files(folder, {"json": (FILE, dump(data)), "html": ("report.html", page(data))})
