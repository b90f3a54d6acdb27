"""Tiny Granite 4 Vision: tiles of 56x56 in 14x14 patches, four tokens each; two blocks of the decoder get image features."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import GQA, chat_template, tokenizer
from tests.kit.tiny.llava import SIZE
from tests.kit.tiny.llava_next import PINPOINTS, image_processor


def model() -> T.PreTrainedModel:
    return T.Granite4VisionForConditionalGeneration(
        T.Granite4VisionConfig(
            vision_config=T.SiglipVisionConfig(
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                image_size=SIZE,
                patch_size=14,
                vision_use_head=False,
            ),
            text_config=T.Granite4VisionTextConfig(
                **GQA, embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.2, logits_scaling=2.0
            ),
            image_grid_pinpoints=PINPOINTS,
            image_token_index=259,
            vision_feature_select_strategy="full",
            downsample_rate="2/4",
            deepstack_layer_map=[[-2, 0]],
            spatial_target_layers=[1],
        )
    )


def processor() -> T.ProcessorMixin:
    return T.Granite4VisionProcessor(
        image_processor=image_processor(),
        tokenizer=tokenizer("<image>", image_token="<image>"),
        patch_size=14,
        vision_feature_select_strategy="full",
        image_token="<image>",
        downsample_rate="2/4",
        chat_template=chat_template("<image>"),
    )


RENAME = {"model.vision_tower.": "model.vision_tower.vision_model."}
