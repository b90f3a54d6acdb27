"""LoRA adapters merged into their base tensor by tensor, against PEFT's own merging."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.kit.tiny import build
from vlmcompress import cli, models
from vlmcompress.export import adapter
from vlmcompress.models import Source
from vlmcompress.recipe import resolve
from vlmcompress.recipe.adapter import notes
from vlmcompress.utils import identity, model_folder
from vlmcompress.utils.errors import UserError

LAYERS = ["q_proj", "v_proj", "down_proj", "qkv", "fc1"]  # of the decoder and of both kinds of tower
KINDS = {
    "lora": {"alpha_pattern": {"down_proj": 4}, "rank_pattern": {"v_proj": 2}},
    "rslora": {"use_rslora": True, "bias": "all"},
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {family: build(family, folder / family) for family in ("qwen2-5-vl", "llava", "gemma3")}


def trained(base, out, **settings):
    """An adapter with random numbers of the base, as PEFT saves it, and the model that PEFT makes of both, in float32."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    wrapped = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": LAYERS} | settings))
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    wrapped.save_pretrained(out)
    return wrapped.merge_and_unload().state_dict()


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen2-5-vl", kind) for kind in KINDS] + [("llava", "lora"), ("gemma3", "dora")]
)
def test_merged_as_peft_merges(bases, family, kind, tmp_path):
    """Oracle: PEFT in float32, rounded to the base's type. Layers of decoder and tower, biases, whole modules."""
    expected = trained(bases[family], tmp_path / "adapter", **KINDS[kind])
    source = Source.of(bases[family])
    adapter.write_merged(source, tmp_path / "adapter", tmp_path / "merged")
    merged = models.load(tmp_path / "merged").model.state_dict()
    before = models.load(bases[family]).model.state_dict()
    for name, value in expected.items():
        assert torch.equal(merged[name], value.to(merged[name].dtype)), name
    changed = {
        name.rpartition(".")[0].rpartition(".")[2] for name in before if not torch.equal(before[name], merged[name])
    }
    assert changed >= ({"embed_tokens", "lm_head"} if kind == "embedding" else {"q_proj", "v_proj", "down_proj"})


def test_experts_merged_as_peft_merges(tmp_path):
    """Both fused parameters of a mixture's experts, of which PEFT wraps one within the other; another alpha for one."""
    base = build("qwen3-vl-moe", tmp_path / "base")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    pattern = {"alpha_pattern": {"mlp.experts.down_proj": 4}}
    expected = trained(base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=names, **pattern)
    adapter.write_merged(Source.of(base), tmp_path / "adapter", tmp_path / "merged")
    merged, before = (models.load(folder).model.state_dict() for folder in (tmp_path / "merged", base))
    for name in [name for name in expected if name.endswith("experts.gate_up_proj")]:
        block, gates_and_ups = name.removesuffix(".gate_up_proj"), expected.pop(name)
        downs = expected.pop(f"{block}.down_proj")
        for number, (gate_and_up, down) in enumerate(zip(gates_and_ups, downs, strict=True)):
            for part, value in zip(("gate", "up", "down"), (*gate_and_up.chunk(2), down), strict=True):
                expected[f"{block}.{number}.{part}_proj.weight"] = value
    for name, value in expected.items():
        assert torch.equal(merged[name], value.to(merged[name].dtype)), name
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "gate_proj", "up_proj", "down_proj"}


