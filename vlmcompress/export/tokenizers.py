"""Compare the tokenizer of an engine with the model's tokenizer.

GGUF and OpenVINO store the tokenizer in their engine's form, converted from `tokenizer.json`. A tokenizer that splits texts
differently would change the model's prompts. Both tokenizers get conversations rendered by the chat template, special tokens,
words from the whole vocabulary, and texts with digits, spaces, punctuation and other scripts. llama.cpp splits text by its own
patterns, which differ from published ones in a few scripts: a small share of differences is a warning, others are a refusal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmcompress.export.formats import EngineFiles, ExportFormat
from vlmcompress.models import load_processor, quiet_transformers
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import shortened

WORDS, SPECIALS = 400, 150  # maximum numbers
MOST = 0.05  # share of words and texts that may differ
QUESTION, ANSWER, FURTHER = (
    "How many people are on the platform at 10:45?",
    "Three.",
    "Is it (more or less) empty, then?",
)
TEXTS = (
    "0 12 345 6789 1,234.56 10:45 3/4 50% x2",
    "a  b   c",
    " leading and trailing ",
    "two\n\nlines\r\n\tand a tab \n",
    "USER: what's this? ASSISTANT: It's a \"sign\" (yes/no); e.g. #1 - <b>50</b>...",
    "I'm sure they'll, WE'RE not; HelloWorld, snake_case, a-b_c.d/e@f",
    "def f(x): return [x**2 for x in range(10)] # ok",
    "Zürich, naïve café, Straße; e\u0301 é € — “quoted”…",
    "Ελλάδα, Привет, שלום, مرحبا, नमस्ते, สวัสดี",
    "你好，世界。日本語のテキスト、한국어 텍스트",
    "😀👍🏽 ∑∫≈ ½ ① \u200b\u00a0end",
)


@dataclass(frozen=True)
class Comparison:
    """The comparison of an engine's tokenizer with the model's.

    Attributes:
        texts: number of compared texts; 0 if the engine is not installed.
        problem: how prompts would differ, in a line; None: they are equal.
        warning: other differences; None: none.
    """

    texts: int = 0
    problem: str | None = None
    warning: str | None = None


def compare_tokenizers(exporter: ExportFormat, folder: Path, config: Mapping[str, Any]) -> Comparison:
    """Compare the tokenizer of a format's engine with the model's tokenizer in a folder.

    Args:
        exporter: the format; nothing is compared if its engines read tokenizer.json.
        config: transformers' configuration with all defaults.
    """
    if not isinstance(exporter, EngineFiles):
        return Comparison()
    try:
        with quiet_transformers():
            processor = load_processor(folder)
    except Exception:  # any kind; the code that uses the processor reports it
        return Comparison()
    prompts, others = samples(processor)
    texts = [*prompts, *others]
    try:
        tokens = exporter.token_ids(folder, config, texts)
    except UserError as error:
        return Comparison(len(texts), str(error))
    if tokens is None:
        return Comparison()
    differences = []
    for text, actual in zip(texts, tokens, strict=True):
        expected = list(processor.tokenizer(text)["input_ids"])
        if expected != actual:
            pairs = zip(expected, actual, strict=False)
            at = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(expected), len(actual)))
            parts = list(actual[at : at + 4]), list(expected[at : at + 4])
            differences.append(
                (
                    text,
                    f"of {shortened(repr(text), 120)} it makes {parts[0]} from token {at + 1} on, the model's tokenizer "
                    f"{parts[1]}",
                )
            )
    if not differences:
        return Comparison(len(texts))
    line = f"{exporter.TITLE} splits {len(differences)} of {len(texts)} texts into other tokens: {differences[0][1]}"
    if differences[0][0] in prompts or len(differences) > MOST * len(texts):
        return Comparison(len(texts), f"{line}. The model would read other prompts: write compressed-tensors")
    return Comparison(len(texts), warning=line)


def samples(processor: Any) -> tuple[list[str], list[str]]:
    """Texts to compare tokenizers by: prompts and special tokens, which every request has; words and other texts."""
    tokenizer = processor.tokenizer
    added = tokenizer.get_added_vocab()
    words = sorted(set(tokenizer.get_vocab().values()) - set(added.values()))
    decoded = [tokenizer.decode([index]) for index in words[:: len(words) // WORDS + 1]]
    decoded = [word for word in decoded if word.strip() and not set(word) & {"\ufffd", "\0"}]  # not in real texts
    joined = [" ".join(decoded[start : start + 8]) for start in range(0, len(decoded), 8)]
    return [*list(added)[:: len(added) // SPECIALS + 1], *_conversations(processor)], [*decoded, *joined, *TEXTS]


def _conversations(processor: Any) -> list[str]:
    """Prompts of one and of two questions, rendered by the chat template; empty if it does not support them."""
    question, answer, further = ([{"type": "text", "text": text}] for text in (QUESTION, ANSWER, FURTHER))
    first = [{"role": "user", "content": [{"type": "image"}, *question]}]
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": further}]
    prompts = []
    for conversation in (first, second):
        try:
            prompts.append(processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False))
        except Exception:  # any error of a template; calibration and evaluation report it
            continue
    return prompts
