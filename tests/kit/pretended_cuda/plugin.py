"""A plugin for pytest: `-p tests.kit.pretended_cuda.plugin` gives its process the device before tests are imported.

Processes that tests fork by `tests/kit/forks.py` have it, too.
"""

import os

from tests.kit import pretended_cuda

os.environ[pretended_cuda.SWITCH] = "1"
pretended_cuda.install()
