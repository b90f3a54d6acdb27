"""Configurations, processors and random initial models of small Qwen2.5-VL and LLaVA-1.5 models, without own code."""

import torch
from torch import nn
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

MODEL_VOCABULARY = 640  # tokenizer entries (under 600) padded to a multiple of 128
HIDDEN, INTERMEDIATE, LAYERS = 256, 512, 4
VISION_HIDDEN, VISION_INTERMEDIATE = 128, 256
MEAN = STD = [0.5, 0.5, 0.5]
SIDE = 144  # LLaVA's image side


def _language(tokenizer: PreTrainedTokenizerFast) -> dict:
    return dict(
        vocab_size=MODEL_VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip


def qwen_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """Configure Qwen2.5-VL: windows of 48 pixels in layers 0 and 2, full attention in 1 and 3; M-RoPE sections sum to half
    the head size."""
    token = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}
    return Qwen2_5_VLConfig(
        text_config=_language(tokenizer) | {"rope_parameters": rope},
        vision_config=dict(
            depth=4, hidden_size=VISION_HIDDEN, intermediate_size=VISION_INTERMEDIATE, num_heads=4, patch_size=8,
            spatial_merge_size=2, temporal_patch_size=2, window_size=48, out_hidden_size=HIDDEN,
            fullatt_block_indexes=[1, 3],
        ),
        image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"), vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=False,
    )  # fmt: skip


def llava_config(tokenizer: PreTrainedTokenizerFast) -> LlavaConfig:
    """Configure LLaVA: a CLIP tower of five layers of which, as in LLaVA-1.5, the last but one feeds the projector."""
    return LlavaConfig(
        text_config=LlamaConfig(**_language(tokenizer), head_dim=64, rope_theta=10000.0),
        vision_config=CLIPVisionConfig(
            hidden_size=VISION_HIDDEN, intermediate_size=VISION_INTERMEDIATE, num_hidden_layers=5,
            num_attention_heads=4, image_size=SIDE, patch_size=16, projection_dim=VISION_HIDDEN,
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), image_seq_length=81,
        vision_feature_layer=-2, vision_feature_select_strategy="default", tie_word_embeddings=False,
    )  # fmt: skip


def build_processor(kind: str, tokenizer: PreTrainedTokenizerFast):
    """Build the family's own processor. World images reach the tower unresized."""
    if kind == "qwen":
        pixels = dict(
            patch_size=8, merge_size=2, temporal_patch_size=2, image_mean=MEAN, image_std=STD,
            size={"shortest_edge": 32 * 32, "longest_edge": 384 * 384},
        )  # fmt: skip
        return Qwen2_5_VLProcessor(
            Qwen2VLImageProcessor(**pixels), tokenizer, Qwen2VLVideoProcessor(**pixels),
            chat_template=tokenizer.chat_template,
        )  # fmt: skip
    image = CLIPImageProcessor(
        size={"height": SIDE, "width": SIDE}, crop_size={"height": SIDE, "width": SIDE}, do_center_crop=False,
        image_mean=MEAN, image_std=STD,
    )  # fmt: skip
    return LlavaProcessor(
        image, tokenizer, patch_size=16, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template, image_token="<image>",
    )  # fmt: skip


def build_model(kind: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> nn.Module:
    """Build a random initial model in float32."""
    torch.manual_seed(seed)
    if kind == "qwen":
        model = Qwen2_5_VLForConditionalGeneration(qwen_config(tokenizer))
    else:
        model = LlavaForConditionalGeneration(llava_config(tokenizer))
    nn.init.normal_(model.get_input_embeddings().weight, std=0.1)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, max_new_tokens=16
    )
    return model
