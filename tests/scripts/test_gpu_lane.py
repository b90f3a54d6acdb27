"""The lane to a machine with a GPU: what fails there without a word if it is wrong here."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path

import pytest

from tests.kit.places import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from gpu import check, lane

PARTS = '''
"""Parts of a step that tests have written."""

def run(place, what):
    with open(place.work / "calls", "a") as calls:
        calls.write(what + "\\n")
    return {"what": what}
'''


def code(kind: int, capability: int, content: bytes) -> bytes:
    """Code for a GPU as it lies in a fat binary, by the layout of `lane.entries`."""
    return (
        struct.pack("<HHIQ", kind, 0, 64, len(content)).ljust(28, b"\0")
        + struct.pack("<I", capability).ljust(36, b"\0")
        + content
    )


def binary(*codes: bytes) -> bytes:
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, codes))) + b"".join(codes)


def test_pruning_keeps_hoppers_code_and_the_place_of_everything() -> None:
    """Another generation's, PTX, and kernels that no step runs become zeros; bytes around them stay where they are."""
    hopper = code(2, 90, b"flash_fwd_hdim128_bf16_paged_sm90" * 9)
    others = [code(2, 80, b"x" * 50), code(1, 90, b"ptx" * 20), code(2, 90, b"flash_fwd_hdim128_fp16_paged_sm90"),
              code(2, 90, b"flash_fwd_hdim256_bf16_sm90"), code(2, 90, b"flash_fwd_hdim64_bf16_softcap_sm90")]  # fmt: skip
    chance = struct.pack("<I", 0xBA55ED50) + b"no header at all"  # the magic number within other data
    library = b"before" + chance + binary(others[0], hopper) + b"between" + binary(*others[1:]) + b"after"
    content = lane.pruned(library)
    zeroed = [each[:64] + bytes(len(each) - 64) for each in others]
    assert content == b"before" + chance + binary(zeroed[0], hopper) + b"between" + binary(*zeroed[1:]) + b"after"


def test_a_library_of_other_gpus_alone_is_refused() -> None:
    with pytest.raises(check.BadInput, match="no code for compute capability 9"):
        lane.pruned(binary(code(2, 100, b"x" * 50)))


def test_parts_are_small_enough_and_make_the_tree_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order; a damaged one is refused, and so is a Python that the wheels are not for."""
    tree = tmp_path / "tree"
    (tree / "data").mkdir(parents=True)
    (tree / "data" / "random").write_bytes(os.urandom(50_000))
    parts = lane.written(tree, tmp_path, 20_000)
    assert [part.stat().st_size <= 20_000 for part in parts] == [True] * 3
    monkeypatch.setenv("GPU_VLLM_WORK", str(tmp_path / "work"))
    monkeypatch.setattr(lane, "PYTHON", "2.7")
    with pytest.raises(check.BadInput, match="for Python 2.7"):
        lane.unpacked(parts[2].parent)
    monkeypatch.setattr(lane, "PYTHON", "{}.{}".format(*sys.version_info))
    assert lane.unpacked(parts[2].parent) is None
    whole = parts[0].read_bytes()
    parts[0].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(check.BadInput, match="is damaged"):
        lane.unpacked(parts[0].parent)
    parts[0].write_bytes(whole)
    assert lane.unpacked(parts[0].parent) is None
    for _ in range(2):  # a further call with a part finds all there
        made = lane.unpacked(parts[1].parent)
        assert made is not None
        assert (made / "tree/data/random").read_bytes() == (tree / "data" / "random").read_bytes()


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("NVIDIA A100-SXM4-80GB, 81920, 580.1, 8.0", "compute capability 8.0, and the parts have code for 9.0 alone"),
        ("NVIDIA H100 MIG 1g.10gb, 9856, 580.1, 9.0", "has 10 GiB of memory; the steps need 75"),
        ("", "nvidia-smi names no NVIDIA GPU"),
    ],
)
def test_a_machine_that_can_not_run_the_steps_is_one_line(
    printed: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{printed}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    problem = lane.machine_problem(tmp_path) or ""
    assert said in problem and "\n" not in problem
    with pytest.raises(check.BadInput, match=said):
        lane.go_on(tmp_path, tmp_path / "work", ["answers"], 1.0)


def test_a_second_call_does_what_the_first_had_no_time_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes back of each call are the results of all."""
    (tmp_path / "lane_parts.py").write_text(PARTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "scripts"), str(tmp_path)]))
    parts = [check.Part("short", 0.1, (), {"what": "short"}), check.Part("long", 9, (), {"what": "long"})]
    monkeypatch.setattr(lane, "STEPS", (check.Step("made", "nothing", "lane_parts:run", parts, gpu=False),))
    work = tmp_path / "work"
    for limit, out, done in ((1.0, "first", ["made/short"]), (20.0, "second", ["made/short", "made/long"])):
        monkeypatch.setenv("OUT", str(tmp_path / out))
        lane.go_on(tmp_path, work, [], limit)
        assert [*json.loads((tmp_path / out / "gpu_vllm.json").read_text())["parts"]] == done
        assert (tmp_path / out / "logs.tar.gz").exists()
    assert (work / "calls").read_text().split() == ["short", "long"]
