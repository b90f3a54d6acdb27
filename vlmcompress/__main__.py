"""`python -m vlmcompress`."""

import sys

from vlmcompress.cli import main

sys.exit(main())
