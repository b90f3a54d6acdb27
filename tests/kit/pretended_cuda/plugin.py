"""A plugin for pytest: `pytest -n 0 -p tests.kit.pretended_cuda.plugin` runs tests in a process that has the pretended device."""

from tests.kit import pretended_cuda

DEVICE = pretended_cuda.install()
