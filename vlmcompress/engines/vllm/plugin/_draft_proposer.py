"""vLLM's proposer of EAGLE drafts, with fixed slots and prompts, and with images as a draft sees them (`_draft`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from vlmcompress.export import draft_images

KEPT = 4096
"""Number of images whose vectors are cached, for requests that find them in the prefix cache."""


@dataclass(frozen=True)
class PromptImage:
    """An image of a request: its tokens `[start, end)` in the sequence, and its key in the cache of encoded images."""

    start: int
    end: int
    name: str


def prompt_images(features: Sequence[Any]) -> list[PromptImage]:
    """A request's images and videos with contiguous tokens, in order."""
    places = [(feature.mm_position, feature.identifier) for feature in features if feature.modality != "audio"]
    images = [PromptImage(p.offset, p.offset + p.length, name) for p, name in places if p.is_embed is None]
    return sorted(images, key=lambda image: image.start)


class Proposer(EagleProposer):
    """The proposer; see `_draft`."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner=runner)
        self.runner = runner
        self.model: Any
        config = self.draft_model_config.hf_config
        sees_images = draft_images.ARCHITECTURE in (getattr(config, "architectures", None) or ())
        self.images = draft_images.read_draft_images(vars(config) if sees_images else {})
        # an image's key -> its vector, number of tokens
        self._vectors: OrderedDict[str, tuple[Tensor, int]] = OrderedDict()
        self._image_rows: list[tuple[slice, Tensor]] = []  # rows of images in this step, with their features
        self._owners: Tensor = torch.empty(0)  # index of the request of each row of this step

    def set_inputs_first_pass(
        self,
        target_token_ids: Tensor,
        next_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        token_indices_to_sample: Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: Tensor | None,
    ) -> tuple[int, Tensor, CommonAttentionMetadata]:
        """Fill the buffers as vLLM does, and note which rows are of images."""
        # vllm/v1/spec_decode/llm_base_proposer.py::SpecDecodeBaseProposer.set_inputs_first_pass shifts ids by one and fills
        # `input_ids`, `positions` and `hidden_states`.
        count, sampled, cad = super().set_inputs_first_pass(
            target_token_ids=target_token_ids,
            next_token_ids=next_token_ids,
            target_positions=target_positions,
            target_hidden_states=target_hidden_states,
            token_indices_to_sample=token_indices_to_sample,
            cad=cad,
            num_rejected_tokens_gpu=num_rejected_tokens_gpu,
        )
        starts: list[int] = cad.query_start_loc_cpu.tolist()
        names = self.runner.input_batch.req_ids[: len(starts) - 1]
        self._continue_prompts(names, starts)
        if self.images.plain:
            return count, sampled, cad
        parts = zip(names, starts[:-1], starts[1:], strict=True)
        self._image_rows = [piece for name, first, stop in parts for piece in self._pieces(name, first, stop)]
        if self.images.vector:
            lengths = cad.query_start_loc_cpu.diff()
            self._owners = torch.repeat_interleave(torch.arange(len(names)), lengths).to(self.device)
            self._set_image(torch.stack([self._vector(name) for name in names]))
        return count, sampled, cad

    # Fixes vllm/v1/spec_decode/llm_base_proposer.py::SpecDecodeBaseProposer.prepare_next_token_ids_padded, whose backup token
    # is the prompt's last. Can go when it uses the next token after the computed ones.
    def _continue_prompts(self, names: Sequence[str], starts: Sequence[int]) -> None:
        """For prompts that this step does not finish, give the last row the next token of the prompt."""
        for name, first, stop in zip(names, starts[:-1], starts[1:], strict=True):
            request = self.runner.requests[name]
            # The runner adds a step's tokens to the computed ones only afterwards, so this is the position after this step.
            end = request.num_computed_tokens + stop - first
            if end < request.num_prompt_tokens:
                self.input_ids[stop - 1] = request.get_token_id(end)

    def _pieces(self, name: str, first: int, stop: int) -> Iterator[tuple[slice, Tensor]]:
        """The rows of images among a request's rows `[first, stop)` of this step, with the features that they show."""
        request = self.runner.requests[name]
        begin = request.num_computed_tokens
        for image in prompt_images(request.mm_features):
            start, end = max(image.start, begin), min(image.end, begin + stop - first)
            if start >= end:
                continue
            if self.images.vector:
                self._note_vector(image)  # the whole image is encoded, even if this step ends within it
            if self.images.rows == "all":
                features = self._features(image)[start - image.start : end - image.start]
                yield slice(first + start - begin, first + end - begin), features

    def _features(self, image: PromptImage) -> Tensor:
        """The rows `[n, hidden]` that the target's decoder got, without further channels of the encoder's output."""
        # vllm/v1/worker/gpu_model_runner.py::GPUModelRunner.encoder_cache holds an image as long as a request needs it for the
        # target.
        encoded = self.runner.encoder_cache.get(image.name)
        if encoded is None:  # not observed so far; only the draft's guesses would suffer
            return self.hidden_states.new_zeros(image.end - image.start, self.hidden_size)
        return encoded[:, : self.hidden_size].to(self.dtype)

    def build_model_inputs_first_pass(
        self, num_tokens: int, num_input_tokens: int, mm_embed_inputs: Any
    ) -> tuple[dict[str, Any], int]:
        """vLLM's inputs with the images' features and vectors."""
        if self.images.plain:
            return super().build_model_inputs_first_pass(num_tokens, num_input_tokens, mm_embed_inputs)
        image = self._set_image(None)
        inputs, size = super().build_model_inputs_first_pass(num_tokens, num_input_tokens, None)
        for rows, features in self._image_rows:
            self.inputs_embeds[rows] = features
        if image is not None:
            self.inputs_embeds[:num_tokens] += image[self._owners]
            self._set_image(image)
        return inputs, size

    def _set_image(self, image: Tensor | None) -> Tensor | None:
        """Set the tensor that the model adds to embeddings, and return the previous one."""
        before, self.model.image = self.model.image, image
        return before

    def _note_vector(self, image: PromptImage) -> None:
        """Cache the vector of an encoded image."""
        features = self._features(image)
        mean = draft_images.mean_feature(features).to(self.dtype)
        self._vectors[image.name] = self.model.model.image_vector(mean), len(features)
        self._vectors.move_to_end(image.name)
        if len(self._vectors) > KEPT:
            self._vectors.popitem(last=False)

    def _vector(self, name: str) -> Tensor:
        """The vector `[hidden]` of a request's images so far; zero if there is none."""
        images = prompt_images(self.runner.requests[name].mm_features)
        vectors = [self._vectors[image.name] for image in images if image.name in self._vectors]
        if not vectors:
            return self.hidden_states.new_zeros(self.hidden_size)
        total = sum(count for _, count in vectors)
        return torch.stack([vector * (count / total) for vector, count in vectors]).sum(0)

    def _update_positions_dependent_metadata(
        self,
        positions: Tensor,
        common_attn_metadata: CommonAttentionMetadata,
        batch_size: int,
        input_batch_size: int,
        block_size: int,
    ) -> Tensor:
        """Positions and slots of the next drafted token: the slot after the sequence, independent of its position."""
        # Fixes vllm/v1/spec_decode/llm_base_proposer.py::SpecDecodeBaseProposer._update_positions_dependent_metadata, which
        # derives the slot from the position (vllm #54498). Can go when it uses `seq_lens`.
        update = super()._update_positions_dependent_metadata
        if self.images.plain and not self.vllm_config.model_config.uses_mrope:
            return update(positions, common_attn_metadata, batch_size, input_batch_size, block_size)
        following = (positions + 1).clamp(max=self.max_model_len - 1)
        last = (common_attn_metadata.seq_lens[:batch_size] - 1).to(positions.dtype)
        rows = last.expand(positions.shape) if self.uses_mrope else last
        update(rows, common_attn_metadata, batch_size, input_batch_size, block_size)
        buffer = self._get_positions(batch_size)
        buffer.copy_(following)
        return buffer
