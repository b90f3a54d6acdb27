"""Video-MME from end to end, on made-up rows with the columns of lmms-lab/Video-MME and videos written here."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset, Features, List, Value
from PIL import Image

from tests.kit import tiny
from tests.kit.echo import Echo, checkpoint, question, write_rows
from tests.kit.pictures import film
from vlmcompress import engines
from vlmcompress.evaluation.accuracy import scoring
from vlmcompress.evaluation.accuracy.ask import SuiteAnswers, ask_suite
from vlmcompress.evaluation.accuracy.tasks import LoadedSuite, load_suite
from vlmcompress.utils.errors import UserError

COLUMNS = ("video_id", "duration", "domain", "sub_category", "url", "videoID", "question_id", "task_type", "question")
ROWS = [
    {"video_id": "001", "duration": "short", "videoID": "fFjv93-CGo8", "question_id": "001-1", "answer": "C"}
    | {"question": "what is counted?", "options": ["A. Apples.", "B. Candles.", "C. Berries.", "D. Bears."]},
    {"video_id": "601", "duration": "long", "videoID": "N1cdUjctpG8", "question_id": "601-2", "answer": "B"}
    | {"question": "who leaves?", "options": ["A. Ann.", "B. Bob.", "C. Cem.", "D. Dee."]},
]
ASKED = "what is counted?\nA. Apples.\nB. Candles.\nC. Berries.\nD. Bears.\nThe best answer is:"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local copy, in the form in which the Hub has it."""
    monkeypatch.setenv("VLMCOMPRESS_DATA", str(tmp_path / "data"))
    copy = tmp_path / "data" / "video_mme"
    for folder in ("videomme", "videos"):
        (copy / folder).mkdir(parents=True)
    features = Features(dict.fromkeys((*COLUMNS, "answer"), Value("string")) | {"options": List(Value("string"))})
    full = [{column: row.get(column) for column in features} for row in ROWS]
    Dataset.from_list(full, features=features).to_parquet(copy / "videomme" / "test-00000-of-00001.parquet")
    for name, frames in (("fFjv93-CGo8.mp4", 20), ("N1cdUjctpG8.MP4", 40)):
        film(copy / "videos" / name, frames)
    checkpoint(tmp_path / "model")
    return tmp_path


def load(model: Path) -> LoadedSuite:
    return load_suite("video_mme", candidate=model, baseline=model)


def ask(data: Path, *answers: str) -> SuiteAnswers:
    said = iter(answers)
    return ask_suite(data / "model", load(data / "model"), Echo(lambda request: next(said)))


def test_what_is_asked_and_scored(data: Path) -> None:
    output = []
    suite, engine = load(data / "model"), Echo(lambda request: output.append(question(request)) or "B")
    first, second = ask_suite(data / "model", suite, engine).samples
    assert output[0].endswith(ASKED) and "Respond with only the letter" in output[0]
    assert [[part["type"] for part in request.media()] for request in engine.asked] == [["video_url"]] * 2
    assert (first.id, first.family, first.expected, first.score) == ("001-1", "short", "C", 0.0)
    assert (second.id, second.family, second.expected, second.score) == ("601-2", "long", "B", 1.0)
    assert first.image != second.image and suite.pictures("001-1") == []
    unparsed = ask(data, "no letter", "").samples
    assert not any(sample.parsed or sample.score for sample in unparsed)


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("C", "C"),
        ("(D) Bears", "D"),
        ("The best answer is: B.", "B"),
        ("Answer: C", "C"),
        ("Best option: D", "D"),
        ("The correct answer is A, not B", "A"),
        ("The answer, I think, is D", "D"),
        ("nothing of the sort", None),
        ("E", None),
    ],
)
def test_letters(answer: str, letter: str | None) -> None:
    assert scoring.video_mme_choice(answer) == letter


def test_videos_that_are_not_there_and_engines_without(data: Path) -> None:
    with pytest.raises(UserError, match=r"sample '001-1' shows a video, and llama.cpp is given none; take --engine"):
        ask_suite(data / "model", load(data / "model"), engines.get_engine("llamacpp"))
    next((data / "data" / "video_mme").rglob("fF*.mp4")).unlink()
    with pytest.raises(UserError, match="sample '001-1': its video is missing; unpack"):
        ask(data, "A", "B")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("family", ["qwen2-5-vl", "qwen3-vl", "llava-onevision"])
def test_both_engines_give_the_model_as_much_of_each_video(tmp_path: Path, family: str) -> None:
    """vLLM, by its own way of taking frames, and transformers by ours: prompts of one length, which differ as the videos do.

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
    assert runs[0][2].text[:2] == runs[1][2].text[:2]  # the same pixels; decoders differ by a level
    visual = [sample.answer.visual_tokens for sample in runs[1]]
    assert visual[0] != visual[1] and all(0 < part < whole for part, whole in zip(visual, lengths[1], strict=True))
    assert [sample.image for sample in runs[0]] == [sample.image for sample in runs[1]]
