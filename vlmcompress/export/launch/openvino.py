"""OpenVINO GenAI's `VLMPipeline`, as a Python script that asks a question about images, for checkpoints written as OpenVINO.

Its arguments are those of `openvino_genai` 2026.4, in which our tests run the script.
"""

from __future__ import annotations

from collections.abc import Mapping

from vlmcompress.export.readers import LoadFacts

ENGINE, GPUS = "openvino", False
TITLE = "OpenVINO GenAI"
CHECKED = "run by our tests in openvino_genai 2026.4 on a CPU"
FILE = "ask_openvino.py"  # not openvino.py, which the script itself would import
SCRIPT = '''"""{name} in OpenVINO: python serve/{file} "What is shown?" IMAGE ...

Written by vlmcompress; edit it freely. MODEL and DEVICE (CPU, GPU) may be set in the environment.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from PIL import Image

os.environ.setdefault("VISION_PREPROCESS", "CPP")  # images scaled as transformers scales them
model = Path(os.environ.get("MODEL", Path(__file__).parents[1]))
question, *paths = sys.argv[1:]
images = [openvino.Tensor(np.array(Image.open(path).convert("RGB"))[None]) for path in paths]
settings = json.loads((model / "generation_config.json").read_text())
pruning = {{name: settings[name] for name in ("pruning_ratio", "relevance_weight") if name in settings}}
pipeline = openvino_genai.VLMPipeline(model, os.environ.get("DEVICE", "CPU"))
answer = pipeline.generate(question, images=images, max_new_tokens=256, do_sample=False, **pruning)
print(answer.texts[0])
'''


def files(facts: LoadFacts) -> Mapping[str, str]:
    """`ask_openvino.py`."""
    return {FILE: SCRIPT.format(name=facts.name, file=FILE)}


def command(facts: LoadFacts) -> str:
    """The line that starts it, from the checkpoint's folder."""
    return f'python serve/{FILE} "What is shown?" IMAGE'
