"""The tiny checkpoints of all families."""

from tests.kit.families import checkpoint, pytest_generate_tests, quantized, samples  # noqa: F401
