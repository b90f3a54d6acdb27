"""Plans: exact sizes (oracle: what the pipeline writes), shapes that do not divide, layers left out, `check` findings."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.kit import rtn, tiny
from tests.kit.work import begun
from vlmcompress.evaluation.doctor import files as doctor
from vlmcompress.export.formats import compressed_tensors
from vlmcompress.export.write import output_specs
from vlmcompress.models import Group
from vlmcompress.numerics import NVFP4, Format, Scheme, label
from vlmcompress.quantization.inputs import derive_source
from vlmcompress.quantization.plan import make_plan, with_problems
from vlmcompress.quantization.plan import problems as problems_module
from vlmcompress.quantization.plan.examine import examine
from vlmcompress.quantization.plan.problems import shape_problems
from vlmcompress.quantization.plan.visual_tokens import visual_tokens
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import silent
from vlmcompress.utils.tensor_headers import Spec


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny.build(name, folder / name) for name in ("llava", "qwen2-5-vl")}


def recipe(model: Path, **settings):
    return resolve({"model": str(model), **settings}).recipe


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llava", {"scheme": "rtn", "options": {"group_size": 32, "symmetric": False}}),
        ("llava", {"scheme": "w8a16", "skip": [r"layers\.0\."]}),
        ("qwen2-5-vl", {"scheme": "fp8", "vision": "int8"}),
        ("qwen2-5-vl", {"scheme": "none", "vision": "fp8"}),
        ("llava", {"scheme": "nvfp4", "options": {"activations": 16, "rounding": "rtn"}}),
    ],
)
def test_sizes_are_those_of_the_written_checkpoint(models, tmp_path, name, settings):
    """Oracle: the manifest of the real run, and the files themselves within the size of their headers."""
    chosen = recipe(models[name], out=str(tmp_path / "out"), **settings)
    planned = make_plan(chosen)
    size = quantize(chosen).manifest["size"]
    assert (planned.bytes_before, planned.bytes_after) == (size["weights_before"], size["weights_after"])
    assert not planned.needs_data


def test_a_scheme_gives_groups_to_another(models):
    """MLPs but those of the last block are NVFP4; what another scheme gets is refused as if it were the recipe's scheme."""
    keys = {"scheme": "nvfp4", "options": {"last": 1}}
    result = make_plan(recipe(models["llava"], **keys), strict=False)
    formats = {(row.group, row.format): row.blocks for row in result.rows}
    blocks = len(result.blocks)
    assert formats["qkv", "w8a8 fp8 channel"] == formats["o", "w8a8 fp8 channel"] == blocks
    assert formats["gate_up", "w4a4 nvfp4"] == formats["down", "w4a4 nvfp4"] == blocks - 1
    assert formats["gate_up", "w8a8 fp8 channel"] == 1
    refused = resolve({"model": str(models["llava"]), "target": "a100", **keys}, strict=False).recipe
    assert any("no FP8 tensor cores" in problem for problem in make_plan(refused, strict=False).problems)


def test_nvfp4_needs_whole_blocks():
    group = Group(0, "down", ("mlp.down_proj",))
    source = SimpleNamespace(shapes=lambda group: [(64, 40)])
    (problem,) = shape_problems(source, group, Scheme(NVFP4), compressed_tensors.FORMAT, None)
    assert "each 16 inputs" in problem and "skip=[down_proj]" in problem


def test_size_with_static_scales(models, tmp_path):
    """Oracle as before; input scales and those of keys and values come from calibration."""
    for i in range(2):
        Image.new("RGB", (56, 56), (40 * i, 90, 200)).save(tmp_path / f"{i}.png")
    data = {"data": str(tmp_path), "samples": 2}
    out = str(tmp_path / "out")
    chosen = recipe(models["llava"], out=out, scheme="fp8-static", kv_cache="fp8", calibrate=data)
    planned = make_plan(chosen)
    assert planned.needs_data
    assert planned.bytes_after == quantize(chosen).manifest["size"]["weights_after"]


