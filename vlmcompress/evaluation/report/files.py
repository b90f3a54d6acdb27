"""The files of a report, all of which are rendered before any is written, each atomically."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from vlmcompress.evaluation.report import words
from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.evaluation.report.html import report_page
from vlmcompress.evaluation.report.text import markdown
from vlmcompress.evaluation.report.words import printable
from vlmcompress.evaluation.results import FILE, Results, Side, Verdict, load_results
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.folders import dump, is_leftover, save_files

JOURNAL = "answers.jsonl"
"""The journal of answers of `vlmcompress eval` in a report's folder, from which a killed run resumes."""


def write_report(results: Results, folder: str | Path) -> dict[str, Path]:
    """Write a report to `folder`, which is created if missing; older files are replaced atomically.

    Returns:
        kind ("json", "md", "html", "junit") -> file.

    Raises:
        UserError: the folder can't be written.
    """
    findings = Findings(results)
    return save_files(
        folder,
        {
            "json": (FILE, dump(results.to_dict())),
            "md": ("report.md", markdown(findings)),
            "html": ("report.html", report_page(findings)),
            "junit": ("junit.xml", junit(findings)),
        },
    )


def require_replaceable_report(folder: Path, baseline: Side, candidate: Side, *, overwrite: bool) -> None:
    """Refuse a folder that a report on `candidate` against `baseline` must not replace. Call it before any work.

    Args:
        overwrite: a report of other checkpoints may be replaced.

    Raises:
        UserError: the folder has files but is not a report, or has the report of other checkpoints.
    """
    require_marked_folder(folder)
    if overwrite or not (folder / FILE).is_file():
        return
    earlier = load_results(folder)
    if earlier.identity() != [baseline.identity(), candidate.identity()]:
        about = f"{earlier.candidate.name} against {earlier.baseline.name}"
        same_names = (earlier.candidate.name, earlier.baseline.name) == (candidate.name, baseline.name)
        other = f"{about}, of other weights" if same_names else about
        raise UserError(f"output {folder} has the report of {other}; choose another folder or pass --overwrite")


def require_marked_folder(folder: Path, mark: str = FILE) -> None:
    """Raise `UserError` unless `folder` is empty or contains `mark`, the file that identifies our reports.

    A killed run leaves its journal, and what it was writing.
    """
    names = {path.name for path in folder.iterdir() if not is_leftover(path)} if folder.is_dir() else set()
    if names - {JOURNAL} and mark not in names:
        raise UserError(f"output {folder} has no {mark}, so it is not ours to overwrite; choose another folder")


def junit(findings: Findings) -> str:
    """The content of `junit.xml`: verdicts as test cases for CI servers, inconclusive ones as skipped.

    With a gate its rules are the cases. Without one they are the suites, judged by their margin.
    """
    results = findings.results
    groups: list[tuple[str, list[tuple[str, Verdict, str]]]] = [
        (
            s.suite.name,
            [(row.name, row.comparison.verdict, words.verdict_text(row.comparison)) for row in s.rows if row.judged],
        )
        for s in findings.suites
    ]
    if gate := results.gate:
        cases = [
            (rule.name, rule.verdict, f"{rule.value}, limit {rule.limit}" + f": {rule.reason}" * bool(rule.reason))
            for rule in gate.rules
        ]
        groups = [(gate.title, cases)]
    root = ElementTree.Element(
        "testsuites", name=printable(f"{results.candidate.name} against {results.baseline.name}")
    )
    for name, cases in groups:
        group = ElementTree.SubElement(root, "testsuite", name=printable(name), timestamp=results.created[:19])
        for case_name, verdict, message in cases:
            case = ElementTree.SubElement(group, "testcase", classname=printable(name), name=printable(case_name))
            if verdict == "fail":
                ElementTree.SubElement(case, "failure", message=printable(message))
            elif verdict == "inconclusive":
                ElementTree.SubElement(case, "skipped", message=printable(message))
            else:
                ElementTree.SubElement(case, "system-out").text = printable(message)
    for element in (*root, root):
        for count, tag in (("tests", "testcase"), ("failures", "failure"), ("skipped", "skipped")):
            element.set(count, str(len(element.findall(f".//{tag}"))))
        element.set("errors", "0")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
