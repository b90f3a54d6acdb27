"""vLLM's proposer of EAGLE drafts, with fixed slots and prompts, and with a draft's own rows for images (`_draft`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
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


@dataclass
class Rows:
    """Rows of an image: embeddings and hidden states `[k, d]`, positions, and the token of the sequence at which each is
    stored."""

    embeds: Tensor
    hidden: Tensor
    positions: Tensor
    places: Tensor

    def last(self, count: int) -> Rows:
        """The last `count` rows; keys of earlier ones in the cache do not change."""
        cut = len(self.embeds) - count
        return Rows(*(value[cut:] for value in (self.embeds, self.hidden, self.positions, self.places)))


@dataclass
class Part:
    """A request's part of a step.

    Attributes:
        pieces: ranges of the target's rows in this step and rows of images, in order.
        short: number of tokens by which the sequence is shorter for the draft.
        dropped_blocks: blocks of the cache that the draft does not read, as first and number.
    """

    pieces: list[range | Rows] = field(default_factory=list)
    short: int = 0
    dropped_blocks: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Unfinished:
    """The target's results so far for an image of n tokens: hidden states `[n, d]` and positions `[n]`, zero if missing.

    `first` is the first computed token: earlier ones are in the prefix cache.
    """

    states: Tensor
    positions: Tensor
    first: int


class Proposer(EagleProposer):
    """The proposer; see `_draft`."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner=runner)
        self.runner = runner
        self.model: Any
        config = self.draft_model_config.hf_config
        sees_images = draft_images.ARCHITECTURE in (getattr(config, "architectures", None) or ())
        self.images = draft_images.read_draft_images(vars(config) if sees_images else {})
        self._unfinished: dict[tuple[str, int], Unfinished] = {}  # (request id, image's first token) -> state
        # an image's key -> its vector, number of tokens
        self._vectors: OrderedDict[str, tuple[Tensor, int]] = OrderedDict()
        self._lists: tuple[Any, Tensor] = None, torch.empty(0)
        self._images_rows: list[tuple[int, Rows]] = []  # images of this step, with the row at which each begins
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
        """Fill the buffers as vLLM does, then replace images' rows by the draft's own."""
        # vllm/v1/spec_decode/llm_base_proposer.py::SpecDecodeBaseProposer.set_inputs_first_pass shifts ids by one and fills
        # `input_ids`, `positions` and `hidden_states`, which are rearranged below.
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
        parts = [self._part(name, starts[n], starts[n + 1], cad, n) for n, name in enumerate(names)]
        self._images_rows = []
        if any(part.short or len(part.pieces) != 1 or isinstance(part.pieces[0], Rows) for part in parts):
            count, sampled, cad = self._laid_out(parts, starts, sampled, cad)
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

    def _part(self, name: str, first: int, stop: int, cad: CommonAttentionMetadata, number: int) -> Part:
        """The part of request `number` in this step, whose target rows are `[first, stop)`."""
        request = self.runner.requests[name]
        begin = at = request.num_computed_tokens
        end, part = begin + stop - first, Part()
        for image in prompt_images(request.mm_features):
            if image.start >= end:
                break
            dropped = self.images.dropped_blocks(image.start, image.end, self.block_size)
            if image.end <= begin:
                part.short += dropped * self.block_size
                part.dropped_blocks += [(image.end // self.block_size - dropped, dropped)] if dropped else []
                continue
            inside = range(max(image.start, begin), min(image.end, end))
            if self.images.vector:
                self._note_vector(image)  # the whole image is encoded, even if this step ends within it
            if self.images.rows == "hidden":
                continue
            if image.start > at:
                part.pieces.append(range(first + at - begin, first + image.start - begin))
            rows = range(first + inside.start - begin, first + inside.stop - begin)
            if not dropped:
                part.pieces.append(self._whole(image, inside, rows))
            elif image.end <= end:
                part.pieces.append(self._reduced(name, image, inside, rows, dropped))
                part.short += dropped * self.block_size
                part.dropped_blocks.append((image.end // self.block_size - dropped, dropped))
            else:
                self._note(name, image, inside, rows)
                part.short += end - image.start
            at = inside.stop
        if at < end:
            part.pieces.append(range(first + at - begin, stop))
        if not part.pieces:  # the step ends within an image: an unused row
            part.pieces.append(range(stop - 1, stop))
            part.short -= 1
        return part

    def _whole(self, image: PromptImage, inside: range, rows: range) -> Rows:
        """All rows of an image in this step, at their original places."""
        features = self._features(image)[inside.start - image.start : inside.stop - image.start]
        window = slice(rows.start, rows.stop)
        places = torch.arange(inside.start, inside.stop)
        return Rows(
            features, self.hidden_states[window].clone(), self._get_positions(rows.stop)[..., window].clone(), places
        )

    def _note(self, name: str, image: PromptImage, inside: range, rows: range) -> Unfinished:
        """Store this step's results of an image whose rows are written once it is complete; returns the results so far."""
        key, count = (name, image.start), image.end - image.start
        if key not in self._unfinished:
            alive = self.runner.requests
            self._unfinished = {other: value for other, value in self._unfinished.items() if other[0] in alive}
            states, positions = self.hidden_states.new_zeros(count, self.hidden_size), self.positions.new_zeros(count)
            self._unfinished[key] = Unfinished(states, positions, inside.start)
        noted = self._unfinished[key]
        window, part = slice(rows.start, rows.stop), slice(inside.start - image.start, inside.stop - image.start)
        noted.states[part], noted.positions[part] = self.hidden_states[window], self.positions[window]
        noted.first = min(noted.first, inside.start)
        return noted

    def _reduced(self, name: str, image: PromptImage, inside: range, rows: range, dropped: int) -> Rows:
        """The remaining rows of an image that this step completes, without those in the prefix cache."""
        noted = self._note(name, image, inside, rows)
        del self._unfinished[name, image.start]
        features, block = self._features(image), self.block_size
        left = len(features) - dropped * block
        if not left:
            return Rows(features[:0], noted.states[:0], noted.positions[:0], torch.arange(0))
        reduction = self.images.reduction(features, left)
        places = torch.arange(image.start, image.start + left)
        places[places >= (image.end // block - dropped) * block] += dropped * block
        positions = noted.positions[reduction.anchor]
        every = Rows(reduction.apply(features), reduction.apply(noted.states), positions, places)
        return every.last(int((places >= noted.first).sum()))

    def _features(self, image: PromptImage) -> Tensor:
        """The rows `[n, hidden]` that the target's decoder got, without further channels of the encoder's output."""
        # vllm/v1/worker/gpu_model_runner.py::GPUModelRunner.encoder_cache holds an image as long as a request needs it for the
        # target.
        encoded = self.runner.encoder_cache.get(image.name)
        if encoded is None:  # not observed so far; only the draft's guesses would suffer
            return self.hidden_states.new_zeros(image.end - image.start, self.hidden_size)
        return encoded[:, : self.hidden_size].to(self.dtype)

    def _laid_out(
        self, parts: Sequence[Part], starts: Sequence[int], sampled: Tensor, cad: CommonAttentionMetadata
    ) -> tuple[int, Tensor, CommonAttentionMetadata]:
        """Put the rows of all parts into the buffers; returns their number, the rows to sample from, and the metadata."""
        spare = self.max_num_tokens - sum(len(p) for part in parts for p in part.pieces if isinstance(p, range))
        source, target, ends, slots, total = list[int](), list[int](), [0], list[Tensor](), 0
        for number, part in enumerate(parts):
            for piece in part.pieces:
                if isinstance(piece, range):
                    source += piece
                    target += range(total, total + len(piece))
                    total += len(piece)
                    continue
                piece = piece.last(min(len(piece.embeds), spare))  # rows without room in this step are not written
                spare -= len(piece.embeds)
                self._images_rows.append((total, piece))
                blocks, places = cad.block_table_tensor[number], piece.places.to(self.device)
                slots.append(blocks[places // self.block_size] * self.block_size + places % self.block_size)
                total += len(piece.embeds)
            ends.append(total)
        source_rows, put = torch.tensor(source).to(self.device), torch.tensor(target).to(self.device)
        # Slots in the cache: text rows keep theirs, those of image rows are computed from their places.
        slot_mapping = cad.slot_mapping.new_empty(total)
        slot_mapping[put] = cad.slot_mapping[source_rows]
        ids, positions, hidden = (
            self.input_ids[source_rows],
            self.positions[source_rows],
            self.hidden_states[source_rows],
        )
        self.input_ids[:total] = 0
        self.input_ids[put], self.positions[put], self.hidden_states[put] = ids, positions, hidden
        for (begin, rows), own_slots in zip(self._images_rows, slots, strict=True):
            window = slice(begin, begin + len(rows.embeds))
            self.positions[window], self.hidden_states[window] = rows.positions, rows.hidden
            slot_mapping[window] = own_slots
        loc = torch.tensor(ends, dtype=cad.query_start_loc_cpu.dtype)
        # Each request's last row moves by the number of rows added to or removed from it and earlier requests.
        moved = torch.tensor([after - before for after, before in zip(ends[1:], starts[1:], strict=True)])
        short = torch.tensor([part.short for part in parts], dtype=torch.int32)
        upper = cad.seq_lens_cpu_upper_bound
        changed = cad.replace(
            query_start_loc=loc.to(self.device),
            query_start_loc_cpu=loc,
            # The draft's sequence is shorter by the dropped image tokens.
            seq_lens=cad.seq_lens - short.to(self.device),
            seq_lens_cpu_upper_bound=None if upper is None else upper - short,
            num_actual_tokens=total,
            max_query_len=int(loc.diff().max()),
            block_table_tensor=self._listed(parts, cad.block_table_tensor),
            slot_mapping=slot_mapping,
            # vllm/v1/attention/backend.py::CommonAttentionMetadata computes these from the fields above on first access.
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
        return total, sampled + moved.to(sampled), changed

    def _listed(self, parts: Sequence[Part], blocks: Tensor) -> Tensor:
        """The block tables `[requests, n]` without dropped blocks."""
        key = blocks.shape, tuple(tuple(part.dropped_blocks) for part in parts)
        if self._lists[0] != key:
            columns = np.tile(np.arange(blocks.shape[1]), (len(parts), 1))
            for row, part in zip(columns, parts, strict=True):
                kept = np.delete(row, [first + n for first, count in part.dropped_blocks for n in range(count)])
                row[: len(kept)] = kept
            self._lists = key, torch.from_numpy(columns).to(self.device)
        # A new tensor: the runner's own block table belongs to the target.
        return blocks.gather(1, self._lists[1])

    def build_model_inputs_first_pass(
        self, num_tokens: int, num_input_tokens: int, mm_embed_inputs: Any
    ) -> tuple[dict[str, Any], int]:
        """vLLM's inputs with the images' rows and vectors inserted."""
        if self.images.plain:
            return super().build_model_inputs_first_pass(num_tokens, num_input_tokens, mm_embed_inputs)
        image = self._set_image(None)
        inputs, size = super().build_model_inputs_first_pass(num_tokens, num_input_tokens, None)
        for begin, rows in self._images_rows:
            self.inputs_embeds[begin : begin + len(rows.embeds)] = rows.embeds
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
