"""Drafts in vLLM's first model runner (also its CPU build's): two bugs are fixed, and a head gets its own image tokens.

vLLM has announced the removal of that runner (#56899); 0.33 still has it. The second runner (`v1/worker/gpu/spec_decode`) has
no hook for this: `TargetDependentARSpeculator.propose` uses the target's attention metadata, block tables and recorded graphs
for the draft's first pass. The draft would need its own, and the request of each row. That runner passes image features to a
head itself, with the hidden state of the token before (`gather_mm_embeddings(draft_lookahead=1)`), while `_draft_proposer`
pairs features and hidden state of the same token, as in training.

**Slots.** From the second drafted token on vLLM writes a token's keys to the slot of its rotary position. With M-RoPE an
image's positions advance per row and column, not per token, so these are slots of earlier tokens, and the slots that attention
reads as the last keys were never written (vllm #54498). Here the slot is the one after the sequence.

**Chunked prompts.** If a step ends within a prompt, its last row needs the embedding of the next prompt token. vLLM always
uses the prompt's last token (`prepare_next_token_ids_padded`).

**Images** (`export.draft_images`). The draft's keys are in the same blocks as the target's, so leaving out tokens takes
different block tables, not different blocks. For an image in tokens `[start, end)` with n rows, of which m blocks' worth are
dropped,

    blocks of the cache       |  text   im|age     |  gone      |  gone      |age    text|
    rows of the draft         |  text   k0|k1 .. k9|                         |k10    text|

the dropped blocks lie within the image, so the content of all others depends only on the prompt up to their ends, as the
prefix cache requires; text stays in place. The remaining rows are written once the target has seen the whole image. Attention
reads the block table without the dropped blocks, and the sequence is shorter by their tokens. If only the beginning of an
image was in the prefix cache, the rows in its cached blocks already exist, and hidden states of those tokens are missing for
later rows: zeros are used. If the step that completes an image has no room for all its rows next to the text (which takes up
the step's budget), the first ones are not written. The draft's guesses are then worse; answers do not change.
"""

from __future__ import annotations

import os
from typing import Any

from vlmcompress.engines.vllm.plugin._contract import left_out
from vlmcompress.engines.vllm.plugin._fixes import when_imported
from vlmcompress.export import draft_images

RUNNER = "vllm.v1.worker.gpu_model_runner"
PART = "drafts that see images, and fixed EAGLE drafts"


def register() -> None:
    """Register the drafts that need this plugin in vLLM, and patch its model runner once it is imported."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.transformers_utils.configs.speculators.algos import register_speculator

    if left_out(PART):
        return
    # vllm/transformers_utils/config.py::maybe_override_with_speculators converts a draft's config with this registry.
    register_speculator(draft_images.SPECULATOR)(_update)
    ModelRegistry.register_model(draft_images.ARCHITECTURE, f"{__package__}._draft_model:{draft_images.ARCHITECTURE}")
    when_imported(RUNNER, _replace)


def _update(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:
    """vLLM's hook on the config of such a draft: set EAGLE-3's values, our architecture, and the runner with our proposer."""
    from vllm.transformers_utils.configs.speculators.algos import update_eagle3

    update_eagle3(config_dict, pre_trained_config)
    pre_trained_config["architectures"] = [draft_images.ARCHITECTURE]
    # vllm/config/vllm.py::VllmConfig.use_v2_model_runner; a draft's config cannot choose the runner in another way.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")


def _replace(module: Any) -> None:
    from vlmcompress.engines.vllm.plugin._draft_proposer import Proposer

    # vllm/v1/worker/gpu_model_runner.py::GPUModelRunner creates it by this name of its module. Can go with that runner.
    module.EagleProposer = Proposer
