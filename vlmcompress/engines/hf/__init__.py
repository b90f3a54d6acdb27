"""transformers' `generate` as an engine: slow, but the reference, and without need of vLLM."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from vlmcompress.engines.hf.worker import IN_FLIGHT
from vlmcompress.engines.local import Local

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ENGINE = Local(
    name="hf",
    title="transformers",
    module=Path(__file__).with_name("worker.py"),
    interpreter=lambda: sys.executable,
    environment=lambda: {**ENVIRONMENT, **os.environ},
    advice="pip install vlmcompress there again",
    batch=IN_FLIGHT,
)
