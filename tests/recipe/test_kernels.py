"""The kernels and refusals of every target against vLLM's own choice on a pretended platform.

vLLM's answers are kept in a file, which a slow test asks for again: they change with the pinned vLLM alone.
"""

from __future__ import annotations

import json

import pytest

from tests.kit.places import ROOT
from tests.kit.pretended import CLASSES, FORMATS, MACHINES, SHAPE, SHAPES, WORKAROUND, Answers, asked, machine_of, word
from vlmcompress.export.formats.compressed_tensors import scheme_of
from vlmcompress.recipe import targets
from vlmcompress.recipe.targets import format_key

NAMES = targets.REGISTRY.names()
# Formats that vLLM finds a kernel for and that fail in it, or compute something else: the choice can't show that.
FAIL = {(key, machine) for key in ("w8a8-int", "w4a16-mx") for machine in ("10.0", "11.0", "12.0")} | {
    ("w8a8-fp-static", "cpu")
}
OTHERS = {"w4a8-int": "packed g128"}  # what others write, of a format that we write otherwise


@pytest.fixture(scope="module")
def answers() -> Answers:
    return json.loads((ROOT / "eval" / "kernels.json").read_text())


@pytest.mark.slow
@pytest.mark.engine
def test_the_answers_are_vllms(answers):
    pytest.importorskip("vllm")
    assert answers == asked(MACHINES)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_those_that_vllm_picks(answers, name):
    target = targets.get_target(name)
    for key in FORMATS:
        picked = ours(answers, name, key)
        if key in target.no_kernel:
            assert (key, machine_of(target)) in FAIL or not any(picked.values()), f"{key}: vLLM runs it in {picked}"
            continue
        words = {word and word.removesuffix(" (16 bits)") for word in picked.values()}
        stated = {kernel for kernel in CLASSES if kernel in (target.kernel(key) or "")}
        assert words == stated, f"{key}: vLLM picks {picked}, the target says {target.kernel(key)}"


@pytest.mark.parametrize("name", NAMES)
def test_formats_computed_in_16_bits_are_labelled(answers, name):
    target = targets.get_target(name)
    in_16_bits = {
        key
        for key in FORMATS
        if any(picked and picked.endswith("(16 bits)") for picked in ours(answers, name, key).values())
    }
    assert in_16_bits == set(target.weight_only)


def test_vllms_wheel_for_gpus_builds_checkpoints_with_these_kernels():
    """Its compiled libraries decided, next to a driver that answers nothing (`scripts/gpu_vllm`, step `built`). FlashInfer and
    DeepGEMM, which the lane leaves out, would be taken for FP8 in blocks and NVFP4."""
    compared = 0
    for capability, rows in json.loads((ROOT / "eval" / "built.json").read_text()).items():
        target = next(each for each in map(targets.get_target, NAMES) if machine_of(each) == capability)
        assert [name for name, row in rows.items() if "refused" in row] == (["w4a8-fp8"] if capability != "9.0" else [])
        for name, row in rows.items():
            key = row.get("format")
            if key is None or key in ("w8a8-fp-block", "w4a4-fp") or (key, capability) in FAIL:
                continue
            compared += 1
            words = {(word({"kernel": kernel}, key) or "").removesuffix(" (16 bits)") for kernel in row["kernels"]}
            assert words and all(each in (target.kernel(key) or "") for each in words), (capability, name)
    assert compared == 51


def test_other_w4a8_is_computed_in_16_bits_everywhere(answers):
    for machine, formats in answers.items():
        assert (word(formats["w4a8-int"]["packed g128"], "w4a8-int") or "").endswith("(16 bits)"), machine


def test_the_workaround_for_the_int8_kernel(answers):
    assert answers["10.0"]["w8a8-int"]["rows"]["kernel"] == WORKAROUND
    assert answers[f"10.0 without {WORKAROUND}"]["w8a8-int"]["rows"]["kernel"] == "TritonInt8ScaledMMLinearKernel"
    assert f"VLLM_DISABLED_KERNELS={WORKAROUND}" in (targets.get_target("b200").format_problem("w8a8-int") or "")


def test_every_format_of_a_target_is_covered():
    for name in NAMES:
        target = targets.get_target(name)
        assert {*target.kernels, *target.no_kernel, *target.weight_only} - {"bf16"} == set(FORMATS)


def test_formats_are_what_they_are_called():
    for key, kinds in FORMATS.items():
        if key in ("w8a8-fp-block", "w4a4-fp", "w4a16-fp"):  # not written by `exporters`
            continue
        for kind, config in kinds.items():
            if kind != OTHERS.get(key):
                assert format_key(scheme_of(config["config_groups"]["group_0"])) == key


def ours(answers: Answers, name: str, key: str) -> dict[str, str | None]:
    """Kind of a format that we may write, and whose shape the target takes -> the word of the kernel."""
    target = targets.get_target(name)
    limit = target.limits.get(key, targets.Limit())
    kinds = {}
    for kind, answer in answers[machine_of(target)][key].items():
        group = FORMATS[key][kind]["config_groups"]["group_0"]["weights"].get("group_size") or -1
        problem = limit.problem(*SHAPES.get(kind, SHAPE), group)
        if problem:
            assert word(answer, key) is None, f"{key} {kind}: the target says {problem}, vLLM runs it"
        elif kind != OTHERS.get(key):
            kinds[kind] = word(answer, key)
    return kinds
