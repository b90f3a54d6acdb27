"""vLLM's own processor of a reduced checkpoint, without an engine: counts, names of images in caches, refused prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import tiny
from tests.kit.places import DEMO_LLAVA, ROOT
from tests.kit.reduced_cases import reduced

pytestmark = pytest.mark.engine
REDUCERS = {"half": "dart:0.5", "quarter": "dart:0.25", "asks": "relevance:0.5"}
FILMED = ("internvl", "short", "llava-onevision")
ROOM = 256
SCRIPT = """
import json, sys
import numpy as np
from PIL import Image
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import get_mm_max_toks_per_item
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.plugins import load_general_plugins

load_general_plugins()
image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (144, 144, 3), dtype=np.uint8))

def ask(processor, text, images=1, **arguments):
    tokenizer = processor.info.get_tokenizer()
    items = processor.info.parse_mm_data({"image": arguments.pop("embeds", [image] * images)})
    prompt = tokenizer.encode("<image>" * images + text, add_special_tokens=False)
    try:
        out = processor.apply(ProcessorInputs(prompt, items, hf_processor_mm_kwargs=arguments), TimingContext(enabled=False))
    except ValueError as error:
        return {"error": str(error)}
    return {"prompt": len(out["prompt_token_ids"]) - len(prompt), "name": out["mm_hashes"]["image"][0]}

def largest(folder, room, counts={"image": 1, "video": 1}):
    processor = MULTIMODAL_REGISTRY.create_processor(ModelConfig(folder, max_model_len=room))
    info, size = processor.info, processor.info.get_image_size_with_most_features()
    prompt = info.get_tokenizer().encode(info.get_hf_processor().image_token + "<video>", add_special_tokens=False)
    def tokens(frames):
        media = {"image": Image.new("RGB", tuple(size)), "video": np.zeros((frames, 64, 64, 3), np.uint8)}
        try:
            out = processor.apply(ProcessorInputs(prompt, info.parse_mm_data(media)), TimingContext(enabled=False))
        except ValueError as error:
            return str(error)
        return len(out["prompt_token_ids"])
    frames, most = info.get_num_frames_with_most_features(room, counts), get_mm_max_toks_per_item(processor, counts, None)
    return {"frames": frames, "video": most["video"], "tokens": tokens(frames), "more": tokens(frames + 1)}

found = {"films": {name: largest(folder, int(sys.argv[4])) for name, folder in json.loads(sys.argv[3]).items()}}
for name, folder in json.loads(sys.argv[1]).items():
    config = ModelConfig(folder, limit_mm_per_prompt={"image": 40}, enable_mm_embeds=True, max_model_len=1024)
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    found[name] = {
        "plain": ask(processor, "what is red ?"),
        "again": ask(processor, "what is red ?"),
        "other": ask(processor, "how many ?"),
        "query": ask(processor, "how many ?", query="what is red ?"),
        "long": ask(processor, "what ?", images=30),
    }
    import torch
    found[name]["embeds"] = ask(processor, "what ?", embeds=torch.zeros(1, 81, 256))
config = ModelConfig(sys.argv[2], limit_mm_per_prompt={"image": 1}, max_model_len=1024)
info = MULTIMODAL_REGISTRY.create_processor(config).info
tokens = lambda width, height: info.get_num_image_tokens(image_width=width, image_height=height)
found["tiles"] = {
    "largest": tokens(*info.get_image_size_with_most_features()),
    "all": max(tokens(width, height) for width in range(1, 400, 5) for height in range(1, 400, 5)),
    "first": tokens(1153, 944),
}
print("FOUND " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """Of each checkpoint what its processor makes of the script's prompts."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("reduced")
    folders = {name: str(reduced(DEMO_LLAVA, folder / name, text)) for name, text in REDUCERS.items()}
    films = {name: str(filmed(name, folder / name)) for name in FILMED}
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "HF_HUB_OFFLINE": "1"}
    tiles = reduced(onevision(folder / "onevision"), folder / "tiles", "dart:0.1")
    command = [sys.executable, "-c", SCRIPT, json.dumps(folders), str(tiles), json.dumps(films), str(ROOM)]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    lines = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, run.stderr[-3000:]
    return json.loads(lines[0].removeprefix("FOUND "))


def filmed(name: str, folder: Path) -> Path:
    """A family that takes videos; "short": one that knows no more positions than a prompt may have tokens."""
    source = tiny.build("internvl" if name == "short" else name, folder / "full")
    config = json.loads((source / "config.json").read_text())
    if name == "short":
        config["text_config"]["max_position_embeddings"] = ROOM
    (source / "config.json").write_text(json.dumps(config))
    return reduced(source, folder / "model", "uniform:0.5")


def onevision(folder: Path) -> Path:
    """LLaVA-OneVision with canvases of up to 6 x 6 tiles, as in the published ones."""
    tiny.build("llava-onevision", folder)
    canvases = [[56 * rows, 56 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    for name, part in (("config.json", None), ("processor_config.json", "image_processor")):
        config = json.loads((folder / name).read_text())
        (config[part] if part else config)["image_grid_pinpoints"] = canvases
        (folder / name).write_text(json.dumps(config))
    return folder


def test_no_image_has_more_tokens_than_the_one_that_memory_is_kept_for(found):
    """Of a tall image all the newlines are left; the largest square has fewer."""
    assert found["tiles"]["largest"] >= found["tiles"]["all"] > found["tiles"]["first"]


def test_counts_are_exact(found):
    """81 tokens, rounded half up, where one placeholder stood."""
    assert found["half"]["plain"]["prompt"] == 41 - 1
    assert found["quarter"]["plain"]["prompt"] == 20 - 1


def test_an_image_has_another_name_with_another_reducer(found):
    assert len({found[name]["plain"]["name"] for name in REDUCERS}) == 3
    assert found["half"]["plain"]["name"] == found["half"]["again"]["name"] == found["half"]["other"]["name"]


def test_an_image_has_another_name_with_another_question_where_the_method_asks(found):
    asks = found["asks"]
    assert asks["plain"]["name"] == asks["again"]["name"] == asks["query"]["name"]
    assert asks["plain"]["name"] != asks["other"]["name"]


def test_a_question_for_a_method_that_does_not_ask_is_refused(found):
    assert "does not look at the question" in found["half"]["query"]["error"]


def test_a_prompt_beyond_the_positions_of_the_model_is_refused(found):
    """30 images of 81 tokens are more than 2,048, though the 41 that are kept of each are fewer."""
    assert "the prompt ends at position 2434," in found["half"]["long"]["error"]


def test_embeddings_of_images_are_refused(found):
    assert "send images, not embeddings" in found["half"]["embeds"]["error"]


def test_memory_is_measured_with_the_largest_video_that_fits(found):
    """Beside the largest image; vLLM takes no more than 16 frames of LLaVA-OneVision's for that."""
    films = found["films"]
    assert films["internvl"]["tokens"] <= ROOM < films["internvl"]["more"]
    assert films["short"]["tokens"] <= ROOM
    assert f"counted before images and videos are reduced, and the model knows {ROOM}" in films["short"]["more"]
    assert (films["llava-onevision"]["frames"], films["llava-onevision"]["video"]) == (16, 16 * 4 // 2 + 1)
