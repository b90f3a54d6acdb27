"""Tiny Idefics3: 56x56 tiles, shuffled 2x2 into 4 visual tokens each, at most 2x2 tiles and the whole image."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import GQA, chat_template, tokenizer

SIZE = 56
TILES = [f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)]
SPECIALS = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *TILES)


def model(name: str = "Idefics3", tied: bool = False) -> T.PreTrainedModel:
    config, tower = getattr(T, f"{name}Config"), getattr(T, f"{name}VisionConfig")
    return getattr(T, f"{name}ForConditionalGeneration")(
        config(
            vision_config=tower(
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                image_size=SIZE,
                patch_size=14,
            ).to_dict(),
            text_config=T.LlamaConfig(**GQA, tie_word_embeddings=tied).to_dict(),
            image_token_id=259,
            scale_factor=2,
            pad_token_id=257,
            tie_word_embeddings=tied,
        )
    )


def processor() -> T.ProcessorMixin:
    return T.Idefics3Processor(
        image_processor=T.Idefics3ImageProcessor(
            size={"longest_edge": 2 * SIZE}, max_image_size={"longest_edge": SIZE}
        ),
        tokenizer=tokenizer(*SPECIALS),
        image_seq_len=4,
        chat_template=chat_template("<image>"),
    )
