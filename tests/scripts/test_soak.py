"""The soak's parts: what it sends, how it judges, how it weighs; and a short one of the real server."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys

import pytest
from PIL import Image

from tests.kit.places import DEMO_LLAVA, ROOT
from tests.kit.reduced_cases import reduced
from vlmcompress.models.data.sources import bundled, load_samples

sys.path.insert(0, str(ROOT / "scripts" / "measure"))
sys.path.insert(0, str(ROOT / "scripts" / "soak"))
from soaking import malformed, memory
from soaking.client import Choice, Reply, read
from soaking.traffic import DELIVERIES, KINDS, MOST_IMAGES, conversations, traffic
from soaking.verdict import judge

LOGPROBS = [{7: -0.1, 8: -2.5}, {5: -0.6, 6: -0.8}, {2: -0.01, 9: -5.0}]


def reply(tokens: list[int], scores: tuple[float, ...] = (), finish: str = "stop", **extra) -> Reply:
    return Reply(200, "", [Choice(tokens, finish, list(scores))], **{"prompt_tokens": 20, **extra})


REFERENCE = Reply(200, "", [Choice([7, 5, 2], "stop", [-0.1, -0.6, -0.01], LOGPROBS)], 20)


@pytest.mark.parametrize(
    ("received", "answer"),
    [
        (reply([7, 5, 2]), "equal"),
        (reply([7, 5, 2], (-0.2, -0.5, 0.0)), "equal"),
        (reply([7, 5, 2], (-0.1, -1.2, 0.0)), "wrong"),  # right by luck
        (reply([7, 6, 1, 1, 1]), "tie"),  # less likely by 0.2; nothing after it counts
        (reply([8, 5, 2]), "wrong"),  # less likely by 2.4
        (reply([7, 3, 2]), "wrong"),  # not among the likely ones at all
        (reply([7, 5]), "wrong"),
        (reply([7, 5, 2, 2]), "wrong"),
        (reply([7, 5, 2], finish="length"), "wrong"),
        (reply([7, 5, 2], prompt_tokens=21), "wrong"),
        (reply([7, 5], finish="", left=True), "equal"),
        (reply([7, 5, 2, 2], finish="", left=True), "wrong"),
        (Reply(200, left=True), "unseen"),
        (Reply(200), "wrong"),
    ],
)
def test_verdict(received: Reply, answer: str) -> None:
    assert judge(received, REFERENCE, margin=0.5).answer == answer


def test_one_wrong_choice_is_a_wrong_answer() -> None:
    right, wrong, tie = ([7, 5, 2], [8], [7, 6])
    for second, answer in ((right, "equal"), (tie, "tie"), (wrong, "wrong")):
        both = Reply(200, "", [Choice(right, "stop"), Choice(second, "stop")], 20)
        assert judge(both, REFERENCE, margin=0.5).answer == answer


def test_traffic_repeats_itself_and_is_the_same_for_the_same_seed() -> None:
    asks = traffic(2000, 3)
    assert asks == traffic(2000, 3) != traffic(2000, 4)
    first = list(dict.fromkeys(ask.number for ask in asks))
    assert first == list(range(len(first))) and 450 < len(first) < 750
    assert {ask.delivery for ask in asks} == set(DELIVERIES)
    assert {ask.patience for ask in asks if ask.delivery == "aborted"} == {0, 1, 3}
    assert not any(ask.patience for ask in asks if ask.delivery != "aborted")


def test_conversations_are_of_every_kind_and_share_images() -> None:
    samples = load_samples(bundled(DEMO_LLAVA, "validation"), samples=200, seed=0)
    talks = conversations(samples, 120, 1)
    assert talks == conversations(samples, 120, 1)
    assert {each.kind for each in talks} == set(KINDS)
    images = [[part for turn in each.messages for part in turn["content"] if part["type"] == "image_url"]
              for each in talks if each.kind != "later turn"]  # fmt: skip
    assert {len(images_of) for images_of in images} == set(range(MOST_IMAGES + 1))
    addresses = [part["image_url"]["url"] for images_of in images for part in images_of]
    assert 0.4 < len(set(addresses)) / len(addresses) < 0.8
    opened = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in set(addresses)]
    assert {image.mode for image in opened} == {"RGB", "L", "RGBA", "P"}
    assert {image.format for image in opened} == {"PNG", "JPEG", "WEBP"}
    assert len({image.size for image in opened}) > 4


@pytest.mark.parametrize(
    "what", ["empty image", "text as image", "cut off image", "damaged image", "huge image"], ids=str
)
def test_malformed_images_are_ones_to_pillow(what: str) -> None:
    body = json.loads(malformed.bodies("m")[what])
    data = base64.b64decode(body["messages"][0]["content"][0]["image_url"]["url"].partition(",")[2])
    with pytest.raises((OSError, SyntaxError, Image.DecompressionBombError)):
        Image.open(io.BytesIO(data)).load()


def test_answers_and_chunks_are_read_alike() -> None:
    """The whole answer of two choices, and the same in pieces that arrive mixed."""
    token = {"logprob": -0.5, "top_logprobs": [{"token": "token_id:4", "logprob": -0.5}]}
    whole, pieces = Reply(), Reply()
    read({"usage": {"prompt_tokens": 9}, "choices": [
        {"index": 0, "token_ids": [4, 4], "finish_reason": "stop", "logprobs": {"content": [token, token]}},
        {"index": 1, "token_ids": [4], "finish_reason": "length", "logprobs": {"content": [token]}}]}, whole)  # fmt: skip
    choice = {"token_ids": [4], "logprobs": {"content": [token]}}
    for chunk in ([{"index": 1, **choice}], [{"index": 0, **choice}], [{"index": 0, "finish_reason": "stop", **choice}],
                  [{"index": 1, "finish_reason": "length", "token_ids": []}]):  # fmt: skip
        read({"choices": chunk}, pieces)
    read({"choices": [], "usage": {"prompt_tokens": 9}}, pieces)
    assert whole == pieces
    assert whole.choices[0].best == [{4: -0.5}] * 2


def test_memory_of_a_session() -> None:
    """A process that takes 80 MB, in a session of its own, is seen; ours is not."""
    hold = "import sys; x = bytearray(80_000_000); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          start_new_session=True) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        assert 80 < memory.resident_mb(process.pid) < 110
        process.communicate()
    assert memory.resident_mb(process.pid) == 0


def test_memory_is_flat_when_it_stops_growing() -> None:
    fills = [(done, 1000 + min(done, 400)) for done in range(0, 1001, 10)]
    leaks = [(done, 1000 + done / 10) for done in range(0, 1001, 10)]
    assert memory.growth_mb(fills, 1000) == 0 and memory.flat(fills, 1000)
    assert memory.growth_mb(leaks, 1000) == pytest.approx(30, abs=1) and not memory.flat(leaks, 1000)
    assert memory.growth_mb(fills[:40], 1000) is None  # too short to say


@pytest.mark.slow
@pytest.mark.engine
def test_a_short_soak_of_the_real_server(tmp_path) -> None:
    """Of a reduced checkpoint: without a reducer vLLM 0.32 may end where requests are preempted (`plugin/_resuming.py`)."""
    model = reduced(DEMO_LLAVA, tmp_path / "model", "divprune:0.5")
    command = [sys.executable, str(ROOT / "scripts/soak/soak.py"), str(model), "--requests", "120", "--clients", "6"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["wrong"], report["error"], report["problems"]) == (0, 0, 0)
    assert report["equal"] > 70 and report["malformed"]
    assert report["server"]["prefix_cache_hits_total"] > 0 and report["server"]["mm_cache_hits_total"] > 0
