"""The tiny checkpoints of all families."""

from tests.kit.families import checkpoint, loaded, pytest_generate_tests, samples  # noqa: F401
