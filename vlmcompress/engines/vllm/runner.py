"""Get answers from vLLM, which runs in a process of its own.

run = answer(model_folder, requests, media=folder_of_images)
run.answers["sample-1"].text
"""

from __future__ import annotations

from pathlib import Path

from vlmcompress.common.progress import Progress
from vlmcompress.engines import Answer, Request, Run, Settings
from vlmcompress.engines.local import Local
from vlmcompress.engines.vllm import PYTHON_VARIABLE, environment, interpreter

ADVICE = f"install vlmcompress[serve] (GPU) or [serve-cpu] there, or point {PYTHON_VARIABLE} to a Python that has it"
ENGINE = Local(
    name="vllm",
    title="vLLM",
    module=Path(__file__).with_name("worker.py"),
    interpreter=interpreter,
    environment=lambda: environment(VLLM_LOGGING_LEVEL="WARNING", VLLM_ENABLE_V1_MULTIPROCESSING="0"),
    advice=ADVICE,
)
answer = ENGINE.answer

__all__ = ["ENGINE", "Answer", "Progress", "Request", "Run", "Settings", "answer"]
