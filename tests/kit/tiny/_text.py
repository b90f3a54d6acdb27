"""The tokenizer, and settings of decoders and towers, that tiny models share."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB = 384  # 256 bytes, then specials; a multiple of 128
EOS = "<|im_end|>"
# A decoder that fits all schemes: 2 layers, hidden 128, 4 heads of 32.
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 257,
}
GQA = {**TEXT, "num_key_value_heads": 2}
# The tower of Qwen's and GLM's models, before it merges patches.
TOWER = {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 128}


def tokenizer(*specials: str, **named: str) -> PreTrainedTokenizerFast:
    """One token per byte, then `<|im_start|>` (256), `<|endoftext|>` (257, pad), `<|im_end|>` (258, eos), `specials`.

    Args:
        specials: more special tokens; their ids start at 259.
        named: attributes of the tokenizer, e.g. `image_token="<image>"`, for processors that ask it for them.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|endoftext|>", EOS, *specials])
    tok = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token=EOS,
        pad_token="<|endoftext|>",
        extra_special_tokens=named or list(specials),
        model_max_length=2048,
    )
    assert len(tok) <= VOCAB
    return tok


def ids(tok: PreTrainedTokenizerFast, *tokens: str) -> list[int]:
    """Token ids of special tokens."""
    return [tok.convert_tokens_to_ids(token) for token in tokens]


def chat_template(image: str, video: str = "") -> str:
    """A ChatML template that takes a string or OpenAI-style content parts; an image part becomes `image`, a video `video`."""
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] in ('image', 'image_url') %}"
        + image
        + "{% elif part['type'] == 'video' %}"
        + video
        + "{% elif part['type'] == 'text' %}"
        "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
