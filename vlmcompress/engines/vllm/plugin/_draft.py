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

**Images** (`export.draft_images`). With `all` each row of an image gets the image's feature in place of the embedding of
the next token, with the hidden state of the same token, as in training. The vector of a request's images so far is added to
each of its rows; those of images in the prefix cache are kept from when they were encoded.
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
