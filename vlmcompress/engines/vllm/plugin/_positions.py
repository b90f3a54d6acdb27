"""Give kept tokens their unreduced positions, with any caching and chunking of prompts.

The kept tokens of an image are known only after its encoder has run, but vLLM needs positions earlier. So positions have two
parts that are added just before the language model runs: `get_mrope_input_positions` gives every kept token the first position
of its image, and gives text after it the position after the full grid, from which generation continues; the encoder's output
has each row's place within its image in additional channels, which are removed again. This also works for cached encoder
outputs, for chunks that split an image, and for images in the prefix cache.

vLLM's own hook for this (`recompute_mrope_positions`, for pruned videos) is never called by the CPU runner and does not see
embeddings of cached images. vLLM's models pass deepstack features from `embed_input_ids` to `forward` in the same way as here.

Families with plain RoPE run through vLLM's M-RoPE path with three equal rows of positions; their RoPE tables are lengthened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from vlmcompress.engines.vllm.plugin._loading import ResumableModel, sent
from vlmcompress.engines.vllm.plugin._served_reducer import KEEP, UNITS, ServedReducer

# vllm/v1/worker/gpu_model_runner.py::GPUModelRunner._init_mrope_positions and v1/worker/gpu/mm/rope.py::RopeState keep three
# rows of positions per request.
DIMS = 3
DIGITS = 3
CHANNELS = DIMS * DIGITS
BASE = 256  # digits up to 255 are exact in bfloat16, which rounds 257 to 256
LIMIT = BASE**DIGITS


def pack(rows: Tensor, places: Tensor, most: int | None = None) -> Tensor:
    """Append `places [k, 3]`, whole numbers from 0 to 2^24 - 1, to `rows [k, d]` in nine channels, exact in every dtype.

    `most`: an upper bound of all places; None: it is computed, which synchronizes with the device.
    """
    if most is None and len(places):
        most = LIMIT if int(places.min()) < 0 else int(places.max())
    if most is not None and most >= LIMIT:
        raise ValueError(
            f"a token's place within its image is beyond {LIMIT - 1:,}; use smaller images or shorter videos"
        )
    # [k, 3 coordinates, 3 digits]; vLLM casts the whole encoder output to the model's dtype.
    digits = torch.stack([places // BASE**power % BASE for power in range(DIGITS)], -1).flatten(1)
    return torch.cat([rows, digits.to(rows)], 1)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Split the result of `pack` into rows and places."""
    digits = packed[:, -CHANNELS:].long().unflatten(1, (DIMS, DIGITS)).unbind(-1)
    return packed[:, :-CHANNELS], sum(digit * BASE**power for power, digit in enumerate(digits))


