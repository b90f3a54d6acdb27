"""vLLM's models with our reducers on the pretended device; `tests/test_pretended_cuda.py` has pytest run this where vLLM is.

There is but vLLM's CPU build. A model is loaded as there, with torch's own products, and then moved to the device as a whole;
it gets what a runner would give it: processed images in main memory. The oracle is the same model before it was moved.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader import get_model
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.plugins import load_general_plugins

from tests.kit import reduced_cases as cases
from tests.kit.pretended_cuda import OTHERS, WAITS, Counts, counting
from tests.kit.vllm_processor import applied
from vlmcompress.models import tile_grid
from vlmcompress.reduction.choice import ReducerChoice, parse_reducer
from vlmcompress.reduction.methods import TokenCounter
from vlmcompress.reduction.support import feature_layers

CUDA = torch.device("cuda", 0)
SETTINGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "limit_mm_per_prompt": {"image": 2},
}
SERVED = [  # in the encoder's layers, from its attention, with states for deeper layers, of tiles
    *(("llava", "dymu"), ("llava", "visionzip:0.5")),
    *(("qwen3-vl", "dart:0.5"), ("internvl", "divprune:0.5")),
]
MORE = [
    *(("internvl", "dymu"), ("llava", "relevance:0.5"), ("llava-next", "divprune:0.5")),
    ("qwen2-5-vl", "learned:0.25"),
    *(("llava-onevision", "coverage:0.5"), ("llava", "vscan:0.5,shallow=1")),
]


def sent(data: Any, device: Any = None, dtype: Any = None, out: Any = None) -> torch.Tensor:
    """What vLLM's function of this name, and of these arguments, does on a GPU."""
    tensor = torch.as_tensor(data, dtype=dtype)
    return tensor.to(device, non_blocking=True) if out is None else out.copy_(tensor, non_blocking=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("served")
    load_general_plugins()
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(VllmConfig()):
        patch.setattr(_custom_ops, "_supports_onednn", False)  # layers then are torch's products, on any device
        for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
            if hasattr(module, "async_tensor_h2d"):  # of which the CPU worker's leaves all where it is
                patch.setattr(module, "async_tensor_h2d", sent)
        init_distributed_environment(1, 0, f"file://{folder}/group", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        yield folder
    cleanup_dist_env_and_memory()


def reducer(text: str, vlm: Any, folder: Path) -> tuple[str | ReducerChoice, TokenCounter | None]:
    """The reducer, and a counter that says a third of the tokens for every picture, where it needs one."""
    if text != "dymu":
        return cases.trained(text, vlm, folder), None
    config = vlm.model.config
    thresholds = [0.9] * feature_layers(config)
    tokens = math.prod(tile_grid(config)) if vlm.spec.images.grid == "tiles" else 16
    counter = TokenCounter(14, (tokens // 3,), (0.0,) * 14, (0.0,) * 14, (1.0,) * 14, 0.0)
    return parse_reducer(f"dymu:thresholds={thresholds}"), counter


class Model:
    """vLLM's model of a reduced checkpoint, and a prompt about two images."""

    def __init__(self, family: str, text: str, folder: Path):
        source = cases.tiny(family, folder / "source")
        vlm = cases.loaded(source)
        checkpoint = cases.reduced(source, folder / "reduced", *reducer(text, vlm, folder))
        config = EngineArgs(model=str(checkpoint), **SETTINGS).create_engine_config()
        rotary_embedding._ROPE_DICT.clear()  # or it has the tables of a model that was moved
        with set_current_vllm_config(config):
            self.model: Any = get_model(vllm_config=config)
        processor = MULTIMODAL_REGISTRY.create_processor(config.model_config)
        turns = [cases.turn(cases.noise(0, 84, 84, True), "what is it?", cases.noise(1, 196, 112, True))]
        images = [part["image"] for part in turns[0]["content"] if part["type"] == "image"]
        prompt = vlm.processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        ids = processor.info.get_tokenizer().encode(prompt, add_special_tokens=False)
        out = applied(processor, ids, {"image": images})
        self.items = [("image", item) for item in out["mm_kwargs"]["image"]]
        self.ids = torch.tensor(out["prompt_token_ids"])
        self.visual = torch.zeros(len(self.ids), dtype=torch.bool)  # the runner has it in main memory
        for place in out["mm_placeholders"]["image"]:
            self.visual[place.offset : place.offset + place.length] = True if place.is_embed is None else place.is_embed

    @torch.inference_mode()
    def run(self, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, Counts]:
        """Rows of the images, the prompt's embeddings and places, and what happened on the device."""
        rows: list[torch.Tensor] = []
        ids = self.ids.to(device)
        with counting() as counts:
            for _, _, kwargs in group_and_batch_mm_kwargs(self.items, device=device):
                rows += self.model.embed_multimodal(**kwargs)
            embeds = self.model.embed_input_ids(ids, rows, is_multimodal=self.visual)
        return rows, embeds, self.model._places[:, : len(ids)].clone(), counts


@pytest.mark.parametrize(("family", "text"), [*SERVED, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)])
def test_served(family, text, folder, tmp_path):
    """Rows, places and embeddings are the CPU's, and nothing of ours waits for the device."""
    served = Model(family, text, tmp_path)
    expected = served.run(torch.device("cpu"))
    served.model.to(CUDA)
    served.model._places = served.model._places.to(CUDA)  # vLLM makes a model with its device as the default
    served.run(CUDA)  # tables are sent once
    rows, embeds, places, counts = served.run(CUDA)
    for ours, theirs in zip([*rows, embeds], [*expected[0], expected[1]], strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=5e-3)
    assert torch.equal(places.cpu(), expected[2]) and places.any()
    assert not [place for place in counts.places if place[0] in WAITS and OTHERS not in place[2]], counts.places
