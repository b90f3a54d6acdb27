"""Where things are in the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMOS = ROOT / "eval" / "demo"
DEMO_LLAVA = DEMOS / "demo-llava"
DEMO_QWEN = DEMOS / "demo-qwen"
EMULATION = ROOT / "tests" / "kit" / "emulation"