class OriginalPositions(ResumableModel):
    """Mixin put before one of vLLM's M-RoPE models; the encoder output must be `pack`ed, and the text config have M-RoPE."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        reducer = ServedReducer.of(vllm_config.model_config.hf_config)
        _require_settings(vllm_config, reducer)
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.reducer = reducer
        config = vllm_config.model_config.hf_config
        # vllm/v1/spec_decode/llm_base_proposer.py::SpecDecodeBaseProposer.load_model reads a draft's placeholder id under this
        # name, except for architectures in a list, which does not include ours. Can go when vLLM reads `image_token_id` first.
        if not hasattr(config, "image_token_index"):  # the name under which vLLM reads a draft's placeholder id
            config.image_token_index = config.image_token_id
        # vllm/v1/worker/gpu_model_runner.py::GPUModelRunner makes `mrope_positions` of max_num_batched_tokens + 1 columns.
        # Allocated once, as a CUDA graph replays fixed addresses. As wide as the runner's own.
        tokens = vllm_config.scheduler_config.max_num_batched_tokens + 1
        self._places: Tensor = torch.zeros(DIMS, tokens, dtype=torch.int64)
        self._positions: Tensor = torch.zeros_like(self._places)

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """Encode as the model does, and store what requests set for the images or videos being encoded."""
        self._keeps = {modality: kwargs.pop(f"{modality}_{KEEP}", None) for modality in ("image", "video")}
        self._units = kwargs.pop(UNITS, None)
        return super().embed_multimodal(**kwargs)

    def decided(self, rows: Tensor) -> dict[str, Tensor]:
        """The field `kept` of the next tokens `rows [n, d]` to be reduced, where the processor decided which of them stay."""
        if self._units is None:
            return {}
        stays, self._units = self._units[: len(rows)], self._units[len(rows) :]
        return {"kept": sent(stays.nonzero().squeeze(1), rows.device)}

    def reducer_of(self, modality: str, number: int, tokens: int) -> ServedReducer:
        """The reducer of one of the images or videos being encoded, which has `tokens` tokens."""
        keeps = self._keeps[modality]
        return self.reducer if keeps is None else self.reducer.keeping(float(keeps[number]), tokens)

    def span(self, feature: Any) -> tuple[np.ndarray, int]:
        """Positions `[3, length]` of the tokens `feature.mm_position` of an image, without the places of the rows that
        the reducer keeps, which are known only after the encoder and added by `forward`.

        Positions are relative to the image's first one. The second result is the position of the text after the image.
        """
        raise NotImplementedError

    # vllm/v1/worker/gpu_model_runner.py::GPUModelRunner._init_mrope_positions calls this once per request, before any encoder
    # has run: hence positions in two parts. Can go when vLLM calls it again after the encoder on every runner.
    def get_mrope_input_positions(self, input_tokens: Sequence[int], mm_features: Sequence[Any]) -> tuple[Tensor, int]:
        """Positions `[3, len(input_tokens)]` of a prompt, and the number to add to the index of a generated token."""
        parts, done, base = [], 0, 0
        for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset):
            text = feature.mm_position.offset - done
            # The extent is always that of the whole grid, max(t, h, w), as in transformers' `get_rope_index`.
            places, extent = self.span(feature)
            # Text continues after the image before it; all tokens of an image have its first position here.
            parts += [_text(text, base), places + base + text]
            base += text + extent
            done += text + feature.mm_position.length
        rest = len(input_tokens) - done
        parts.append(_text(rest, base))
        return torch.from_numpy(np.concatenate(parts, 1)), base + rest - len(input_tokens)

    # vllm/v1/worker/gpu_model_runner.py::GPUModelRunner._gather_mm_embeddings takes each row range of the step from the cached
    # encoder output, of any width: places stay with their rows like deepstack's channels in Qwen3-VL.
    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: Tensor | None = None,
    ) -> Tensor:
        """Embed as the model does, without the channels of places, which are stored for `forward`."""
        self._places.zero_()
        pairs = [unpack(packed) for packed in multimodal_embeddings or ()]
        rows = [rows for rows, _ in pairs]
        embeds = super().embed_input_ids(input_ids, rows, is_multimodal=is_multimodal)  # type: ignore[misc]
        if pairs:
            assert is_multimodal is not None
            columns = sent(is_multimodal.cpu().nonzero().squeeze(1), self._places.device)
            self._places[:, columns] = torch.cat([places for _, places in pairs]).T
        return embeds

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model with the places of this step's tokens added to `positions [3, s]`."""
        tokens = positions.shape[-1]
        # Into a fixed buffer, as a CUDA graph replays recorded addresses.
        whole = torch.add(positions, self._places[:, :tokens], out=self._positions[:, :tokens])
        return super().forward(input_ids, whole, intermediate_tensors, inputs_embeds, **kwargs)  # type: ignore[misc]


def _text(tokens: int, start: int) -> np.ndarray:
    return np.broadcast_to(np.arange(start, start + tokens), (DIMS, tokens))


