"""Drafts in vLLM's first model runner (its CPU build's): two faults are fixed, and a head gets what it should of images.

vLLM has announced that runner's end (#56899); 0.33 still has it. The second one (`v1/worker/gpu/spec_decode`) has no hook for
what is done here: `TargetDependentARSpeculator.propose` takes the target's attention metadata, lists of blocks and recorded
graphs for the draft's first pass. It would need its own of all three, and which request each row is of. The features of images
it hands to a head by itself, with the hidden state of the token before (`gather_mm_embeddings(draft_lookahead=1)`), where
`_draft_proposer` gives both of one token, as they were trained.

**Slots.** From its second token on vLLM writes a drafted token's keys to the slot of its rotary position. A model with
M-RoPE counts an image's positions once a row and column, not once a token, so these slots are those of earlier tokens, and
what attention reads as the last keys was never written (vllm #54498). Here the slot is the one after the sequence.

**Prompts in pieces.** Where a step ends within a prompt, its last row has the embedding of the token that follows. vLLM
takes the prompt's last token (`prepare_next_token_ids_padded`), whatever follows.

**Images** (`export.draft_images`). The draft's keys lie in the blocks that the target's lie in, so leaving tokens out takes
other lists of blocks, not other blocks. Of an image in tokens `[start, end)` with n rows of which m blocks' worth are to go,

    blocks of the cache       |  text   im|age     |  gone      |  gone      |age    text|
    rows of the draft         |  text   k0|k1 .. k9|                         |k10    text|

the blocks that go lie within the image, so all others hold what the prompt up to their ends decides, as the prefix cache
requires; text stays where it is. The rows that stay are written when the target has seen the whole image. The list of blocks
without those that go is what attention reads, and a sequence is shorter by their tokens. Where the beginning of an image was
found in the prefix cache and its end was not, the rows in its blocks are there already, and those after them have no hidden
states of its tokens: zeros. Where the step that completes an image has no room for all its rows next to the text, which has the
room of a step's budget, the first ones are not written. The draft then guesses less well, and answers are what they are.
"""

from __future__ import annotations

import os
from typing import Any

from vlmcompress.engines.vllm.plugin._contract import left_out
from vlmcompress.engines.vllm.plugin._mended import when_imported
from vlmcompress.export import draft_images

RUNNER = "vllm.v1.worker.gpu_model_runner"
PART = "drafts that see images, and fixed EAGLE drafts"


def register() -> None:
    """Make vLLM know the drafts that need this plugin, and mend its model runner once it is imported."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.transformers_utils.configs.speculators.algos import register_speculator

    if left_out(PART):
        return
    # vllm/transformers_utils/config.py::maybe_override_with_speculators reads a draft's config by this registry.
    register_speculator(draft_images.SPECULATOR)(_update)
    ModelRegistry.register_model(draft_images.ARCHITECTURE, f"{__package__}._draft_model:{draft_images.ARCHITECTURE}")
    when_imported(RUNNER, _replace)


def _update(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:
    """vLLM's hook on the config of such a draft: EAGLE-3's, our architecture, and the model runner that has our proposer."""
    from vllm.transformers_utils.configs.speculators.algos import update_eagle3

    update_eagle3(config_dict, pre_trained_config)
    pre_trained_config["architectures"] = [draft_images.ARCHITECTURE]
    # vllm/config/vllm.py::VllmConfig.use_v2_model_runner; no config of a draft can choose the runner otherwise.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")


def _replace(module: Any) -> None:
    from vlmcompress.engines.vllm.plugin._draft_proposer import Proposer

    # vllm/v1/worker/gpu_model_runner.py::GPUModelRunner makes it by this name of its module. Goes with that runner.
    module.EagleProposer = Proposer
