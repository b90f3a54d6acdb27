"""Drafts in vLLM's first model runner (its CPU build's): four faults are mended, and a head gets what it should of images.

**Slots.** From its second token on vLLM 0.32 writes a drafted token's keys to the slot of its rotary position. A model with
M-RoPE counts an image's positions once a row and column, not once a token, so these slots are those of earlier tokens, and
what attention reads as the last keys was never written (vllm #54498). Here the slot is the one behind the sequence.

**Prompts in pieces.** Where a step ends within a prompt, its last row has the embedding of the token that follows. vLLM 0.32
takes the prompt's last token (`prepare_next_token_ids_padded`), whatever follows.

**n-grams.** numba searches them, and its pool of threads, when it starts, sets OpenMP's number of threads to that of the
machine's cores, whatever `OMP_NUM_THREADS` says. Where one of these is busy, all small products of a CPU wait for it.

**Medusa.** The table of the tokens that its heads can guess becomes a parameter, of which vLLM 0.32's check of what was loaded
knows nothing: "weights were not initialized from checkpoint: {'token_map'}".

**Images** (`checkpoint.draft_images`). The draft's keys lie in the blocks that the target's lie in, so leaving tokens out takes
other lists of blocks, not other blocks. Of an image in tokens `[start, end)` with n rows of which m blocks' worth are to go,

    blocks of the cache       |  text   im|age     |  gone      |  gone      |age    text|
    rows of the draft         |  text   k0|k1 .. k9|                         |k10    text|

the blocks that go lie within the image, so all others hold what the prompt up to their ends decides, as the prefix cache
requires; text stays where it is. The rows that stay are written when the target has seen the whole image. The list of blocks
without those that go is what attention reads, and a sequence is shorter by their tokens. Where the beginning of an image was
found in the prefix cache and its end was not, the rows in its blocks are there already, and those behind them have no hidden
states of its tokens: zeros. Where the step that completes an image has no room for all its rows beside the text, which has the
room of a step's budget, the first ones are not written. The draft then guesses less well, and answers are what they are.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

from vlmcompress.checkpoint import draft_images

RUNNER = "vllm.v1.worker.gpu_model_runner"
NGRAMS = "vllm.v1.spec_decode.ngram_proposer"
MEDUSA = "vllm.model_executor.models.medusa"


def register() -> None:
    """Make vLLM know the drafts that need this plugin, and mend its modules once they are imported."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.transformers_utils.configs.speculators import algos

    algos.SUPPORTED_SPECULATORS_TYPES.setdefault(draft_images.SPECULATOR, _update)
    ModelRegistry.register_model(draft_images.ARCHITECTURE, f"{__package__}._draft_model:{draft_images.ARCHITECTURE}")
    for name, mend in ((RUNNER, _replace), (NGRAMS, _keep_threads), (MEDUSA, _count_table)):
        if module := sys.modules.get(name):
            mend(module)
        elif not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(name, mend))


def _update(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:
    """vLLM's hook on the config of such a draft: EAGLE-3's, our architecture, and the model runner that has our proposer."""
    from vllm.transformers_utils.configs.speculators.algos import update_eagle3

    update_eagle3(config_dict, pre_trained_config)
    pre_trained_config["architectures"] = [draft_images.ARCHITECTURE]
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")


class _Finder(MetaPathFinder):
    """Mends a module when it is imported, which takes seconds and is needed in workers alone."""

    def __init__(self, name: str, mend: Callable[[Any], None]):
        self.name, self.mend = name, mend

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The module's own spec, with a loader that does so."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self.mend(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _replace(module: Any) -> None:
    from vlmcompress.engines.vllm.plugin._draft_proposer import Proposer

    module.EagleProposer = Proposer


def _keep_threads(module: Any) -> None:
    """Start numba's pool now, and set the number of threads back to what it was."""
    import torch

    threads = torch.get_num_threads()
    module.get_num_threads()  # numba's, which starts its pool
    torch._C.set_num_threads(threads)  # in the place of torch.set_num_threads vLLM has put a warning


def _count_table(module: Any) -> None:
    """Count the table of guessable tokens among what was loaded, and have it where the heads are."""
    load = module.Medusa.load_weights

    def load_weights(self: Any, weights: Any) -> set[str]:
        loaded: set[str] = load(self, weights)
        if self.token_map is None:
            return loaded
        self.token_map.data = self.token_map.data.to(self.lm_heads[0].weight.device)
        return loaded | {"token_map"}

    module.Medusa.load_weights = load_weights
