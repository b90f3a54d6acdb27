"""Tokenizers and prompt formats of the demo models.

One byte-level BPE recipe, trained on the world's own texts so that its words are single tokens (any other text still
tokenizes, byte by byte if need be); the special tokens and the chat template are those of the model's family.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eval.world.chart import sample_chart
from eval.world.questions import ASKERS
from eval.world.rows import sample_view
from eval.world.textual import ask_text
from eval.world.vocab import FAMILIES

VOCABULARY = 768  # at most; of the world's tokenizers

QWEN_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
LLAVA_SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<image>")

QWEN_TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

LLAVA_TEMPLATE = """{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- 'ASSISTANT: ' -}}
{%- else -%}
{{- message['role'] | upper + ': ' -}}
{%- endif -%}
{%- set ns = namespace(text='') -%}
{%- if message['content'] is string -%}
{%- set ns.text = message['content'] -%}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}
{{- '<image>\\n' -}}
{%- elif part['type'] == 'text' -%}
{%- set ns.text = ns.text + part['text'] -%}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- ns.text + ('</s>' if message['role'] == 'assistant' else ' ') -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"""


@dataclass(frozen=True)
class Format:
    """Format of a turn: prefix, images, question, infix, answer, stop, separator."""

    special: tuple[str, ...]
    template: str
    image_token: str
    before: str
    image: tuple[str, str]
    between: str
    stop: str
    after: str
    pad: str
    answer_prefix: str


FORMATS = {
    "qwen": Format(
        QWEN_SPECIAL, QWEN_TEMPLATE, "<|image_pad|>", "<|im_start|>user\n", ("<|vision_start|>", "<|vision_end|>"),
        "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>", "\n", "<|endoftext|>", "",
    ),
    "llava": Format(
        LLAVA_SPECIAL, LLAVA_TEMPLATE, "<image>", "USER: ", ("", "\n"), " ASSISTANT:", "</s>", "", "<pad>", " ",
    ),
}  # fmt: skip


@lru_cache(maxsize=1)
def _corpus() -> tuple[str, ...]:
    """Texts to train on: questions and answers of every family, with and without a leading space, and the templates' words."""
    rng = Random(11)
    lines = ["USER: ", " ASSISTANT:", "ASSISTANT: ", "user\n", "assistant\n", "system\n", "SYSTEM: "] * 400
    for family in FAMILIES:
        for _ in range(1500):
            if family == "text":
                turn = ask_text(rng)
            else:
                view = sample_chart(rng) if family == "chart" else sample_view(rng, family, (4, 4), "train")
                turn = ASKERS[family](rng, view)
            if turn:
                lines += [turn[0], " " + turn[0], turn[1], " " + turn[1]]
    return tuple(lines)


def build_tokenizer(
    kind: str, lines: Iterable[str] | None = None, vocabulary: int = VOCABULARY
) -> PreTrainedTokenizerFast:
    """Train the tokenizer of one model, on the world's texts or on `lines`; deterministic."""
    form = FORMATS[kind]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(form.special), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    inner.train_from_iterator(_corpus() if lines is None else lines, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=form.stop, pad_token=form.pad, model_max_length=2048,
        additional_special_tokens=[t for t in form.special if t not in (form.stop, form.pad)],
        chat_template=form.template, clean_up_tokenization_spaces=False, padding_side="left",
    )  # fmt: skip