@pytest.mark.parametrize(
    ("scheme", "local"),
    [
        (Scheme(Format("int", 4, 128)), 128 * 256 // 2 + 128 * 2 * 2 + 16),
        (Scheme(Format("int", 4, 64, symmetric=False)), 128 * 256 // 2 + 128 * 4 * 2 + 128 * 4 // 2 + 16),
        (Scheme(Format("int", 8, -1)), 128 * 256 + 128 * 2 + 16),
        (Scheme(Format("float", 8, 0)), 128 * 256 + 2),
    ],
)
def test_output_tensors(scheme, local):
    """Oracle: bytes by hand of [128, 256] in BF16: codes, scales, zero points, and 16 bytes of shape."""
    stored = {"a.weight": Spec("BF16", (128, 256)), "b": Spec("F32", (3,))}
    if scheme.weights.kind == "float":
        from vlmcompress.numerics import ActFormat

        scheme = Scheme(scheme.weights, ActFormat("float", 8, dynamic=True))
    written = output_specs(stored, {"m": scheme}, {"m.weight": "a.weight"}, compressed_tensors.FORMAT, kv_layers=2)
    assert sum(spec.nbytes for spec in written.values()) == local + 12 + 2 * 4


def test_no_weight_is_read(models, tmp_path):
    """Weights of NaN give the same plan."""
    bad = tmp_path / "bad"
    tiny.build("llava", bad)
    tensors = {
        name: torch.full_like(tensor, float("nan")) for name, tensor in load_file(bad / "model.safetensors").items()
    }
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    good, other = (make_plan(recipe(path, scheme="awq")).to_dict() for path in (models["llava"], bad))
    good["recipe"]["model"] = other["recipe"]["model"] = ""
    assert good == other


def test_group_size_that_does_not_divide_names_layer_and_ways_out(models):
    message = (
        r"group_size 96 does not divide in_features \d+ of model\.language_model\.layers\.0\.\S+; use --set options"
    )
    with pytest.raises(UserError, match=message):
        make_plan(recipe(models["llava"], scheme="rtn", options={"group_size": 96}))
    problems = make_plan(recipe(models["llava"], scheme="rtn", options={"group_size": 96}), strict=False).problems
    assert len(problems) == 4  # one for each group of a block, not for each block


def test_the_proposed_group_size_works(models):
    with pytest.raises(UserError, match=r"options\.group_size=(-?\d+)") as error:
        make_plan(recipe(models["llava"], scheme="rtn", options={"group_size": 384}))
    proposed = int(str(error.value).split("options.group_size=")[1].split()[0])
    assert not make_plan(recipe(models["llava"], scheme="rtn", options={"group_size": proposed}), strict=False).problems


def test_skip(models):
    everything = make_plan(recipe(models["llava"], scheme="rtn"))
    less = make_plan(recipe(models["llava"], scheme="rtn", skip=["o_proj"]))
    assert everything.linear_layers - less.linear_layers == len(everything.blocks)
    assert less.bytes_after > everything.bytes_after


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": "rtn", "skip": ["up_proj"]}, "is left but not .*gate_proj"),
        ({"scheme": "rtn", "skip": ["upproj"]}, "'upproj' matches no linear layer; names look like"),
        ({"scheme": "none"}, "quantizes nothing"),
        ({"scheme": "none", "vision": "fp8", "kv_cache": "fp8"}, "in every decoder block; 0 has none"),
        ({"scheme": "rtn", "skip": ["layers"]}, "quantizes nothing"),
    ],
)
def test_problems(models, settings, message):
    with pytest.raises(UserError, match=message):
        make_plan(recipe(models["llava"], **settings))


def test_mlx_files_have_a_size_of_groups_that_divides_head_and_embedding(tmp_path):
    """MLX groups 64 columns by default, and 96 are groups of 32. What vLLM's class of Qwen3.5 cannot read is no problem."""
    source = tiny.build("qwen3-5", tmp_path / "source", hidden_size=96)
    both = {"format": "mlx", "scheme": "none", "embeddings": "w8a16", "head": "w8a16"}
    planned = make_plan(recipe(source, **both))
    assert [row.part for row in planned.rows] == ["vocabulary"] * 2
    assert {scheme.weights.group for scheme in planned.schemes.values()} == {32}


