"""Prompts of lm-eval as requests of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from lm_eval.api.instance import Instance
from PIL import Image

from vlmcompress.engines import Answer, Request
from vlmcompress.evaluation.accuracy.lm import EngineLM, cut, place
from vlmcompress.utils.errors import UserError

RED, BLUE = Image.new("RGB", (4, 4), "red"), Image.new("RGB", (4, 4), "blue")


class EchoIds:
    """Answers every request with its id and keeps them."""

    def __init__(self) -> None:
        self.calls: list[list[Request]] = []

    def __call__(self, requests):
        self.calls.append(list(requests))
        return {r.id: Answer(r.id, f"{r.id}\nand more", "length", 1, 1) for r in requests}


def instance(lm: EngineLM, index: int, text: str, images=None, **options) -> Instance:
    prompt = lm.apply_chat_template([{"role": "system", "content": "be brief"}, {"role": "user", "content": text}])
    arguments = (prompt, options) if images is None else (prompt, options, {"visual": images})
    return Instance("generate_until", {}, arguments, 0, ("task", index, 1))


def make(tmp_path: Path) -> tuple[EngineLM, EchoIds]:
    engine = EchoIds()
    return EngineLM(engine, lambda instance: f"s{instance.doc_id}", tmp_path), engine


def test_images_stand_where_the_text_says(tmp_path: Path) -> None:
    lm, engine = make(tmp_path)
    texts = lm.generate_until(
        [
            instance(lm, 0, "a <image> b <image>", [RED, BLUE], until=["\n"], max_gen_toks=7),
            instance(lm, 1, "no mark", [BLUE]),
            instance(lm, 2, "only text", until="m"),
            instance(lm, 0, "a <image> b <image>", [RED, BLUE], until=["\n"], max_gen_toks=7),
        ]
    )
    assert texts == ["s0", "s1\nand more", "s2\nand ", "s0"]
    assert [a.finish for a in lm.answers.values()] == ["stop", "length", "stop"]
    (requests,) = engine.calls
    assert [r.id for r in requests] == ["s0", "s1", "s2"] and [r.max_tokens for r in requests] == [7, 256, 256]
    assert len(list(tmp_path.iterdir())) == 2
    colours = {(255, 0, 0): "red", (0, 0, 255): "blue"}

    def output(request: Request) -> list[str]:
        content = request.messages[-1]["content"]
        files = [p["image_url"]["url"].removeprefix("file://") if p["type"] == "image_url" else None for p in content]
        return [
            colours[Image.open(file).getpixel((0, 0))] if file else part["text"]
            for file, part in zip(files, content, strict=True)
        ]

    assert [output(r) for r in requests] == [["a ", "red", " b ", "blue"], ["blue", "no mark"], ["only text"]]
    assert requests[0].messages[0] == {"role": "system", "content": [{"type": "text", "text": "be brief"}]}


def test_places_and_images_must_agree() -> None:
    with pytest.raises(UserError, match="sample 'x': 2 placeholders for images in the prompt, 1 images"):
        place([{"role": "user", "content": "<image><image>"}], [Path("/a.png")], "x")
    with pytest.raises(UserError, match="1 placeholders for images in the prompt, 0 images"):
        place([{"role": "user", "content": "<image>"}], [], "x")


def test_first_stop_string_cuts() -> None:
    answer = Answer("a", "one. two; three", "length", 1, 5)
    assert cut(answer, ["; ", ". ", ""]).text == "one" and cut(answer, ["x"]) is answer


def test_unsupported_requests_are_refused(tmp_path: Path) -> None:
    lm, _ = make(tmp_path)
    with pytest.raises(UserError, match="gen_prefix"):
        lm.apply_chat_template([], add_generation_prompt=False)
    with pytest.raises(UserError, match="task samples; set do_sample: false"):
        lm.generate_until([instance(lm, 0, "x", temperature=0.7)])
    for method in (lm.loglikelihood, lm.loglikelihood_rolling):
        with pytest.raises(UserError, match="task task .*only output_type generate_until works"):
            method([instance(lm, 0, "x")])
