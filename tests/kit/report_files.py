"""The files of a report, and a reader of HTML that is strict."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "img", "br", "wbr"}

NAMES = {"results.json", "report.md", "report.html", "junit.xml"}


class Balanced(HTMLParser):
    """Fails on tags that are not closed in order; keeps what it saw."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.reduced_units: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.reduced_units.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.reduced_units if name == tag]
