"""The table of engines and formats has what was run and what sources state, and everything that names an engine reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.kit.launching import FORMATS, QWEN, REDUCERS, facts
from tests.kit.places import ROOT
from vlmcompress.export import readers
from vlmcompress.export.readers import ENGINES, LoadFacts, QuantizedGroup
from vlmcompress.utils.errors import UserError

MEASURED = json.loads((ROOT / "eval" / "readers.json").read_text())


def of_file(values: dict[str, Any]) -> LoadFacts:
    """Facts as they are stored in files of measurements."""
    return LoadFacts(
        "OUT", **values | {"groups": {key: QuantizedGroup(**group) for key, group in values["groups"].items()}}
    )


KNOWN = {case: of_file(values) for case, values in MEASURED["facts"].items()}
RUNS = [
    pytest.param(run["versions"], reader, results, id=f"{reader}-{run['versions'][reader]}-{at}")
    for at, run in enumerate(MEASURED["runs"])
    for reader, results in run["results"].items()
    if reader in ENGINES
]


@pytest.mark.parametrize(("versions", "reader", "results"), RUNS)
def test_the_table_records_what_ran(versions: dict[str, str], reader: str, results: dict[str, str]) -> None:
    """Oracle: the libraries themselves (eval/readers.json). What the table marks as loading has loaded in the versions
    that are named; what is said not to load has not. Experts of two families transformers loads alone, which is not said."""
    for case, result in results.items():
        verdict = readers.engine_support(reader, KNOWN[case])
        needs = [Requirement(need) for need in verdict.needs]
        if KNOWN[case].experts and verdict.loader:
            continue
        fits = all(need.name not in versions or versions[need.name] in need.specifier for need in needs)
        expected = verdict.reason is None and not verdict.loader and fits
        assert (result == "loads") is expected, f"{reader} {versions[reader]}, {case}: {result}, {verdict}"


def test_zero_points_and_dequantizing() -> None:
    """What the note on cards states: from 5.23 on zero points load only dequantized, and so do no two schemes."""
    for run in MEASURED["runs"]:
        new = run["versions"]["transformers"].startswith(("5.23", "5.24"))
        for case, result in run["results"]["dequantize=True"].items():
            checkpoint = KNOWN[case]
            if checkpoint.experts or checkpoint.embeddings:
                continue
            assert (result == "loads") is (not new or not checkpoint.several), f"{run['versions']}, {case}: {result}"


def test_the_table_records_what_vllm_ran() -> None:
    """Oracle: eval/formats.json. What ran is marked as loading, and nothing else is. vLLM's CPU build lacks kernels
    for some of what it loads on GPUs."""
    rows = [row for row in json.loads((ROOT / "eval" / "formats.json").read_text()) if "vllm" in row]
    for row in rows:
        loads = readers.engine_support("vllm", of_file(row["facts"])).reason is None
        assert loads or row["vllm"] != "runs", row
    assert sum(readers.engine_support("vllm", of_file(row["facts"])).reason is not None for row in rows) == 2


# engine -> made-up formats that it loads; by the sources that the table names, read by hand
LOADS = {
    "vllm": set(FORMATS) - {"gptq-2", "gptq-v2-asym", "gguf", "openvino", "unheard-of"},
    "transformers": set(FORMATS) - {"gptq-mixed", "modelopt", "modelopt-fp8", "gguf", "openvino", "unheard-of"},
    "gptqmodel": set(),
    "sglang": set(FORMATS)
    - {"w3", "w4a8", "mxfp4", "embeddings", "gptq-2", "gptq-v2-asym", "modelopt", "gguf", "openvino", "unheard-of"},
    "lmdeploy": {"bf16", "w4-g128", "awq", "gptq"},
    "tensorrt-llm": {"bf16", "fp8", "nvfp4", "nvfp4-fp8", "modelopt", "modelopt-fp8"},
    "llamacpp": {"gguf"},
    "openvino": {"openvino"},
    "mlx": {"bf16", "w4-g64", "w4-g128", "fp8", "fp8-static", "nvfp4", "nvfp4-fp8"},
}


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_load_what_the_table_says(engine: str) -> None:
    assert {form for form in FORMATS if readers.engine_support(engine, facts(form)).reason is None} == LOADS[engine]
    for form in FORMATS:
        reason = readers.engine_support(engine, facts(form)).reason
        assert reason is None or (reason[0].islower() and not reason.endswith(".") and "\n" not in reason)


def test_gptqmodel_is_named_for_families_with_its_names_only() -> None:
    assert readers.engine_support("gptqmodel", facts("gptq-v2-asym")).reason == (
        f"it finds no weights of {QWEN} under the names that its files have"
    )
    same = facts("gptq-v2-asym", architecture="Qwen3VLForConditionalGeneration")
    assert readers.engine_support("gptqmodel", same).reason is None


def test_reducers() -> None:
    """vLLM with the plugin, transformers and, for a few methods, MLX; `engine: transformers` leaves vLLM out."""
    for kind in REDUCERS:
        loads = {name for name, each in readers.verdicts(facts("w4-g128", reducer=kind)).items() if each.reason is None}
        others = {"blind": {"vllm", "mlx"}, "on demand": {"vllm", "mlx"}, "unserved": set()}
        assert loads == {"transformers"} | others[kind]
    assert "vlmcompress" in readers.engine_support("vllm", facts("bf16", reducer="blind")).needs


def test_evidence_is_there() -> None:
    """Each cell has its evidence; what it names as run is a file of this repository."""
    for engine in ENGINES.values():
        for cell in engine.formats.values():
            if isinstance(cell, str):
                continue
            kind, _, where = cell.evidence.partition(": ")
            assert kind in ("run", "read") and (kind == "read" or (ROOT / where).is_file()), cell


def test_a_summary_begins_with_engines_that_are_not_installed() -> None:
    text = readers.readers_summary(facts("gptq-v2-asym"))
    assert text.startswith("not vLLM: of gptq-v2 it reads only 4 and 8 bits without zero points; transformers (")
    assert "gptqmodel" in text and "optimum" in text
    assert readers.readers_summary(facts("w4-g128")).startswith("vLLM; transformers (transformers>=5.15, ")
    assert "SGLang, by its source" in readers.readers_summary(facts("w4-g128"))
    with pytest.raises(UserError, match="no engine is known to load it"):
        readers.readers_summary(facts("unheard-of"))


@pytest.mark.parametrize(
    ("form", "engine", "message"),
    [
        (
            "gptq-v2-asym",
            "vllm",
            "vLLM does not load .*: of gptq-v2 it reads only 4 and 8 bits without zero points; do",
        ),
        ("gptq-2", "vllm", "of gptq it reads only 4 and 8 bits"),
        ("modelopt-fp8", "transformers", "it loads codes without their scales; do"),
        ("w4-g128", "llamacpp", "llama.cpp does not load .*: it reads GGUF, not compressed-tensors"),
        ("bf16", "openvino", "it reads graphs of its own, not bf16"),
        ("gguf", "vllm", "not known to read the format gguf"),
    ],
)
def test_an_engine_is_refused_before_it_starts(form: str, engine: str, message: str, tmp_path: Path) -> None:
    config = {"architectures": [QWEN]} | ({"quantization_config": FORMATS[form]} if FORMATS[form] else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        readers.require_readable(tmp_path, [engine], "do something else")


@pytest.mark.parametrize("content", ["{", "[]", '{"quantization_config": {"quant_method": "quip"}}', None])
def test_unknown_combinations_are_left_to_the_engine(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    readers.require_readable(tmp_path, ["vllm"], "do something else")


@pytest.mark.parametrize(("folder", "name"), [("x y", "x-y"), ("a.b_c-d", "a.b_c-d"), ("---", "model")])
def test_a_folder_has_one_name_on_servers(folder: str, name: str, tmp_path: Path) -> None:
    assert readers.served_name(tmp_path / folder) == name


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        (r"-:(?:model\.language_model\.layers\.0\.linear_attn\.in_proj_b)$", True),
        (r"+:model\.language_model\.layers\.0\.mlp\.down_proj", False),
        (r"-:(?:model\.vision_tower\.encoder\.layers)(?:\..*)?$", False),
        ("-:.*mtp.*", False),
        (r"-:(?:lm_head|language_model\.lm_head)$", False),
    ],
)
def test_optimum_reads_no_patterns(pattern: str, kept: bool) -> None:
    """It takes all layers of the decoder blocks for quantized, as Qwen3.5's small projections show, which are not."""
    block = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "dynamic": {pattern: {}}}
    read = readers.gather_facts({"architectures": [QWEN], "quantization_config": block}, "OUT")
    assert read.kept_layers is kept
    assert (readers.engine_support("transformers", read).reason is None) is not kept
    assert readers.engine_support("vllm", read).reason is None