def test_an_adapter_folder_names_its_base(bases, tmp_path, capsys):
    """The base that the adapter names, or that is given with it; names as older releases of transformers wrote them."""
    expected = trained(bases["qwen2-5-vl"], tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / model_folder.ADAPTER_WEIGHTS)
    old = {
        name.replace(".model.language_model.", ".model.").replace(".model.visual.", ".visual."): t
        for name, t in tensors.items()
    }
    assert old.keys() != tensors.keys()
    save_file(old, tmp_path / "adapter" / model_folder.ADAPTER_WEIGHTS)
    assert cli.main(["quantize", str(tmp_path / "adapter"), "-o", str(tmp_path / "out"), "--scheme", "none"]) == 0
    merged = models.load(tmp_path / "out").model.state_dict()
    assert all(torch.equal(merged[name], value.to(merged[name].dtype)) for name, value in expected.items())
    manifest = json.loads((tmp_path / "out" / "vlmcompress.json").read_text())
    assert (manifest["model"]["source"], manifest["recipe"]["adapter"]) == ("qwen2-5-vl", "adapter")
    assert not list(tmp_path.glob(".out*")), "nothing is left next to OUT"
    recipe = resolve({"model": str(bases["llava"]), "adapter": str(tmp_path / "adapter"), "scheme": "rtn"}).recipe
    assert (recipe.model, recipe.adapter) == (bases["llava"], tmp_path / "adapter")
    assert f"was trained on {bases['qwen2-5-vl']}; on another model" in notes(recipe.model, recipe.adapter)[-1]
    recipe = resolve({"model": str(tmp_path / "adapter"), "scheme": "rtn"}).recipe
    assert not notes(recipe.model, recipe.adapter)
    capsys.readouterr()
    assert cli.main(["eval", str(tmp_path / "adapter"), "--baseline", str(bases["llava"]), "--engine", "hf"]) == 2
    assert "is a LoRA adapter and no model" in capsys.readouterr().err


def edited(folder, **settings):
    config = json.loads((folder / model_folder.ADAPTER_CONFIG).read_text())
    (folder / model_folder.ADAPTER_CONFIG).write_text(json.dumps(config | settings))


def renamed(folder, old, new):
    tensors = load_file(folder / model_folder.ADAPTER_WEIGHTS)
    save_file(
        {name.replace(old, new): tensor for name, tensor in tensors.items()}, folder / model_folder.ADAPTER_WEIGHTS
    )


def without(folder, part):
    tensors = load_file(folder / model_folder.ADAPTER_WEIGHTS)
    save_file(
        {name: tensor for name, tensor in tensors.items() if part not in name}, folder / model_folder.ADAPTER_WEIGHTS
    )


BAD = {
    "another method": (lambda f: edited(f, peft_type="IA3"), "peft_type 'IA3' is not supported"),
    "pissa": (
        lambda f: edited(f, init_lora_weights="pissa_niter_4"),
        "init_lora_weights 'pissa_niter_4' is not supported",
    ),
    "no alpha": (lambda f: edited(f, lora_alpha="much"), "PEFT can't merge .*adapter into Qwen2_5_VL.*'str' and 'int'"),
    "pattern": (lambda f: edited(f, alpha_pattern={"(a": 4}), "PEFT can't merge .* unterminated subpattern"),
    "dora without lengths": (lambda f: edited(f, use_dora=True), "are of no layer, or lacking, first .*lora_magnitude"),
    "half": (lambda f: without(f, "q_proj.lora_B"), "2 tensors are of no layer, or lacking, first .*q_proj.lora_B"),
    "other layers": (
        lambda f: renamed(f, "self_attn", "attention"),
        "are of no layer, or lacking, first .*attention.q_proj",
    ),
    "other shapes": (lambda f: renamed(f, "down_proj", "up_proj"), "size mismatch for .*up_proj.lora_A"),
    "pickled": (
        lambda f: (f / model_folder.ADAPTER_WEIGHTS).rename(f / "adapter_model.bin"),
        "No such file or directory: .*adapter_model.safetensors",
    ),
    "cut short": (lambda f: (f / model_folder.ADAPTER_WEIGHTS).write_bytes(b"\x10"), "header too small"),
    "no config": (lambda f: (f / model_folder.ADAPTER_CONFIG).write_text("{"), "adapter_config.json is not readable"),
    "no base": (lambda f: edited(f, base_model_name_or_path="/gone"), "names the base '/gone', which does not exist"),
}


