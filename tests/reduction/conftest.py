"""Models of families as fixtures."""

from tests.kit.families import checkpoint  # noqa: F401
