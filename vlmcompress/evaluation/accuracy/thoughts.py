"""What a model thinks before it answers: between marks such as `<think>` and `</think>`, and no part of the answer.

    Thoughts().answer("<think>No? It has stripes.</think> Yes")      "Yes"
    Thoughts().answer("It may be a zebra.</think> Yes")              "Yes": the chat template has opened the thoughts
    Thoughts().answer("<think>Yes or no, let me")                    None: the thoughts do not end

A scorer that sees thoughts finds right answers where none was given, or none that equals the expected one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmcompress.models import read_json
from vlmcompress.utils.errors import UserError

Marks = Sequence[tuple[str, str]]
MARKS: Marks = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, GLM-4.5 and most others
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<mm:think>", "</mm:think>"),  # MiniMax
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|channel|>analysis", "<|channel|>final<|message|>"),  # gpt-oss
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("Here is my thought process:", "Here is my response:"),  # Granite 3.2
)
"""Pairs of marks around thoughts, as vLLM's reasoning parsers know them (0.32, `vllm/reasoning`)."""
UNFINISHED = "thinking"
"""`Answer.finish` of an answer whose thoughts do not end."""
TOKENS = 4096
"""Tokens that a model may think before the answer of the suite's length."""
_AROUND = re.compile(r"</?answer>|<\|(?:begin|end)_of_box\|>")  # around the answer after GLM's and R1-like thoughts
_QUESTION = "What is this?"


@dataclass(frozen=True)
class Thoughts:
    """How a suite's models think.

    Attributes:
        marks: pairs of opening and closing marks.
        begun: whether the prompt ends within thoughts, so that an answer has the closing mark at most.
        expected: whether the chat template has such marks, so that answers may need `TOKENS` more.
        max_tokens: most tokens of an answer with its thoughts; None: as many as the task says, and `TOKENS` more if expected.
    """

    marks: Marks = MARKS
    begun: bool = False
    expected: bool = False
    max_tokens: int | None = None

    def most_tokens(self, answer: int) -> int:
        """Most tokens to generate for an answer of `answer` tokens."""
        return answer + TOKENS * self.expected if self.max_tokens is None else self.max_tokens

    def answer(self, text: str, begun: bool = False) -> str | None:
        """The text without thoughts; None if they do not end. `begun`: whether the text begins within thoughts."""
        rest = text
        for opening, closing in self.marks:
            rest = re.sub(f"{re.escape(opening)}.*?{re.escape(closing)}", "", rest, flags=re.DOTALL)
            rest = rest.rpartition(closing)[2]
            if opening in rest:
                return None
        if rest == text:
            return None if begun or self.begun else text
        return _AROUND.sub("", rest).strip()

    def ends_without_beginning(self, text: str) -> bool:
        """Whether a text has a closing mark and no opening one, as where the prompt has opened the thoughts."""
        return any(closing in text and opening not in text for opening, closing in self.marks)


def read_marks(text: str | None) -> Marks:
    """The marks to look for: `OPEN,CLOSE` of `--thoughts`, then those of `MARKS`. Raises `UserError` for another form."""
    if text is None:
        return MARKS
    opening, comma, closing = text.partition(",")
    if not comma or not opening.strip() or not closing.strip() or opening.strip() == closing.strip():
        raise UserError(f"--thoughts {text}: write the two marks around thoughts, like '<think>,</think>'")
    return ((opening.strip(), closing.strip()), *MARKS)


def of_models(*models: str | Path, marks: Marks = MARKS, max_tokens: int | None = None) -> Thoughts:
    """How models think by their chat templates, where they are folders."""
    templates = [template for model in models if (template := _template(Path(model)))]
    thinking = [template for template in templates if any(opening in template for opening, _ in marks)]
    return Thoughts(marks, any(_begins(template, marks) for template in thinking), bool(thinking), max_tokens)


def _template(folder: Path) -> str:
    """The chat template in a folder's files; "" if there is none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            template = read_json(folder / name, "chat template").get("chat_template")
            if isinstance(template, list):  # several by name
                template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
            if isinstance(template, str):
                return template
    return ""


def _begins(template: str, marks: Marks) -> bool:
    """Whether the prompt of a template ends within thoughts."""
    from transformers.utils.chat_template_utils import render_jinja_template

    content = [{"type": "image"}, {"type": "text", "text": _QUESTION}]
    for parts in (content, _QUESTION):  # some templates take texts only
        conversations = [[{"role": "user", "content": parts}]]
        try:
            rendered: Any = render_jinja_template(conversations, chat_template=template, add_generation_prompt=True)
        except Exception:  # whatever a template raises; the engine will report it
            continue
        end = rendered[0][0].rpartition(_QUESTION)[2]
        return any(end.rfind(opening) > end.rfind(closing) for opening, closing in marks)
    return False