@pytest.fixture(scope="module")
def good(bases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    trained(bases["qwen2-5-vl"], folder)
    return folder


@pytest.mark.parametrize("case", BAD)
def test_bad_adapters_are_one_line(case, good, tmp_path, capsys):
    shutil.copytree(good, tmp_path / "adapter")
    damage, message = BAD[case]
    damage(tmp_path / "adapter")
    code = cli.main(["quantize", str(tmp_path / "adapter"), "-o", str(tmp_path / "out"), "--scheme", "fp8"])
    line = capsys.readouterr().err.strip()
    assert code == 2 and len(line.splitlines()) == 1, line
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert re.search(message, line), line


def test_a_tied_head_is_refused(bases, tmp_path):
    trained(bases["gemma3"], tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    with pytest.raises(UserError, match="shares the embedding's weights"):
        adapter.changes(tmp_path / "adapter", Source.of(bases["gemma3"]))


def resized(base, out, **settings):
    """As `trained`, of a model that was given rows for eight more tokens; the tokenizer that has them lies next to."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(base)
    rows = model.get_input_embeddings().weight.shape[0] + 8
    fresh = rows - len(processor.tokenizer)
    processor.tokenizer.add_tokens([f"<new{number}>" for number in range(fresh)])
    model.resize_token_embeddings(rows, mean_resizing=False)
    wrapped = get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": ["q_proj"]} | settings))
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    wrapped.save_pretrained(out, save_embedding_layers="auto" if settings else True)
    processor.save_pretrained(out)
    return wrapped.merge_and_unload().state_dict(), rows


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2-5-vl", {"modules_to_save": ["embed_tokens", "lm_head"]}),
        ("qwen2-5-vl", {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}),
        ("gemma3", {}),  # one matrix, which PEFT saves twice
    ],
    ids=["whole", "low rank", "tied"],
)
def test_added_tokens_come_with_their_rows(bases, family, settings, tmp_path):
    """Oracle: PEFT's own merging. What is written has the adapter's tokenizer, and rows for its tokens."""
    expected, rows = resized(bases[family], tmp_path / "adapter", **settings)
    out = tmp_path / "out"
    assert cli.main(["quantize", str(tmp_path / "adapter"), "-o", str(out), "--scheme", "none"]) == 0
    vlm = models.load(out)
    assert vlm.model.get_input_embeddings().weight.shape[0] == rows == len(vlm.processor.tokenizer)
    state = vlm.model.state_dict()
    assert all(torch.equal(state[name], value.to(state[name].dtype)) for name, value in expected.items())


def test_tokens_without_rows_are_refused(bases, tmp_path, capsys):
    """Added in training, with an embedding that was not saved: there is nothing to go on with but the base's tokenizer."""
    resized(bases["qwen2-5-vl"], tmp_path / "adapter", modules_to_save=["embed_tokens", "lm_head"])
    without(tmp_path / "adapter", "lm_head")
    command = ["check", str(tmp_path / "adapter"), "--scheme", "rtn"]
    assert cli.main(command) == 2
    assert "embedding and output head have different rows" in capsys.readouterr().out
    without(tmp_path / "adapter", "embed_tokens")
    assert cli.main(command) == 2
    assert re.search(
        r"has 8 tokens for which the embedding of 384 rows has none, first .*; save", capsys.readouterr().out
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "adapter" / name).unlink()
    assert cli.main(command) == 0


def test_the_adapters_tokenizer_and_template_are_taken(bases, tmp_path, capsys):
    """In calibration and in what is written. A template in tokenizer_config.json, as older trainers save it, wins over the
    base's file. What the adapter does not bring is the base's."""
    base, folder, out = bases["qwen2-5-vl"], tmp_path / "adapter", tmp_path / "out"
    trained(base, folder)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    template = (base / "chat_template.jinja").read_text().replace("assistant", "helper")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    shutil.copyfile(base / "tokenizer.json", folder / "tokenizer.json")
    assert (base / "chat_template.jinja").read_text() != template
    assert cli.main(["quantize", str(folder), "-o", str(out), "--scheme", "none"]) == 0
    assert "the adapter's tokenizer and chat template replaced" in capsys.readouterr().err
    vlm = models.load(out)
    assert vlm.processor.chat_template == template and (out / "chat_template.jinja").read_text() == template
    assert (out / "processor_config.json").read_bytes() == (base / "processor_config.json").read_bytes()
    content = identity.content_hash(model_folder.adapter_files(folder))
    inputs = resolve({"model": str(folder), "scheme": "none"}).recipe.inputs_folder
    assert models.load_processor(inputs).chat_template == template
    assert resolve({"model": str(base), "scheme": "none"}).recipe.inputs_folder == base
    (folder / "chat_template.jinja").write_text(template)
    assert identity.content_hash(model_folder.adapter_files(folder)) != content
