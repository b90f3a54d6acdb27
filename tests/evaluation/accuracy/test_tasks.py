"""Which suites there are, how their samples are chosen and named, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from tests.kit.echo import Echo, checkpoint, picture, write_rows
from tests.kit.places import DEMO_LLAVA
from vlmcompress.engines import Request
from vlmcompress.evaluation.accuracy.ask import ask_suite
from vlmcompress.evaluation.accuracy.catalogue import task_names
from vlmcompress.evaluation.accuracy.tasks import LoadedSuite, load_suite
from vlmcompress.utils.errors import UserError

YAML = """
task: mine
dataset_path: parquet
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "Say: {{{{question}}}}"
doc_to_target: answer
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false, temperature: 0.0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0, scoring: as written}}
"""


def load(suite, data=None, **options) -> LoadedSuite:
    return load_suite(suite, data, candidate=DEMO_LLAVA, baseline=DEMO_LLAVA, **options)


def ids(suite: LoadedSuite) -> list[str]:
    return [place.id for place in suite.places]


def test_the_world_is_the_default() -> None:
    suite = load(None)
    assert suite.name == "world" and len(suite) == suite.available == 2500 and not suite.derived_ids
    assert suite.source.endswith("data/llava/test.parquet") and suite.metric == "exact_match" and suite.scoring
    assert set(suite.tasks) == {f"world_{place.family}" for place in suite.places} and len(suite.tasks) == 10
    assert "world" in task_names() and set(suite.tasks) < set(task_names())


def test_a_sample_is_stratified_and_repeatable() -> None:
    suite = load("world", limit=25)
    assert len(suite) == 25 and suite.available == 2500 and len(suite.tasks) == 10
    assert ids(suite) == ids(load("world", limit=25)) != ids(load("world", limit=25, seed=1))
    for place in suite.places:
        document = suite.tasks[place.task].eval_docs[place.index]
        assert (document["id"], document["family"]) == (place.id, place.family)
        assert len(suite.pictures(place.id)) == {"two_images": 2, "text": 0}.get(place.family, 1)


def test_one_family_of_another_copy_of_the_data() -> None:
    other = DEMO_LLAVA.parent / "data" / "qwen" / "test.parquet"
    suite = load("world_count", other)
    assert len(suite) == 250 and {place.family for place in suite.places} == {"count"} and suite.source == str(other)
    assert all(identity.startswith("test-qwen-count") for identity in ids(suite))


def test_plain_data(tmp_path: Path) -> None:
    picture(tmp_path, "a.png")
    rows = [{"id": i, "image": "a.png", "question": f"q{i}", "answer": "a" * 40, "family": "f"} for i in range(3)]
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "what?"}]
    rows.append({"id": "talk", "messages": [*turns, {"role": "user", "content": "x"}, turns[1]]})
    for suite in (load(write_rows(tmp_path / "d.jsonl", *rows)), load(None, tmp_path / "d.jsonl")):
        assert suite.name == "d.jsonl" and ids(suite) == ["0", "1", "2", "talk"]
        assert suite.max_tokens == 40 and not suite.derived_ids
        assert [place.family for place in suite.places] == ["f", "f", "f", "other"]
        assert len(suite.pictures("1")) == 1 and suite.pictures("talk") == []


def test_plain_data_with_videos(tmp_path: Path) -> None:
    """A video of a question stands where its part does, after or before images, as a file that the engine may read."""
    picture(tmp_path, "a.png"), (tmp_path / "a.mp4").write_bytes(b"film"), (tmp_path / "b.mp4").write_bytes(b"other")
    parts = [{"type": "video", "video": "a.mp4"}, {"type": "image", "image": "a.png"}, {"type": "text", "text": "q"}]
    rows = [{"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]}]
    rows += [{"video": name, "question": "<video> q", "answer": "x"} for name in ("a.mp4", "b.mp4")]
    suite = load(write_rows(tmp_path / "d.jsonl", *rows))
    output = []

    def say(request: Request) -> str:
        output.append([part["type"] for part in request.messages[-1]["content"]])
        files = [
            Path(part["video_url"]["url"].removeprefix("file://")) for part in request.media() if "video_url" in part
        ]
        assert [file.read_bytes() for file in files] == [b"other" if len(output) == 3 else b"film"]
        return "x"

    samples = ask_suite("model", suite, Echo(say)).samples
    assert output == [["video_url", "image_url", "text"], ["video_url", "text"], ["video_url", "text"]]
    assert samples[0].image.split("+")[0] == samples[1].image != samples[2].image and len(set(ids(suite))) == 3


def test_ids_are_made_from_content(tmp_path: Path) -> None:
    picture(tmp_path, "a.png"), picture(tmp_path, "b.png", "blue")
    rows = [{"image": i, "question": q, "answer": "x"} for i in ("a.png", "b.png") for q in ("p", "q")]
    suite = load(write_rows(tmp_path / "d.jsonl", *rows))
    assert suite.derived_ids and len(set(ids(suite))) == 4
    backwards = load(write_rows(tmp_path / "e.jsonl", *rows[::-1], rows[0]))
    assert ids(backwards)[:4] == ids(suite)[::-1] and ids(backwards)[4] == ids(suite)[0] + "#2"


def test_a_task_of_the_user(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": "a"} for i in range(5)]
    Dataset.from_list(rows).to_parquet(tmp_path / "d.parquet")
    file = tmp_path / "mine.yaml"
    file.write_text(YAML.format(file=tmp_path / "d.parquet", kind="generate_until"))
    suite = load(file, limit=3)
    assert len(suite) == 3 and suite.available == 5 and suite.derived_ids and suite.max_tokens == 8
    assert suite.name == "mine" and suite.scoring == "as written" and str(tmp_path / "d.parquet") in suite.source
    file.write_text(YAML.format(file=tmp_path / "d.parquet", kind="loglikelihood"))
    with pytest.raises(UserError, match="output_type loglikelihood; only generate_until works"):
        load(file)


def test_unknown_suites() -> None:
    for suite in ("nothing.yaml", "nothing.jsonl"):
        with pytest.raises(UserError, match=f"{suite} does not exist"):
            load(suite)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: x\n  y: [", "can't be loaded: "),
        ("task: x\noutput_type: generate_until", "is not a task file: it has no dataset_path; .*eval/tasks"),
        ("task: x\ndataset_path: json\ndataset_kwargs: 3", "a key has a value of the wrong kind .*eval/tasks"),
    ],
)
def test_broken_task_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match=rf"bad\.yaml .*{message}"):
        load(tmp_path / "bad.yaml")


def test_bad_plain_data(tmp_path: Path) -> None:
    picture(tmp_path, "a.png")
    row = {"id": 1, "image": "a.png", "question": "q", "answer": "a"}
    with pytest.raises(UserError, match=r"1 ids repeat in .*d\.jsonl, e.g. '1'"):
        load(write_rows(tmp_path / "d.jsonl", row, row))
    with pytest.raises(UserError, match="has no answer"):
        load(write_rows(tmp_path / "d.jsonl", row, {**row, "answer": ""}))
    with pytest.raises(UserError, match="gone.png"):
        load(write_rows(tmp_path / "d.jsonl", {**row, "image": "gone.png"}))
    with pytest.raises(UserError, match="is empty"):
        load(write_rows(tmp_path / "d.jsonl"))
    with pytest.raises(UserError, match="is already data"):
        load(write_rows(tmp_path / "d.jsonl", row), tmp_path / "d.jsonl")


def test_the_world_needs_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLMCOMPRESS_DATA", raising=False)
    model = checkpoint(tmp_path / "model")
    with pytest.raises(UserError, match=r"no data is bundled with .*model; give data \(--data FILE"):
        load_suite(None, candidate=model, baseline=model)
    with pytest.raises(UserError, match="no data for world: give --data"):
        load_suite("world", candidate=model, baseline=model)
    with pytest.raises(UserError, match="has no samples with"):
        load("world_count", write_rows(tmp_path / "d.jsonl", {"question": "q", "answer": "a", "family": "f"}))
    with pytest.raises(UserError, match="has no column family; it has answer, question"):
        load("world_count", write_rows(tmp_path / "e.jsonl", {"question": "q", "answer": "a"}))
