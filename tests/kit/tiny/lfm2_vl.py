"""Tiny LFM2-VL: a convolution block, an attention block, a convolution block; tied head."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import GQA, chat_template, tokenizer

TILES = [f"<|img_row_{row}_col_{col}|>" for row in range(1, 3) for col in range(1, 3)]
NAMED = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail": "<|img_thumbnail|>",
}
RENAME = {"model.vision_tower.": "model.vision_tower.vision_model."}


def model() -> T.PreTrainedModel:
    return T.Lfm2VlForConditionalGeneration(
        T.Lfm2VlConfig(
            vision_config=T.Siglip2VisionConfig(
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_patches=16,
                patch_size=16,
                vision_use_head=False,
            ),
            text_config=T.Lfm2Config(
                **{**GQA, "num_hidden_layers": 3},
                block_auto_adjust_ff_dim=False,
                block_dim=128,  # published configs have these two, transformers ignores them, vLLM reads them
                conv_dim=128,
                layer_types=["conv", "full_attention", "conv"],
                tie_word_embeddings=True,
            ),
            image_token_id=259,
            projector_hidden_size=256,
            downsample_factor=2,
        )
    )


def processor() -> T.ProcessorMixin:
    return T.Lfm2VlProcessor(
        image_processor=T.Lfm2VlImageProcessor(
            tile_size=64,
            min_tiles=2,
            max_tiles=4,
            min_image_tokens=4,
            max_image_tokens=16,
            encoder_patch_size=16,
            downsample_factor=2,
            max_num_patches=64,
        ),
        tokenizer=tokenizer("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *TILES, **NAMED),
        chat_template=chat_template("<image>"),
    )