def test_what_no_size_of_groups_helps_is_left_in_16_bits(tmp_path):
    source = tiny.build("qwen3-5", tmp_path / "source", hidden_size=96, vocab_size=385)
    both = {"format": "mlx", "scheme": "none", "embeddings": "w8a16", "head": "w8a16"}
    head, embedding = make_plan(recipe(source, **both), strict=False).problems
    for name, problem in (("lm_head", head), ("model.language_model.embed_tokens", embedding)):
        assert problem.startswith(f"{name}: ") and problem.endswith("no multiple of 64; leave it in bf16")


def test_a_file_of_another_engine_has_no_limits_of_vllm(tmp_path):
    source = tiny.build("lfm2-vl", tmp_path / "source")
    (problem,) = make_plan(recipe(source, scheme="none", format="mlx", kv_cache="fp8"), strict=False).problems
    assert problem.startswith("mlx files hold no scales of an FP8 KV cache")


def test_problems_are_in_the_order_of_the_first_block_that_has_them(models, monkeypatch):
    lines = ["a.0.x", "experts of block 0", "b", "a.1.x", "experts of block 11"]
    plan = make_plan(recipe(models["llava"], scheme="rtn"))
    monkeypatch.setattr(problems_module, "CHECKS", (lambda plan: lines[:2], lambda plan: lines[2:]))
    assert problems_module.plan_problems(plan) == lines[:3]


def test_a_reducer_that_does_not_work_hides_no_problem_of_the_images_size(models):
    """LLaVA's images are of one size, and `learned` has no scorer."""
    both = {"scheme": "none", "resize": {"keep": 0.5}, "reduce": "learned:0.5"}
    size, reducer = make_plan(recipe(models["llava"], **both), strict=False).problems
    assert size.startswith("resize:0.5") and reducer.startswith("reduce learned:0.5")


def test_kv_scales_that_vllm_cannot_load_are_refused(tmp_path):
    """`tests/models/test_engine_names.py` asks vLLM itself: its class of LFM2 gives attention no quantization config."""
    source = tiny.build("lfm2-vl", tmp_path / "source")
    with pytest.raises(
        UserError, match="kv_cache: vLLM's class of lfm2-vl reads no scales of keys and values; leave it out"
    ):
        make_plan(recipe(source, scheme="rtn", kv_cache="fp8"))


def test_target_limits_are_checked(models):
    """The CPU kernel wants sides that are multiples of 32; group 33 would also not divide, so the limit is called directly."""
    problem = make_plan(recipe(models["llava"], scheme="awq", target="cpu"), strict=False).problems
    assert problem == ()


def test_calibration_need_and_memory(models):
    free, calibrated = (make_plan(recipe(models["llava"], scheme=scheme)) for scheme in ("rtn", "gptq"))
    larger = make_plan(recipe(models["llava"], scheme="gptq", calibrate={"samples": 256}))
    assert not free.needs_data and calibrated.needs_data
    assert free.peak_bytes < calibrated.peak_bytes < larger.peak_bytes
    assert make_plan(recipe(models["llava"], scheme="rtn", kv_cache="fp8")).needs_data


def test_a_search_that_runs_blocks_again_holds_its_calls(models):
    """Of tiny models, whose Gram matrices are smaller: 16-bit inputs and outputs of one module, for all samples."""
    data = {"samples": 256, "max_length": 1000}
    plans = {
        objective: make_plan(recipe(models["llava"], scheme="mbq", options={"objective": objective}, calibrate=data))
        for objective in ("gram", "mae")
    }
    hidden = plans["gram"].source.config["text_config"]["hidden_size"]
    grams = max(
        4 * (3 * sum(sides) + 2 * max(sides))
        for block in plans["gram"].steps
        if (sides := [plans["gram"].source.shapes(group)[0][1] ** 2 for group in block])
    )
    assert plans["mae"].peak_bytes - plans["gram"].peak_bytes == 2 * (2 * 256_000 * hidden) - grams


def test_label():
    assert label(None) == "bf16"
    assert label(Scheme(Format("int", 4, 64, symmetric=False))) == "w4a16 int g64 asym"


def test_every_check_is_in_the_list():
    functions = {function for _, function in inspect.getmembers(problems_module, inspect.isfunction)}
    takes_a_plan = {function for function in functions if list(inspect.signature(function).parameters) == ["plan"]}
    assert takes_a_plan - {problems_module.plan_problems} == set(problems_module.CHECKS)


