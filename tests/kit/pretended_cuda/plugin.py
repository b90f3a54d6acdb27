"""A plugin for pytest: `-p tests.kit.pretended_cuda.plugin` gives its process the device before tests are imported."""

from tests.kit import pretended_cuda

DEVICE = pretended_cuda.install()
