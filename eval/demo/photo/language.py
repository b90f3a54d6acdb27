"""demo-photo's tokenizer, which knows the names of the pictures, and the config of its language model, demo-llava's."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

from transformers import LlamaConfig, LlavaConfig, PreTrainedTokenizerFast

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