def adapted(model: Path, folder: Path) -> Path:
    """An adapter of q_proj, as PEFT saves it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    peft = get_peft_model(AutoModelForImageTextToText.from_pretrained(model), LoraConfig(target_modules=["q_proj"]))
    peft.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("derivation", ["rotate", "adapter", "from_quantized"])
def test_derived_weights_are_quantized_as_planned(models, tmp_path, derivation):
    """Oracle: a plan of the derived model alone. It differs in nothing but `bytes_before`, which is of the recipe's model."""
    model, settings = models["qwen2-5-vl"], {"scheme": "gptq", "vision": "fp8", "kv_cache": "fp8", "head": "w4a16"}
    settings |= {"bits": {"budget": 6.0}, "calibrate": {"data": str(tmp_path)}, "options": {"group_size": 32}}
    if derivation == "rotate":
        settings["rotate"] = "hadamard"
    elif derivation == "adapter":
        settings["adapter"] = str(adapted(model, tmp_path / "adapter"))
    else:
        rtn.write(model, tmp_path / "fp8", rtn.SCHEMES["fp8"])
        model, settings["from_quantized"] = tmp_path / "fp8", True
    before = make_plan(recipe(model, out=str(tmp_path / "out"), **settings))
    work = begun(tmp_path / "work")
    derived = derive_source(before.recipe, work, silent)
    after, alone = with_problems(before.with_source(derived)), make_plan(before.recipe, source=derived)
    assert after.source.path == alone.source.path == derived.path != before.source.path
    same = {
        *("method", "assigned", "blocks", "head", "vision_method", "vision_groups", "schemes", "layers", "budget"),
        *("steps", "rows", "bytes_after", "peak_bytes", "visual_tokens", "problems", "observes", "needs_data"),
    }
    for name in sorted(same):
        assert getattr(before, name) == getattr(after, name) == getattr(alone, name), name


def test_a_plan_is_final(models):
    with pytest.raises(AttributeError):
        make_plan(recipe(models["llava"], scheme="rtn")).budget = None


def bad(model: Path, engine: str = "vllm", **settings) -> dict[str, str]:
    report = examine(resolve({"model": str(model), **settings}, strict=False).recipe, engine).findings
    return {finding.name: finding.detail for finding in report if not finding.ok}


def test_check_finds_nothing_wrong(models, tmp_path):
    (tmp_path / "calib.jsonl").write_text('{"question": "2+2?"}')
    assert bad(models["llava"], scheme="awq", target="cpu", calibrate={"data": str(tmp_path / "calib.jsonl")}) == {}


def test_check_reports_a_source_that_vllm_cannot_load(models, tmp_path):
    """As transformers saves it; what is written is in order, so nothing stands in the way."""
    saved = tiny.build("llava", tmp_path / "saved", hub_names=False)
    names = {}
    for folder in (models["llava"], saved):
        all_of = examine(recipe(folder, scheme="rtn"), "vllm").findings
        names[folder] = next(each for each in all_of if each.name == "names")
        assert all(each.ok for each in all_of)
    assert names[models["llava"]].detail == "vLLM finds every tensor by its name"
    assert "'vision_tower.vision_model." in names[saved].detail and "can't load" in names[saved].detail


def test_a_buffer_of_old_transformers_is_left_out(models, tmp_path):
    """Published checkpoints of 2023 have it, transformers drops it, and vLLM 0.32 dies of it."""
    old, out = Path(shutil.copytree(models["llava"], tmp_path / "old")), tmp_path / "out"
    buffer = "vision_tower.vision_model.embeddings.position_ids"
    tensors = load_file(old / "model.safetensors") | {buffer: torch.arange(17)}
    save_file(tensors, old / "model.safetensors", metadata={"format": "pt"})
    assert f"'{buffer}', which should not be there" in str(examine(recipe(old, scheme="rtn"), "vllm").findings)
    assert [c.name for c in doctor.diagnose(old) if "should not be there" in c.detail] == ["names"]
    chosen = recipe(old, scheme="rtn", out=str(out))
    assert quantize(chosen).manifest["size"]["weights_after"] == make_plan(chosen).bytes_after
    assert buffer not in load_file(out / "model.safetensors")
    assert all(each.ok for each in doctor.diagnose(out, old))


