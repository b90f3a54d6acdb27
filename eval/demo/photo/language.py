"""demo-photo's tokenizer, which knows the names of the pictures, and its language model, which begins as demo-llava's."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from eval.demo.text import FORMATS, build_tokenizer
from eval.photo.pictures import Album
from eval.photo.questions import ask_several
from eval.photo.scene import sample_scene
from eval.photo.vocab import FAMILIES

DONOR = Path(__file__).parents[1] / "demo-llava"
FORM = FORMATS["llava"]
VOCABULARY, PADDED = 1024, 128  # tokens at most; the model has a multiple of so many
SCENES = 2500  # whose questions the tokenizer is trained on


def tokenizer_of(album: Album) -> PreTrainedTokenizerFast:
    """The tokenizer: every word of the questions is one token."""
    return build_tokenizer("llava", _lines(album), VOCABULARY)


def _lines(album: Album) -> Iterator[str]:
    rng = Random(11)
    yield from (FORM.before, FORM.between, f"{FORM.between.strip()} ") * 400
    for _ in range(SCENES):
        scene = sample_scene(rng, "train", album)
        for family in FAMILIES:
            for text in (text for turn in ask_several(rng, scene, family, album.names, 2) for text in turn):
                yield from (text, f" {text}")


def config_of(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """demo-llava's, with rows for this tokenizer's tokens, and some to spare."""
    config = LlavaConfig.from_pretrained(DONOR).text_config
    config.vocab_size = -(-len(tokenizer) // PADDED) * PADDED
    return config


@torch.no_grad()
def begin(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """demo-llava's language model in float32 with tables for `tokenizer`: words that demo-llava knows keep their rows, the
    others have random ones of the same size, and answer as they are asked for."""
    donor = LlavaForConditionalGeneration.from_pretrained(DONOR, dtype=torch.float32)
    model = LlamaForCausalLM(config_of(tokenizer)).float()
    layers = {name: value for name, value in donor.model.language_model.state_dict().items() if "embed" not in name}
    model.model.load_state_dict(layers, strict=False)
    theirs = PreTrainedTokenizerFast.from_pretrained(DONOR).get_vocab()
    pairs = [(index, theirs[token]) for token, index in tokenizer.get_vocab().items() if token in theirs]
    kept, sources = (torch.tensor(column) for column in zip(*pairs, strict=True))
    table, head = model.get_input_embeddings().weight, model.lm_head.weight
    old_table, old_head = donor.get_input_embeddings().weight[sources], donor.lm_head.weight[sources]
    table.normal_(std=float(old_table.std()))
    head.copy_(table * float(old_head.std() / table.std()))
    table[kept], head[kept] = old_table, old_head
    return model
