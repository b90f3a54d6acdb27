"""`vlmcompress plan` as a user sees it: verdicts, tables, JSON and bad input."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil

import pytest
from safetensors.torch import load_file

from tests.kit import tiny
from tests.kit.float_models import edit
from tests.kit.published import with_real_limits
from vlmcompress import cli


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny.build(name, folder / name) for name in ("llava", "qwen3-vl", "gemma3")}


def run(capsys, *arguments):
    code = cli.main(["plan", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_text_output_recommends_settings(models, capsys):
    code, text, _ = run(capsys, models["llava"], "--target", "h100", "--reduce", "dart:0.25", "--image-size", "64x64")
    assert code == 0
    assert re.search(r"all +16 +256 +256 +528", text) and re.search(r"dart:0.25 +4 +256 +256 +516", text)
    assert "Verdict: fp8 fits (the default of H100, by its kernels" in text
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith("vlmcompress quantize")]
    assert cli.parse(shlex.split(line)[1:]).verb == "quantize"
    assert '--max-model-len 516 --max-num-seqs 1024 --limit-mm-per-prompt \'{"image":1,"video":0}\'' in text


def test_json_figures_add_up(models, capsys):
    arguments = (
        "--target",
        "h100",
        "--reserve",
        "1GB",
        "--text-tokens",
        "100",
        "--out-tokens",
        "28",
        "--image-size",
        "64x64",
        "--json",
    )
    data = json.loads(run(capsys, models["qwen3-vl"], *arguments)[1])
    assert data["ok"] and data["recommended"] == "fp8"
    memory = data["memory"]
    assert memory["token_bytes"] == 2 * 2 * 32 * 2 * 2  # keys and values, 2 heads of 32, 16 bits, 2 blocks
    load = data["loads"]["all"]
    assert (
        load["context"] == load["visual"] + 128
        and load["bytes"] == -(-load["context"] // 16) * 16 * memory["token_bytes"]
    )
    assert memory["encoder_cache"] == 8192 * 128 * 2 * 2  # deepstack doubles an embedding
    for row in data["formats"]:
        if row["fits"]:
            assert row["cache_space"] == int(0.92 * 80e9) - row["device_weights"] - memory["encoder_cache"] - 10**9
            requests = row["requests"]["all"]
            blocks = row["cache_space"] // memory["block_bytes"]
            assert requests == pytest.approx(blocks / (load["bytes"] // memory["block_bytes"]))


def test_a_cache_of_a_given_size(models, capsys):
    arguments = ("--kv-cache-memory", "1GiB", "--image-size", "64x64", "--target", "cpu", "--json")
    single = json.loads(run(capsys, models["llava"], *arguments)[1])
    eight = json.loads(run(capsys, models["llava"], *arguments, "--kv-cache", "fp8")[1])
    assert {row["cache_space"] for row in single["formats"] if row["fits"]} == {2**30}
    assert single["memory"]["token_bytes"] == 2 * eight["memory"]["token_bytes"]
    assert eight["quantize"].count("--kv-cache fp8") == 1 and any("calibrates" in note for note in eight["notes"])


@pytest.mark.parametrize("family", ["gemma4", "gemma4-unified"])
def test_two_limits_that_differ_are_named(family, tmp_path, capsys):
    """vLLM takes Gemma 4's from config.json, the processor has its own; `resize` sets both."""
    folder = with_real_limits(family, tiny.build(family, tmp_path / "model"))
    for limit, code in ((280, 0), (70, 2)):
        edit(folder, "config.json", vision_config={"default_output_length": limit, "num_soft_tokens": limit})
        assert cli.main(["check", str(folder), "--scheme", "rtn", "--set", "options.group_size=64"]) == code
        assert ("70 in vision_config, which vLLM counts by" in capsys.readouterr().out) is (code == 2)
    assert cli.main(["check", str(folder), "--scheme", "none", "--reduce", "resize:tokens=140"]) == 0


def test_a_processor_that_allows_far_more_than_the_card_recommends(tmp_path, capsys):
    """As Qwen2.5-VL ships it: `plan` and `check` say which figure its card recommends, unless the recipe lowers the limit."""
    folder, note = tiny.build("qwen2_5_vl", tmp_path / "model"), "the cards of qwen2-5-vl recommend 1,280"

    def allow(tokens):
        path = folder / "processor_config.json"
        content = json.loads(path.read_text())
        content["image_processor"]["size"] = {"shortest_edge": 4 * 28**2, "longest_edge": tokens * 28**2}
        path.write_text(json.dumps(content))

    def said(verb, *arguments):
        cli.main([verb, str(folder), *arguments])
        return "".join(capsys.readouterr())

    calls = [("plan", "--image-size", "64x64"), ("check", "--image-size", "64x64"), ("check", "--scheme", "rtn")]
    allow(16384)
    for call in calls:
        text = said(*call)
        assert text.count(note) == 1 and "up to 16,384 tokens" in text and "--reduce resize:tokens=1280" in text
    assert note not in said("check", "--scheme", "rtn", "--reduce", "resize:tokens=1280")
    allow(1280)
    assert not any(note in said(*call) for call in calls)


def test_a_model_that_does_not_fit_is_reported(models, capsys):
    code, text, _ = run(capsys, models["llava"], "--memory", "1GB", "--target", "rtx4090")
    assert code == 2 and "nothing fits" in text and "which needs a device of" in text
    need = re.search(r"needs a device of ([\d.]+) GB", text)
    code, text, _ = run(capsys, models["llava"], "--memory", f"{float(need[1]) + 0.02}GB", "--target", "rtx4090")
    assert code == 0 and "fits" in text


