"""Render `junit.xml`, verdicts as test cases for CI servers. An inconclusive one is a skipped case.

With a gate its rules are the cases. Without one they are the suites, judged by their margin.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from vlmcompress.report import findings
from vlmcompress.report.words import printable
from vlmcompress.results import Results, Verdict


def junit(results: Results) -> str:
    """Render the text of `junit.xml`."""
    root = ElementTree.Element(
        "testsuites", name=printable(f"{results.candidate.name} against {results.baseline.name}")
    )
    for suite, cases in _groups(results):
        group = ElementTree.SubElement(root, "testsuite", name=printable(suite), timestamp=results.created[:19])
        for name, verdict, message in cases:
            case = ElementTree.SubElement(group, "testcase", classname=printable(suite), name=printable(name))
            if verdict == "fail":
                ElementTree.SubElement(case, "failure", message=printable(message))
            elif verdict == "inconclusive":
                ElementTree.SubElement(case, "skipped", message=printable(message))
            else:
                ElementTree.SubElement(case, "system-out").text = printable(message)
        _count(group, group)
    _count(root, root)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _groups(results: Results) -> Iterator[tuple[str, list[tuple[str, Verdict, str]]]]:
    if gate := results.gate:
        cases = [
            (rule.name, rule.verdict, f"{rule.value}, limit {rule.limit}" + f": {rule.reason}" * bool(rule.reason))
            for rule in gate.rules
        ]
        yield f"gate {gate.name}", cases
        return
    for suite in results.suites:
        judged = [row for row in findings.rows(suite, None) if row.judged]
        yield suite.name, [(row.name, row.found.verdict, findings.verdict(row.found)) for row in judged]


def _count(into: ElementTree.Element, within: ElementTree.Element) -> None:
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("skipped", "skipped")):
        into.set(name, str(len(within.findall(f".//{tag}"))))
    into.set("errors", "0")