def _require_settings(config: Any, reducer: ServedReducer) -> None:
    """Raise ValueError for settings under which the model would run without the tokens' places."""
    from vllm.platforms import current_platform

    speculative = config.speculative_config
    text_config = config.model_config.hf_config.get_text_config()
    recurrent = "linear_attention" in (getattr(text_config, "layer_types", None) or ())  # Gated DeltaNets
    for wrong, text in (
        # Later stages get no embeddings, so they have no places.
        (config.parallel_config.pipeline_parallel_size > 1, "pipeline parallelism; use tensor parallelism"),
        # vllm/v1/worker/gpu_model_runner.py::GPUModelRunner with microbatches runs two forwards after one `embed_input_ids`.
        (config.parallel_config.use_ubatching, "microbatches; leave out --enable-dbo"),
        # vllm/multimodal/video_prune/evs.py::recompute_mrope_positions would overwrite the positions of kept tokens.
        (config.model_config.multimodal_config.is_multimodal_pruning_enabled(), "--video-pruning-rate; leave it out"),
        (
            speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix", "eagle3"),
            "speculative decoding by a draft model; use a head that `vlmcompress draft` trains, or the method ngram",
        ),
        (
            # vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py::_spec_forward assumes that every step has the maximum
            # number of drafts when it locates a sequence's last inputs. N-grams and suffixes may propose fewer: the engine
            # then fails with mismatching tensors, or reads wrong inputs. Can go when it uses a step's actual number of drafts.
            speculative is not None and recurrent and current_platform.is_cpu(),
            "speculative decoding on vLLM's CPU build where states are recurrent, which it then gets wrong, without a reducer, "
            "too; leave out --speculative-config",
        ),
        (
            # In this mode each device encodes different images, but the merger has one list of reductions.
            config.model_config.multimodal_config.mm_encoder_tp_mode == "data" and reducer.merges,
            "--mm-encoder-tp-mode data where tokens merge within the encoder; leave it out",
        ),
    ):
        if wrong:
            raise ValueError(f"a checkpoint that carries a reducer of visual tokens does not go with {text}")


class PlainRope:
    """Mixin put before one of vLLM's models with plain RoPE; earlier mixins provide three equal rows of positions."""

    # vllm/model_executor/models/interfaces.py::SupportsMRoPE is recognized by this attribute; with `mrope_section` in the
    # config (`_loading`) the runner then allocates three rows of positions.
    supports_mrope = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        make_room(self.get_language_model(), vllm_config.model_config)  # type: ignore[attr-defined]

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model with the first row of `positions [3, s]`."""
        return super().forward(input_ids, positions[0], intermediate_tensors, inputs_embeds, **kwargs)  # type: ignore[misc]


def make_room(language_model: nn.Module, config: Any) -> None:
    """Lengthen RoPE's tables to the last possible position: the longest prompt plus the longest answer.

    Does nothing for a server that only encodes and has no language model. Raises ValueError for a model without RoPE.
    """
    if config.multimodal_config.mm_encoder_only:
        return
    needed = longest_prompt(config) + config.max_model_len
    ropes = [module for module in language_model.modules() if isinstance(module, RotaryEmbeddingBase)]
    if not ropes:
        raise ValueError("the language model does not use RoPE, so kept tokens cannot keep their positions")
    # vllm/model_executor/layers/rotary_embedding/base.py::RotaryEmbeddingBase creates a table of at most
    # `max_position_embeddings` rows; positions of kept tokens exceed it.
    for rope in ropes:  # usually one, shared by all layers
        if len(rope.cos_sin_cache) < needed:
            rope.cos_sin_cache = lengthened(rope._compute_cos_sin_cache(), needed).to(rope.cos_sin_cache)


def longest_prompt(config: Any) -> int:
    """The most tokens of a prompt before reduction: the number of positions of the language model."""
    return max(config.max_model_len, getattr(config.hf_text_config, "max_position_embeddings", 0))


def lengthened(table: Tensor, rows: int) -> Tensor:
    """Lengthen `table [n, 2 h]`, whose row p holds the cosines, then the sines, of p times h angles, to `[rows, 2 h]`.

    Row p + n follows from rows p and n by the sums of angles; all are multiples of one scale, which scaled RoPE may have.
    """
    # Each doubling amplifies rounding errors; in float64 the result is still accurate to float32 after ten of them.
    wide = table.double()
    scale = wide[0, : table.shape[1] // 2]  # cosines of 0
    while len(wide) < rows:
        cos, sin = wide.chunk(2, 1)
        c, s = cos[1] / scale, sin[1] / scale
        far_cos, far_sin = cos[-1] * c - sin[-1] * s, sin[-1] * c + cos[-1] * s  # of position len(wide)
        c, s = far_cos / scale, far_sin / scale
        wide = torch.cat([wide, torch.cat([cos * c - sin * s, sin * c + cos * s], 1)])
    return torch.cat([table, wide[len(table) : rows].to(table)])
