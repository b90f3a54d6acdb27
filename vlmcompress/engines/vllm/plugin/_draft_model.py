"""vLLM's EAGLE-3 head with a vector of the images in a request added to each row (`export.draft_images`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from vlmcompress.export import draft_images
from vlmcompress.utils.errors import UserError


class VlmcompressEagle3LlamaForCausalLM(Eagle3LlamaForCausalLM):
    """The head; `image`, `[rows, hidden]` or None, is added to the rows. Our proposer sets it (`_draft_proposer`)."""

    # vllm/v1/spec_decode/llm_base_proposer.py::SpecDecodeBaseProposer.load_model leaves embeddings out without it.
    supports_multimodal_embeddings = True  # so that vLLM passes embeddings instead of ids

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if vllm_config.use_v2_model_runner:
            raise ValueError(
                "a draft head that sees images its own way runs in vLLM's first model runner; unset VLLM_USE_V2_MODEL_RUNNER"
            )
        try:
            self.images = draft_images.read_draft_images(vars(self.config))
        except UserError as error:
            raise ValueError(str(error)) from None
        self.image: Tensor | None = None
        if self.images.vector:
            width = self.config.hidden_size
            self.model.image_vector = nn.Linear(width, width, bias=False)

    # vllm/v1/spec_decode/llm_base_proposer.py::SpecDecodeBaseProposer.build_model_inputs_first_pass calls it with the images'
    # rows, and every later draft step without them.
    def embed_input_ids(
        self, input_ids: Tensor, multimodal_embeddings: Any = None, is_multimodal: Any = None
    ) -> Tensor:
        """Embeddings `[n, hidden]` of tokens, with placeholders replaced by the images' embeddings."""
        embeds = super().embed_input_ids(input_ids)
        return embeds if self.image is None else embeds + self.image[: len(embeds)]
