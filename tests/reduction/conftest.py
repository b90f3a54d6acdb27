"""The tiny checkpoints of all families."""

from tests.kit.families import checkpoint, loaded  # noqa: F401
