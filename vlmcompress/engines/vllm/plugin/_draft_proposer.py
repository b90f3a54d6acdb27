"""vLLM's proposer of EAGLE drafts in its first model runner (also its CPU build's), with two bugs fixed.

vLLM has announced the removal of that runner (#56899); 0.33 still has it, and this can go with it.

**Slots.** From the second drafted token on vLLM writes a token's keys to the slot of its rotary position. With M-RoPE an
image's positions advance per row and column, not per token, so these are slots of earlier tokens, and the slots that attention
reads as the last keys were never written (vllm #54498). Here the slot is the one after the sequence.

**Chunked prompts.** If a step ends within a prompt, its last row needs the embedding of the next prompt token. vLLM always
uses the prompt's last token (`prepare_next_token_ids_padded`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer


class Proposer(EagleProposer):
    """The proposer, with the fixes above."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner=runner)
        self.runner = runner

    # Fixes vllm/v1/spec_decode/llm_base_proposer.py::SpecDecodeBaseProposer.prepare_next_token_ids_padded, whose backup token
    # is the prompt's last. Can go when it uses the next token after the computed ones.
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
        """Fill the buffers as vLLM does; the last row of a prompt that this step does not finish gets the prompt's next
        token."""
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
        for name, first, stop in zip(names, starts[:-1], starts[1:], strict=True):
            request = self.runner.requests[name]
            # The runner adds a step's tokens to the computed ones only afterwards, so this is the position after this step.
            end = request.num_computed_tokens + stop - first
            if end < request.num_prompt_tokens:
                self.input_ids[stop - 1] = request.get_token_id(end)
        return count, sampled, cad

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
        if not self.vllm_config.model_config.uses_mrope:
            return update(positions, common_attn_metadata, batch_size, input_batch_size, block_size)
        following = (positions + 1).clamp(max=self.max_model_len - 1)
        last = (common_attn_metadata.seq_lens[:batch_size] - 1).to(positions.dtype)
        rows = last.expand(positions.shape) if self.uses_mrope else last
        update(rows, common_attn_metadata, batch_size, input_batch_size, block_size)
        buffer = self._get_positions(batch_size)
        buffer.copy_(following)
        return buffer
