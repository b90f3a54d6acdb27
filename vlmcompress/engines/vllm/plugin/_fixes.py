"""Fixes for bugs of vLLM 0.32 and 0.33, each applied when the affected module is imported.

**EAGLE drafts** in the first model runner: see `_draft_proposer`.

**n-grams.** numba searches them, and when its thread pool starts it sets OpenMP's number of threads to the number of cores,
ignoring `OMP_NUM_THREADS`. If a core is busy, all small products on the CPU then wait for it.

**LLaVA-OneVision's videos.** If the videos of a step have different numbers of frames, their rows are `[1, n, d]`, and the
engine fails: "Expected multimodal embeddings to be a sequence of 2D tensors".

**EXAONE 4.5's images.** Its class inherits that pixels are normalized in the model, and builds a tower that does not: it sees
raw pixels.

**RoPE of LFM2 on CPUs.** LFM2 gives queries and keys as `[tokens, heads, width]`. The kernel of the CPU build takes heads for
tokens, reads positions beyond the last, and answers are wrong.

**Bad images.** A data: address without base64 is answered with status 501, a local file and an image of over 179 megapixels
with 500, after which the server closes a connection that a proxy may share among clients: 400 here.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

from vlmcompress.engines.vllm.plugin._contract import left_out

NGRAMS = "vllm.v1.spec_decode.ngram_proposer"
MODELS = "vllm.model_executor.models"
ROPE = "vllm.model_executor.layers.rotary_embedding.base"
_patched: set[str] = set()  # modules that are patched now or on import


def register() -> None:
    """Apply all fixes. May be called any number of times."""
    when_imported("vllm.v1.worker.gpu_model_runner", _replace_proposer, "EAGLE drafts in the first model runner")
    when_imported(NGRAMS, _keep_threads, "the number of threads after n-grams")
    when_imported(f"{MODELS}.llava_onevision", _flatten_videos, "LLaVA-OneVision's videos of different lengths")
    when_imported(f"{MODELS}.exaone4_5", _normalize_images, "EXAONE 4.5's images")
    when_imported(ROPE, _join_heads, "RoPE of LFM2 on CPUs")
    when_imported("vllm.multimodal.media.connector", _blame_clients, "bad images of requests")


def when_imported(name: str, fix: Callable[[Any], None], part: str) -> None:
    """Call `fix` once with a module, now or when it is imported, as importing takes seconds and only workers need it.

    `part`: its part of `_contract`; if that is broken, `fix` is not called.
    """
    if name in _patched:
        return
    _patched.add(name)

    def unless_broken(module: Any) -> None:
        if not left_out(part):
            fix(module)

    if module := sys.modules.get(name):
        unless_broken(module)
    else:
        # vllm/plugins/__init__.py::load_general_plugins runs in each process before its runner and models are imported.
        sys.meta_path.insert(0, _Finder(name, unless_broken))


class _Finder(MetaPathFinder):
    """Import hook that calls `fix` after a module is imported."""

    def __init__(self, name: str, fix: Callable[[Any], None]):
        self.name, self.fix = name, fix

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The module's spec, with a loader that then calls `fix`."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self.fix(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _replace_proposer(module: Any) -> None:
    from vlmcompress.engines.vllm.plugin._draft_proposer import Proposer

    # vllm/v1/worker/gpu_model_runner.py::GPUModelRunner creates it by this name of its module. Can go with that runner.
    module.EagleProposer = Proposer


def _keep_threads(module: Any) -> None:
    """Start numba's thread pool now, and restore the number of threads."""
    import torch

    threads = torch.get_num_threads()
    # vllm/v1/spec_decode/ngram_proposer.py imports it from numba. Can go when vLLM or numba preserve torch's threads.
    module.get_num_threads()  # numba's, which starts its pool
    torch._C.set_num_threads(threads)  # in the place of torch.set_num_threads vLLM has put a warning


def _flatten_videos(module: Any) -> None:
    model = module.LlavaOnevisionForConditionalGeneration
    # vllm/model_executor/models/llava_onevision.py::LlavaOnevisionForConditionalGeneration._process_video_pixels reshapes to
    # `(1, n, d)` in its list. Goes when it returns rows `[n, d]`.
    process = model._process_video_pixels
    model._process_video_pixels = lambda self, inputs: [rows.flatten(0, -2) for rows in process(self, inputs)]


def _join_heads(module: Any) -> None:
    rope = module.RotaryEmbedding
    rotate = rope.forward_cpu

    # csrc/cpu/pos_encoding.cpp::rotary_embedding computes the number of heads from the last axis, and that of tokens from all
    # others. Goes when it takes heads in an axis of their own, as the CUDA kernel does (vllm PR 12777).
    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        if query.dim() <= positions.dim() + 1:
            return rotate(self, positions, query, key)
        rows = [part if part is None else part.flatten(-2) for part in (query, key)]
        rotated = rotate(self, positions, *rows)
        return tuple(
            each if each is None else each.view(part.shape) for each, part in zip(rotated, (query, key), strict=True)
        )

    rope.forward_cpu = forward_cpu


def _blame_clients(module: Any) -> None:
    """Raise vLLM's error for bad requests where it cannot load an image."""
    from PIL import Image
    from vllm.exceptions import VLLMValidationError

    def blaming(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(*arguments: Any) -> Any:
            try:
                return load(*arguments)
            except (RuntimeError, Image.DecompressionBombError) as error:  # NotImplementedError, too
                raise VLLMValidationError(str(error)) from error

        return loaded

    # vllm/multimodal/media/connector.py::MediaConnector raises these for addresses, and does not catch Pillow's.
    module.MediaConnector._load_data_url = blaming(module.MediaConnector._load_data_url)
    module.MediaConnector._load_file_url = blaming(module.MediaConnector._load_file_url)
    module.ImageMediaIO.load_bytes = blaming(module.ImageMediaIO.load_bytes)


def _normalize_images(module: Any) -> None:
    from vllm.model_executor.layers.fusion.mm_input_norm import build_mm_input_norm

    model = module.Exaone4_5_ForConditionalGeneration
    construct = model.__init__

    # vllm/model_executor/models/exaone4_5.py builds its tower without `input_norm`, unlike qwen2_5_vl.py. Goes when it does.
    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        construct(self, vllm_config=vllm_config, prefix=prefix)
        self.visual.input_norm = build_mm_input_norm(vllm_config.model_config)

    model.__init__ = __init__
