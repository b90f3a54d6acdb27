"""Targets: every row is complete, and the facts that users meet first are right."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from tests.kit.places import ROOT
from vlmcompress.numerics import ActFormat, Format, Scheme
from vlmcompress.recipe import SCHEMES, targets
from vlmcompress.recipe.targets import Limit
from vlmcompress.utils import registry
from vlmcompress.utils.errors import UserError

NAMES = targets.REGISTRY.names()
W4 = Scheme(Format("int", 4, 128))
W3 = Scheme(Format("int", 3, 128))
W8 = Scheme(Format("int", 8, -1))
INT8 = Scheme(Format("int", 8, -1), ActFormat("int", 8, dynamic=True))
W4A8 = Scheme(Format("int", 4, -1), ActFormat("int", 8, dynamic=True))
FP8 = Scheme(Format("float", 8, -1), ActFormat("float", 8, dynamic=True))


@pytest.mark.parametrize("name", NAMES)
def test_default_schemes_exist_and_run(name):
    target = targets.get_target(name)
    assert set(target.schemes) == {None, "memory", "throughput"}
    for scheme in target.schemes.values():
        module = SCHEMES.get(scheme)
        assert target.format_problem(targets.format_key(module.scheme(module.OPTIONS()))) is None


@pytest.mark.parametrize("name", NAMES)
def test_refusals_name_a_scheme_that_runs(name):
    target = targets.get_target(name)
    reasons = {**target.no_kernel, **target.weight_only}
    for reason in reasons.values():
        assert "use " in reason or "set options" in reason, reason
    for key in ("w4a16", "w8a16", "wNa16", "w8a8-int", "w8a8-fp", "w8a8-fp-static", "w4a8-int", "w4a4-fp", "w4a16-fp"):
        assert target.format_problem(key) == (f"{target.title} {reasons[key]}" if key in reasons else None)
        assert (target.kernel(key) is None) == (key in target.no_kernel)
    assert not set(target.kernels) & set(target.no_kernel)
    assert set(target.weight_only) <= set(target.kernels)


@pytest.mark.parametrize("name", NAMES)
def test_figures_of_the_machine(name):
    """Each is there or is listed as missing, and they are of a size and an order that machines have."""
    target = targets.get_target(name)
    if target.is_cpu:
        assert target.memory is None and target.bandwidth is None and not target.rates
        return
    assert target.memory and 16 <= target.memory <= 512
    assert target.bandwidth and 100 <= target.bandwidth <= 20_000
    assert set(target.rates) <= {"bf16", "fp8", "int8", "fp4"}
    assert any(word in target.source for word in ("data sheet", "whitepaper", "Brief")), "a figure has a source"
    if not {"bf16", "int8"} <= set(target.rates):
        assert "left out" in target.source
    native = {"fp8": (8, 9), "fp4": (10, 0)}  # tensor cores have the type from this capability on
    for kind, first in native.items():
        if target.capability:
            assert (kind in target.rates) == (target.capability >= first)
    ordered = [target.rates[kind] for kind in ("bf16", "fp8", "fp4") if kind in target.rates]
    assert ordered == sorted(set(ordered))
    assert target.rates.get("bf16", 0) < target.rates.get("int8", float("inf"))


@pytest.mark.parametrize(
    ("scheme", "key"),
    [
        (W4, "w4a16"),
        (W3, "wNa16"),
        (W8, "w8a16"),
        (INT8, "w8a8-int"),
        (W4A8, "w4a8-int"),
        (FP8, "w8a8-fp"),
        (None, "bf16"),
    ],
)
def test_format_key(scheme, key):
    assert targets.format_key(scheme) == key


@pytest.mark.parametrize(("name", "scheme"), [("h100", "fp8"), ("a100", "gptq-plus"), ("cpu", "int8")])
def test_default_scheme(name, scheme):
    assert targets.get_target(name).schemes[None] == scheme


def test_speeds_of_the_cpu_are_the_measured_ones():
    """Medians of requests a second with twelve clients over those of BF16, from the results that docs/results.md shows."""
    rows = json.loads((ROOT / "eval/serving.json").read_text())["quantized"]["rows"]
    rates = {
        variant: statistics.median(
            row["request_throughput"] for row in rows if (row["variant"], row["load"]) == (f"{variant} full", "load")
        )
        for variant in ("bf16", "int8", "rtn")
    }
    ratios = [round(rates[variant] / rates["bf16"], 2) for variant in ("bf16", "int8", "rtn")]
    assert ratios == [targets.get_target("cpu").speeds[key] for key in ("bf16", "w8a8-int", "w4a16")]


def test_gpus_without_cuda_are_no_cpus():
    assert [name for name in NAMES if targets.get_target(name).is_cpu] == ["cpu"]
    assert targets.get_target("mi300x").capability is None


def test_a_checkpoint_that_gains_nothing_still_has_a_kernel():
    a100 = targets.get_target("a100")
    assert a100.kernel("w8a8-fp") == "Humming" and a100.format_problem("w8a8-fp")
    assert targets.get_target("b200").kernel("w8a8-int") is None


def test_a100_refuses_fp8_and_names_an_alternative():
    (problem,) = targets.target_problems("a100", FP8)
    assert re.search("A100 80GB has no FP8 tensor cores.* use int8 for throughput or gptq-plus for memory", problem)


def test_vision_and_kv_cache_are_checked_too():
    assert targets.target_problems("a100", W4, "fp8", {"vision tower": FP8})[0].startswith("vision tower: A100")
    assert not targets.target_problems("h100", W4, "fp8", {"vision tower": FP8})


def test_cpu_refuses_eight_bit_weights_only_and_three_bits():
    assert "use int8" in targets.target_problems("cpu", W8)[0]
    assert "options.bits" in targets.target_problems("cpu", W3)[0]


def test_a_machine_without_kernels_for_experts_names_no_scheme_for_them():
    """Other reasons name another scheme, which it would refuse next."""
    for scheme in (W4, W8, W4A8, FP8):
        assert targets.get_target("cpu").experts_problem(scheme).endswith(targets.get_target("cpu").no_experts)


def test_unknown_target_has_a_suggestion():
    with pytest.raises(UserError, match="unknown target 'h10'; did you mean 'h100'"):
        targets.get_target("h10")


def test_the_memory_limit_of_a_target():
    limit = Limit(out_multiple=32, in_multiple=32, group_multiple=2)
    assert limit.problem(64, 64, 32) is None
    assert limit.problem(64, 64, -1) is None
    assert "in_features 48" in (limit.problem(64, 48, 16) or "")
    assert "out_features 40" in (limit.problem(40, 64, 32) or "")
    assert "group_size 33" in (limit.problem(64, 64, 33) or "")


def test_another_package_adds_a_machine(monkeypatch, tmp_path):
    """By an entry point whose module holds a `TARGET`."""
    (tmp_path / "our_machine.py").write_text(
        "from vlmcompress.recipe import targets\nTARGET = targets.get_target('h100')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("our-machine", "our_machine", "vlmcompress.recipe.targets")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.setattr(targets, "REGISTRY", registry.Registry(point.group, "target", targets.TARGETS))
    assert {*targets.REGISTRY.names()} == {*NAMES, "our-machine"}
    assert targets.get_target("Our_Machine").title == "H100"


def test_targets_import_no_torch():
    code = "import sys; from vlmcompress.recipe import targets; targets.get_target('h100'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
