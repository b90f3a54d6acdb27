"""English prose that every machine with the environment has: what the authors of installed packages wrote about them.

The texts are paragraphs of docstrings, those of a module joined up to some 1,200 characters. Packages, not paragraphs, are
split: what is measured on comes from other authors than what was calibrated on or learned. Code is read, never imported.

    paragraphs("validation")    list of str, the same order on every machine with the same versions of the packages
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random

PACKAGES = {  # all are pinned in scripts/requirements
    "train": ("scipy", "sympy"),
    "calibration": ("sklearn",),
    "validation": ("nltk", "pandas"),
    "test": ("networkx", "numpy"),
}
LONGEST = 1200  # characters of a text
SHORTEST = 300
WORDS = 25  # least number of words of a paragraph
_MARKUP = re.compile(
    r":\w+:`~?\.?([^`<]+?)(?:\s*<[^>]*>)?`|``([^`]+)``|`([^`]+?)(?:\s*<[^>]*>)?`_*|\*\*?(\w[^*]*)\*\*?"
)
_PLAIN = re.compile(r"[A-Za-z ,.;:'\"()?!-]")


@cache
def paragraphs(split: str) -> list[str]:
    """Return the texts of a split, shuffled with a fixed seed.

    Raises:
        KeyError: there is no such split.
        ModuleNotFoundError: a package of the split is not installed.
    """
    texts = [text for package in PACKAGES[split] for path in _sources(package) for text in _texts(path)]
    unique = sorted(set(texts))
    Random(split).shuffle(unique)
    return unique


def halves(text: str) -> tuple[str, str]:
    """What asks and what answers where a text has to be a conversation: its first sentence, and the rest; neither is empty."""
    first, _, rest = text.partition(". ")
    return f"{first.rstrip('.')}.", rest or first


def _sources(package: str) -> list[Path]:
    """The package's Python files but its tests', sorted."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"package {package} is not installed; scripts/setup installs it")
    folder = Path(spec.origin).parent
    return sorted(path for path in folder.rglob("*.py") if not {"tests", "test", "_vendor"} & set(path.parts))


def _texts(path: Path) -> Iterator[str]:
    """The prose of one file, in pieces of up to ``LONGEST`` characters."""
    piece = ""
    for paragraph in _prose(path):
        if len(piece) + len(paragraph) > LONGEST and len(piece) >= SHORTEST:
            yield piece
            piece = ""
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph
    if SHORTEST <= len(piece) <= 2 * LONGEST:
        yield piece


def _prose(path: Path) -> Iterator[str]:
    """Paragraphs of a file's docstrings that are sentences, with markup and line breaks taken out, each once."""
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError):
        return
    paragraphs = set()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        for block in re.split(r"\n\s*\n", (ast.get_docstring(node) or "") if isinstance(node, kinds) else ""):
            text = " ".join(_MARKUP.sub(lambda m: next(g for g in m.groups() if g), block).split())
            if _sentences(text) and text not in paragraphs:
                paragraphs.add(text)
                yield text


def _sentences(text: str) -> bool:
    """Whether a paragraph is English sentences, not a list, a formula or a signature."""
    if len(text.split()) < WORDS or not text[0].isupper() or text[-1] not in ".!?" or ">>>" in text or "http" in text:
        return False
    return len(_PLAIN.findall(text)) > 0.97 * len(text) and not any(mark in text for mark in ("--", "::", "\\"))
