"""Tiny SmolVLM: the tiny Idefics3 with a tied head and SmolVLM's own processor, which needs the package `num2words`."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny import idefics3
from tests.kit.tiny._text import chat_template, tokenizer
from tests.kit.tiny.idefics3 import SIZE, SPECIALS


def model() -> T.PreTrainedModel:
    return idefics3.model("SmolVLM", tied=True)


def processor() -> T.ProcessorMixin:
    size = {"longest_edge": 2 * SIZE}
    tile = {"longest_edge": SIZE}
    sampling = {"fps": 1, "max_frames": 4, "video_size": size}
    return T.SmolVLMProcessor(
        image_processor=T.SmolVLMImageProcessor(size=size, max_image_size=tile),
        tokenizer=tokenizer(*SPECIALS),
        video_processor=T.SmolVLMVideoProcessor(size=tile, max_image_size=tile, video_sampling=sampling),
        image_seq_len=4,
        chat_template=chat_template("<image>", "<video>"),
    )
