"""Questions about videos: which engines take them, and how much of a video each engine gives to the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.kit import tiny
from tests.kit.echo import checkpoint, write_rows
from tests.kit.pictures import film
from vlmcompress import engines
from vlmcompress.evaluation.accuracy.ask import ask_suite
from vlmcompress.evaluation.accuracy.tasks import load_suite
from vlmcompress.utils.errors import UserError


def test_an_engine_without_videos_refuses_them(tmp_path: Path) -> None:
    film(tmp_path / "a.mp4", 20)
    data = write_rows(tmp_path / "data.jsonl", {"id": "a", "video": "a.mp4", "question": "what?", "answer": "x"})
    model = checkpoint(tmp_path / "model")
    suite = load_suite(data, candidate=model, baseline=model)
    with pytest.raises(UserError, match=r"sample 'a' shows a video, and llama.cpp is given none; take --engine"):
        ask_suite(model, suite, engines.get_engine("llamacpp"))


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("family", ["qwen2-5-vl", "qwen3-vl", "llava-onevision"])
def test_both_engines_give_the_model_as_much_of_each_video(tmp_path: Path, family: str) -> None:
    """vLLM, by its own way of taking frames, and transformers: prompts of one length, which differ as the videos do.

    Of a file the processor takes frames, of a list of frames it gets all.
    """
    model = tiny.build(family, tmp_path / family)
    for number, colour in enumerate(("red", "blue", "green", "white")):
        Image.new("RGB", (84, 56), colour).save(tmp_path / f"{number}.png")
    videos = [film(tmp_path / f"{frames}.mp4", frames).name for frames in (20, 40)]
    rows = [{"video": video, "question": "what?", "answer": "x"} for video in (*videos, [f"{n}.png" for n in range(4)])]
    suite = load_suite(write_rows(tmp_path / "data.jsonl", *rows), candidate=model, baseline=model)
    runs = [ask_suite(model, suite, engines.get_engine(name)).samples for name in ("vllm", "hf")]
    lengths = [[sample.answer.prompt_tokens for sample in samples] for samples in runs]
    assert lengths[0] == lengths[1] and not any(sample.answer.refused for samples in runs for sample in samples), (
        lengths
    )
    assert runs[0][2].text[:2] == runs[1][2].text[:2]  # the same pixels; decoders of films differ by a level
    visual = [sample.answer.visual_tokens for sample in runs[1]]
    assert visual[0] != visual[1] and all(0 < part < whole for part, whole in zip(visual, lengths[1], strict=True))
    assert [sample.image for sample in runs[0]] == [sample.image for sample in runs[1]]
