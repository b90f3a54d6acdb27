"""Entry point of `python -m vlmcompress`: the same command line as `vlmcompress`."""

import sys

from vlmcompress.cli import main

sys.exit(main())