def test_check_lists_everything(models, tmp_path):
    (tmp_path / "out").mkdir()
    keys = {"scheme": "gptq", "target": "cpu", "options": {"bits": 8, "group_size": 96}, "out": str(tmp_path / "out")}
    problems = bad(models["llava"], **keys)
    assert set(problems) == {"vllm: decoder", "plan", "calibration", "output"}


@pytest.mark.parametrize(
    ("engine", "settings", "part", "message"),
    [
        ("sglang", {"scheme": "fp8", "target": "a100"}, "decoder", "weight-only on A100"),
        ("sglang", {"scheme": "awq", "target": "cpu"}, "decoder", "NVIDIA GPU"),
        ("tensorrt-llm", {"scheme": "fp8", "target": "a100"}, "decoder", "no FP8 arithmetic"),
        ("lmdeploy", {"scheme": "int8"}, "format", "4 bits in groups of 32 or 128"),
        ("tensorrt-llm", {"scheme": "awq"}, "format", "FP8 by row"),
        ("vllm", {"scheme": "rtn", "format": "gptq-v2", "options": {"symmetric": False}}, "format", "zero points"),
        ("transformers", {"scheme": "fp8", "format": "modelopt"}, "format", "codes without their scales"),
        ("transformers", {"scheme": "rtn", "format": "gguf"}, "format", "does not load the format gguf"),
    ],
)
def test_engines_refuse(models, engine, settings, part, message):
    assert message in bad(models["qwen2-5-vl"], engine, **settings)[f"{engine}: {part}"]


@pytest.mark.parametrize("engine", ["lmdeploy", "tensorrt-llm"])
def test_check_knows_families_of_other_engines(models, engine):
    assert "LlavaForConditionalGeneration" in bad(models["llava"], engine, scheme="rtn")[f"{engine}: format"]


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("sglang", {"scheme": "rtn", "target": "h100"}),
        ("lmdeploy", {"scheme": "rtn"}),
        ("tensorrt-llm", {"scheme": "fp8", "target": "h100"}),
        ("transformers", {"scheme": "w8a16"}),
        ("transformers", {"scheme": "rtn", "format": "gptq-v2", "options": {"symmetric": False}}),
    ],
)
def test_engines_accept(models, engine, settings):
    assert bad(models["qwen2-5-vl"], engine, **settings) == {}


def test_check_knows_head_sizes_and_processor_files(models, tmp_path):
    broken = tmp_path / "broken"
    tiny.build("llava", broken)
    config = json.loads((broken / "config.json").read_text())
    config["text_config"]["head_dim"] = 48
    heads = bad(broken, scheme="rtn", target="cpu")
    assert "vllm: family" not in heads
    (broken / "tokenizer.json").unlink()
    assert "tokenizer.json" in bad(broken, scheme="rtn")["processor"]


def test_check_unknown_engine(models):
    with pytest.raises(UserError, match="unknown engine 'vlm'; did you mean 'vllm'"):
        bad(models["llava"], "vlm", scheme="rtn")


def test_a_quantized_source_is_called_one(models, tmp_path):
    """Its tensors have no place in the original's classes, which is not what is wrong with it."""
    quantized, foreign = tmp_path / "quantized", Path(shutil.copytree(models["llava"], tmp_path / "foreign"))
    quantize(recipe(models["llava"], scheme="w8a16", out=str(quantized)))
    (foreign / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}, "quantization": {}}')
    for folder, method in ((quantized, "compressed-tensors"), (foreign, "modelopt")):
        output = f"{folder} is quantized already ({method}); give the 16-bit original"
        assert output in bad(folder, scheme="rtn")["model"]
        with pytest.raises(UserError, match=re.escape(output)):
            quantize(recipe(folder, scheme="rtn", out=str(tmp_path / "again")))


def test_check_reports_an_unusable_model(tmp_path):
    assert "does not exist" in bad(tmp_path / "none", scheme="rtn")["model"]


def test_an_example_is_worked_out_where_one_image_tells(models):
    """Not of sizes that calibration images decide."""
    sized = recipe(models["qwen2-5-vl"], scheme="int8", resize={"keep": 0.5})
    assert visual_tokens(sized, example=True).example is None
    both = recipe(models["llava"], scheme="int8", reduce="uniform:0.5")
    assert "-> 8 visual tokens" in visual_tokens(both, example=True).text
