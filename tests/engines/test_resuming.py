"""A request that was preempted when its image came from the prefix cache, and whose image is in no cache any more."""

from __future__ import annotations

import pytest
import torch

from tests.kit import reduced_cases as cases
from tests.kit.engine import asked
from tests.kit.places import DEMO_LLAVA

TOKENS = 130
QUESTION = "what is it " * 6
# The answers of two requests fill the blocks that one of them may have, and a step has room for one image.
TIGHT = {
    "enable_prefix_caching": True,
    "block_size": 32,
    "num_gpu_blocks_override": 9,
    "max_model_len": 256,
    "max_num_batched_tokens": 40,
    "max_num_seqs": 2,
    "disable_log_stats": False,
}
ROOMY = {"enable_prefix_caching": False, "max_model_len": 512}


@pytest.mark.engine
def test_a_preempted_request_encodes_its_image_again(tmp_path):
    """Oracle: the same engine with room for all. Without a reducer vLLM 0.32 ends; once it does not, `_resuming.py` can go."""
    source = DEMO_LLAVA
    vlm = cases.loaded(source)
    reduced = cases.reduced(source, tmp_path / "model", "divprune:0.5")
    turns = [[cases.turn(cases.noise(seed, 96, 96), QUESTION)] for seed in range(2)]
    requests = [cases.request(vlm, each, tmp_path / "images") for each in turns]
    common = {"passes": 1, "max_tokens": TOKENS, "requests": requests, "ignore_eos": True}
    settings = ((reduced, TIGHT), (reduced, ROOMY), (source, TIGHT | {"max_num_batched_tokens": 64}))
    jobs = [common | {"folder": str(folder), "settings": each} for folder, each in settings]
    tight, roomy, unreduced = asked("reduced", jobs)
    assert "error" not in tight, tight["error"]
    assert tight["preemptions"] > 0
    assert tight["together"][1]["cached"] > 0
    assert [answer["tokens"] for answer in tight["together"]] == [answer["tokens"] for answer in roomy["together"]]
    assert "Encoder cache miss" in unreduced["error"]


class Encoder(torch.nn.Module):
    """Says which device its arguments are on."""

    def __init__(self, device: str):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, device=device))

    def embed_multimodal(self, **kwargs) -> dict[str, str]:
        return {name: (value[0] if isinstance(value, list) else value).device.type for name, value in kwargs.items()}


@pytest.mark.parametrize("pixels", [torch.zeros(2, 3), [torch.zeros(3), torch.zeros(4)]])
def test_the_model_fetches_pixels_and_nothing_else(pixels):
    from vlmcompress.engines.vllm.plugin._loading import ResumableModel

    class Model(ResumableModel, Encoder):
        pass

    embeddings = Model("meta").embed_multimodal(pixel_values=pixels, image_grid_thw=torch.ones(2, 3))
    assert embeddings == {"pixel_values": "meta", "image_grid_thw": "cpu"}
