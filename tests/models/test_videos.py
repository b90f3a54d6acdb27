"""The families that take videos, as docs/models.md lists them."""

from __future__ import annotations

import inspect
import json
import re
import subprocess

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES as PROCESSORS

from tests.kit.places import ROOT
from vlmcompress.engines.vllm import environment, interpreter
from vlmcompress.models import all_specs

WORKER = """
import inspect, json, sys, typing
from vllm import ModelRegistry
def limits(name):
    info = ModelRegistry._try_load_model_cls(name)._processor_factory.info
    if inspect.isfunction(info):  # which chooses among classes
        info = typing.get_type_hints(info)["return"]
    return inspect.getsource(info.get_supported_mm_limits)
print(json.dumps([name for name in json.loads(sys.argv[1]) if '"video"' in limits(name)]))
"""
PUBLISHED = {"glm_ocr": "Glm46VProcessor"}  # what processor_config.json names where transformers has none for the type


@pytest.fixture(scope="module")
def types():
    """Model types of the families that take videos in both engines, according to the page."""
    page = (ROOT / "docs/models.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| [^|]+ \| [^|]+ \| yes \| ", page, re.MULTILINE)
    return {name for spec in all_specs() if spec.family in rows for name in spec.model_types}


def test_limits_are_those_of_transformers(types):
    kinds = {
        name: getattr(transformers, PUBLISHED.get(name) or PROCESSORS[name])
        for spec in all_specs()
        for name in spec.model_types
    }
    takes = {name for name, kind in kinds.items() if "video_processor" in inspect.signature(kind).parameters}
    assert takes == types | {"smolvlm"}


@pytest.mark.slow
def test_frame_counts_are_those_of_vllm(types):
    """Oracle: the limits of inputs that vLLM's class of the architecture counts."""
    names = {CLASSES[name]: name for spec in all_specs() for name in spec.model_types}
    command = [interpreter(), "-c", WORKER, json.dumps(list(names))]
    printed = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True).stdout
    assert {names[name] for name in json.loads(printed.splitlines()[-1])} == types