def test_a_cpu_plan_uses_this_machine_and_ranks_by_measured_speed(models, capsys):
    """INT8 first, as it was measured to be fastest; 4 bits never before 16, which are faster. The cache's space is set."""
    data = json.loads(run(capsys, models["llava"], "--target", "cpu", "--json")[1])
    assert data["memory"]["device"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert data["recommended"] == "int8" and "fastest measured" in data["reason"]
    text = run(capsys, models["llava"], "--target", "cpu", "--memory", "4GB", "--kv-cache-memory", "2GiB")[1]
    assert "VLLM_CPU_KVCACHE_SPACE=1 vllm serve OUT" in text  # 128 requests take less than the 2 GiB
    assert re.search(r"gptq-plus .* 0.59 times", text)


def test_without_a_machine_there_is_no_verdict(models, capsys):
    code, text, _ = run(capsys, models["llava"])
    assert code == 0 and "give it with --memory" in text


def test_notes_about_types_of_the_cache(models, capsys):
    def notes(model, *arguments):
        return "\n".join(json.loads(run(capsys, models[model], "--json", *arguments)[1])["notes"])

    assert "q_norm" in notes("llava", "--target", "h100") and "q_norm" not in notes("qwen3-vl", "--target", "h100")
    assert "int8_per_token_head" in notes("qwen3-vl", "--target", "a100")
    assert "use fp8" in notes("qwen3-vl", "--target", "h100", "--kv-cache", "fp8_e5m2")
    assert "nothing else does" in notes("qwen3-vl", "--target", "h100", "--kv-cache", "fp8")


def spoilt(models, tmp_path, part="text_config", **changed):
    folder = tmp_path / "spoilt"
    folder.mkdir()
    shutil.copy(models["llava"] / "config.json", folder)
    config = json.loads((folder / "config.json").read_text())
    config[part].update(changed)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"hidden_size": -128}, "text_config.hidden_size is -128"),
        ({"num_attention_heads": 4.5}, "num_attention_heads is 4.5"),
        ({"hidden_size": 130, "head_dim": None}, "130 is no multiple of num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"num_hidden_layers": 10**9}, "more than the"),
    ],
)
def test_absurd_configs(models, tmp_path, capsys, text, message):
    code, out, error = run(capsys, spoilt(models, tmp_path, **text), "--target", "h100")
    assert code == 2 and not out and message in error and error.count("\n") == 1


@pytest.mark.parametrize("changed", [{"image_size": -3}, {"patch_size": [14, "x"]}])
def test_absurd_towers(models, tmp_path, capsys, changed):
    code, out, error = run(capsys, spoilt(models, tmp_path, "vision_config", **changed), "--target", "h100")
    assert code == 2 and not out and "vision_config." in error and error.count("\n") == 1


@pytest.mark.parametrize(("family", "levels"), [("granite4-vision", 2), ("gemma3", 1)])
def test_the_encoder_cache_holds_all_levels(family, levels, tmp_path, capsys):
    """A Granite's decoder gets no row in the embedding's place, but one before each of two blocks."""
    folder = tiny.build(family, tmp_path / family)
    data = json.loads(run(capsys, folder, "--target", "h100", "--json")[1])
    assert data["memory"]["encoder_cache"] == 8192 * 128 * 2 * levels


@pytest.mark.parametrize(
    ("family", "text", "part"),
    [
        ("qwen3-5", {}, "mtp."),
        ("glm-ocr", {"num_hidden_layers": 16, "num_nextn_predict_layers": 1}, ".layers.16."),
    ],
)
def test_memory_of_a_draft_is_counted(family, text, part, tmp_path, capsys):
    """The head's bytes, its block's keys and values, and a state more; the config alone gives the same as the files."""
    folder, bare = tiny.build(family, tmp_path / "whole", **text), tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "config.json", bare)
    arguments = ("--images-per-request", "0", "--target", "h100", "--json")
    plain = json.loads(run(capsys, folder, *arguments)[1])
    head = sum(tensor.nbytes for name, tensor in load_file(folder / "model.safetensors").items() if part in name)
    for source in (folder, bare):
        drafting = json.loads(run(capsys, source, *arguments, "--speculative", "mtp")[1])
        # keys and values of one block with 2 heads of 32, in 16 bits
        assert drafting["speculative"] == {"method": "mtp", "tokens": 1, "weights": head, "token_bytes": 2 * 2 * 32 * 2}
        assert drafting["memory"]["token_bytes"] == plain["memory"]["token_bytes"] + 256
        weights = [(row["name"], row["device_weights"]) for row in plain["formats"] if not row["refused"]]
        with_head = {row["name"]: row["device_weights"] for row in drafting["formats"]}
        assert all(with_head[name] == bytes_ + head for name, bytes_ in weights)
    ngram = json.loads(run(capsys, folder, *arguments, "--speculative", "ngram:2")[1])
    assert ngram["memory"]["token_bytes"] == plain["memory"]["token_bytes"]
    states = [sum(group["states"] for group in row["memory"]["groups"]) for row in (plain, ngram)]
    assert states[1] == states[0] + (2 if states[0] else 0)  # of Gated DeltaNet's blocks
