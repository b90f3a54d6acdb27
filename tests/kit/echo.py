"""An engine that answers by a rule instead of a model, for tests of what surrounds engines; and small data for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image

from vlmcompress.engines import Answer, Request, Run


class Echo:
    """Answers with `say` of a request; keeps the requests.

    Args:
        delay: seconds an answer takes.
    """

    name, local = "echo", True

    def __init__(self, say: Callable[[Request], str], delay: float = 0.0):
        self.say, self.delay = say, delay
        self.asked: list[Request] = []

    def answer(self, model, requests: Sequence[Request], *, on_answer, **_) -> Run:
        answers = {}
        for request in requests:
            time.sleep(self.delay)
            self.asked.append(request)
            text = self.say(request)
            answers[request.id] = Answer(request.id, text, "stop", 1, len(text.split()))
            on_answer(answers[request.id])
        return Run(answers, {"name": "echo", "restarts": 0}, 0.5)


def question(request: Request) -> str:
    return "".join(part["text"] for part in request.messages[-1]["content"] if part["type"] == "text")


def picture(folder: Path, name: str, colour: str = "red") -> str:
    Image.new("RGB", (8, 6), colour).save(folder / name)
    return name


def write_rows(file: Path, *rows: dict) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def checkpoint(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder
