"""What a folder's weights are: one answer for all readers, or a refusal that names the true cause and what to do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from vlmcompress import cli, models
from vlmcompress.utils import identity, model_folder
from vlmcompress.utils.errors import UserError

SINGLE, INDEX = model_folder.SINGLE, model_folder.INDEX
PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
EMBEDDING = "model.language_model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path, checkpoint) -> Path:
    """A copy of the tiny Qwen3-VL, whose head is tied, that a test may change."""
    return Path(shutil.copytree(checkpoint("qwen3-vl"), tmp_path / "model"))


def edit(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(folder / SINGLE)), folder / SINGLE, metadata={"format": "pt"})


def configure(folder: Path, change: Callable[[dict], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def shard(folder: Path, stale: Tensors | None = None) -> Tensors:
    """Put the weights into two files with an index, the second with `stale` tensors as well; returns the weights."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for file, half, extra in zip(PARTS, halves, ({}, stale or {}), strict=True):
        save_file({name: tensors[name] for name in half} | extra, folder / file, metadata={"format": "pt"})
    places = {name: file for file, half in zip(PARTS, halves, strict=True) for name in half}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return tensors


def other(tensors: Tensors) -> Tensors:
    return {name: tensor + 1 for name, tensor in tensors.items()}


def loaded(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The embedding by the files' bytes and in the model that is loaded."""
    from vlmcompress.utils.tensor_files import read_tensor

    stored = models.Source.of(folder)
    vlm = models.load(folder)
    return read_tensor(stored.entries[stored.names[EMBEDDING]]), vlm.model.get_parameter(EMBEDDING)


def test_two_sets_of_weights_are_refused(folder):
    """transformers would take the single file, vLLM the index; `model.safetensors` moved away, the shards are left."""
    tensors = shard(folder)
    save_file(other(tensors), folder / SINGLE, metadata={"format": "pt"})
    for read in (models.read_config, models.Source.of, models.open_model, identity.source_identity):
        with pytest.raises(UserError, match="two sets of weights: .*; move away the wrong one"):
            read(folder)
    (folder / SINGLE).unlink()
    assert all(torch.equal(tensor, tensors[EMBEDDING]) for tensor in loaded(folder))


def test_a_stale_index_next_to_whole_weights(folder):
    tensors = shard(folder)
    for part in PARTS:
        (folder / part).unlink()
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"names missing files, and {SINGLE} exists; remove {INDEX}"):
        models.Source.of(folder)
    (folder / INDEX).unlink()
    assert all(torch.equal(tensor, tensors[EMBEDDING]) for tensor in loaded(folder))


def test_the_index_decides_between_two_tensors(folder):
    stale = other({EMBEDDING: load_file(folder / SINGLE)[EMBEDDING]})
    tensors = shard(folder, stale)
    assert not torch.equal(stale[EMBEDDING], tensors[EMBEDDING])
    assert all(torch.equal(tensor, tensors[EMBEDDING]) for tensor in loaded(folder))
    assert [line for line in models.asides(folder) if f"1 tensors are stored twice, first '{EMBEDDING}'" in line]


@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "weights.safetensors"])
def test_one_file_of_another_name(folder, name):
    """It is read by all: `check` that is content is followed by a run that finds the weights."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).rename(folder / name)
    assert all(torch.equal(tensor, tensors[EMBEDDING]) for tensor in loaded(folder))


def test_an_adapter_next_to_the_whole_model_is_not_applied(folder):
    """transformers itself puts it into the model a second time, which is how much it differs: the oracle is without it."""
    generator = torch.Generator().manual_seed(0)
    query = "model.language_model.layers.0.self_attn.q_proj"
    shape = load_file(folder / SINGLE)[f"{query}.weight"].shape
    parts = {"A": torch.randn(4, shape[1], generator=generator), "B": torch.randn(shape[0], 4, generator=generator)}
    alone = models.open_model(folder)[0].state_dict()
    save_file(
        {f"base_model.model.{query}.lora_{part}.weight": tensor for part, tensor in parts.items()},
        folder / model_folder.ADAPTER_WEIGHTS,
    )
    settings = {"peft_type": "LORA", "base_model_name_or_path": "nowhere/base", "r": 4, "target_modules": ["q_proj"]}
    (folder / model_folder.ADAPTER_CONFIG).write_text(json.dumps(settings))
    plain = AutoModelForImageTextToText.from_pretrained(folder)
    assert any("lora" in name for name in plain.state_dict())
    for model in (models.open_model(folder)[0], models.load(folder).model):
        state = model.state_dict()
        assert state.keys() == alone.keys() and all(torch.equal(state[name], alone[name]) for name in alone)
    assert "next to the whole model and are not applied" in models.asides(folder)[0]
    with model_folder.servable_folder(folder) as view:  # for vLLM, which would take it for weights of the model
        assert view != folder and not list(view.glob("adapter_*"))
        assert torch.equal(models.load(view).model.get_parameter(EMBEDDING), alone[EMBEDDING])
    assert not view.exists()
    (folder / SINGLE).unlink()
    with pytest.raises(UserError, match="is a LoRA adapter and no model"):
        models.read_config(folder)


def nested(name: str) -> str:
    """A name as transformers 5.3 to 5.5 saved it."""
    for old, new in (
        ("model.visual.", "model.language_model.visual."),
        ("model.language_model.", "model.language_model.language_model.language_model."),
    ):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


@pytest.mark.parametrize("name", ["qwen3-5", "qwen2-5-vl"])
def test_duplicated_prefixes_of_names(checkpoint, tmp_path, name):
    """Such a checkpoint is read as the one that was meant, and what is made of it has the names that engines look for."""
    meant = models.Source.of(checkpoint(name))
    folder = Path(shutil.copytree(checkpoint(name), tmp_path / "model"))
    expected, memory = models.load(folder).model.state_dict(), {disk: key for key, disk in meant.names.items()}
    edit(folder, lambda tensors: {nested(memory.get(disk, disk)): tensor for disk, tensor in tensors.items()})
    state, source = models.load(folder).model.state_dict(), models.Source.of(folder)
    assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in state)
    assert len(source.unfound) > 10 and source.written == meant.names


def omit_from_index(folder: Path) -> None:
    shard(folder)
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / INDEX).write_text(json.dumps({"weight_map": {n: file for n, file in places.items() if file == PARTS[0]}}))


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "wrapped": (
        lambda f: edit(f, lambda ts: {f"module.{name}": t for name, t in ts.items()}),
        "'module.' is put into names by DataParallel.* and DeepSpeed; save the model that it wraps",
    ),
    "compiled": (
        lambda f: edit(f, lambda ts: {f"_orig_mod.{name}": t for name, t in ts.items()}),
        "'_orig_mod.' is put into names by torch.compile",
    ),
    "of PEFT": (
        lambda f: edit(f, lambda ts: {f"base_model.model.{name}": t for name, t in ts.items()}),
        "'base_model.model.' is put into names by PEFT",
    ),
    "not merged": (
        lambda f: edit(f, lambda ts: ts | {"model.x.lora_A.weight": torch.ones(2, 2)}),
        "a PEFT adapter that is not merged; save the merged one",
    ),
    "tied in text_config alone": (
        lambda f: configure(f, lambda c: c.update(tie_word_embeddings=False)),
        'ties it to the embedding in text_config alone, .*write "tie_word_embeddings": true at the top',
    ),
    "not tied": (
        lambda f: configure(f, lambda c: c.update(models.untied(c))),
        "no output head, and config.json does not tie it to the embedding",
    ),
    "tied, with another head": (
        lambda f: edit(f, lambda ts: ts | {"lm_head.weight": ts[EMBEDDING] + 1}),
        "'lm_head.weight' is not '.*embed_tokens.weight': transformers would take it and vLLM would not; set",
    ),
    "more blocks than in config.json": (
        lambda f: edit(
            f, lambda ts: ts | {EMBEDDING.replace("embed_tokens", "layers.7.mlp.down_proj"): torch.ones(2, 2)}
        ),
        "config.json says 2 blocks in 'model.language_model.layers', and the weights have more; .*restore config.json",
    ),
    "of ComfyUI": (
        lambda f: edit(f, lambda ts: ts | {"scaled_fp8": torch.zeros(2)}),
        "'scaled_fp8' has no place .*it is of ComfyUI's scaled FP8, .*give the 16-bit original",
    ),
    "of a language model alone": (
        lambda f: edit(
            f,
            lambda ts: {
                name.replace("model.language_model.", "model."): t for name, t in ts.items() if "language_model" in name
            },
        ),
        "(holds a language model alone|has no vision tower)",
    ),
    "of another model": (
        lambda f: edit(f, lambda ts: {f"other.{name}": t for name, t in ts.items()}),
        r"lacks \d+ tensors of .* and has \d+ others, first 'other..*restore config.json from where the weights are from",
    ),
    "a file that the index omits": (
        lambda f: omit_from_index(f),
        rf"{INDEX} does not name \d+ tensors of the model, first '.*' in {PARTS[1]}; add them to its weight_map",
    ),
    "incomplete": (
        lambda f: edit(f, lambda ts: {name: t for name, t in ts.items() if not name.endswith("q_proj.weight")}),
        "lacks 2 tensors of .*it was not saved or downloaded whole, do so again",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_the_cause_is_named(folder, kind):
    spoil, match = WRONG[kind]
    spoil(folder)
    with pytest.raises(UserError, match=match) as caught:
        models.Source.of(folder)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


def test_a_head_that_no_class_uses_is_left_out(folder, tmp_path, capsys):
    """Trainers of reward models leave such a head; transformers ignores it, and the checkpoint without it loads anywhere."""
    plain, out = models.load(folder).model.state_dict(), tmp_path / "out"
    edit(
        folder,
        lambda tensors: tensors | {"v_head.summary.weight": torch.ones(1, 64), "v_head.summary.bias": torch.ones(1)},
    )
    state = models.load(folder).model.state_dict()
    assert all(torch.equal(state[name], plain[name]) for name in plain)
    assert cli.main(["quantize", str(folder), "-o", str(out), "--scheme", "fp8"]) == 0
    line = "2 tensors are of no part of Qwen3VLForConditionalGeneration, first 'v_head.summary.bias'; they are left out"
    assert line in capsys.readouterr().err
    assert not [name for name in models.tensor_headers(out) if "v_head" in name]


def test_a_tie_by_default_is_named_as_the_default(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint("gemma3"), tmp_path / "model"))
    configure(folder, lambda c: (c.pop("tie_word_embeddings", None), c["text_config"].pop("tie_word_embeddings", None)))
    source = models.Source.of(folder)
    embedding = source.names[models.embedding_name(source.meta_model) + ".weight"]
    edit(folder, lambda tensors: tensors | {"lm_head.weight": tensors[embedding] + 1})
    with pytest.raises(
        UserError, match="config.json lacks tie_word_embeddings, which is true by default, but 'lm_head"
    ):
        models.Source.of(folder)


def test_a_language_model_alone(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint("qwen3-5"), tmp_path / "model"))
    edit(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if "visual" not in name})
    with pytest.raises(
        UserError, match=r"no vision tower \(none of the \d+ tensors model.visual.\*\): it is the language"
    ):
        models.Source.of(folder)
    folder = Path(shutil.copytree(checkpoint("llava"), tmp_path / "llava"))  # with the names that a language model has
    inside = "language_model."
    edit(folder, lambda ts: {name.removeprefix(inside): t for name, t in ts.items() if name.startswith(inside)})
    with pytest.raises(UserError, match="holds a language model alone .first '.*, and config.json is of Llava"):
        models.Source.of(folder)


def test_a_tied_head_may_be_stored_twice(folder):
    edit(folder, lambda tensors: tensors | {"lm_head.weight": tensors[EMBEDDING].clone()})
    assert models.is_tied(models.Source.of(folder).meta_model, models.spec_for(models.read_config(folder)))


def test_how_attention_is_computed_is_no_part_of_a_model(folder):
    """A kernel that is not installed here does not keep a model from being opened."""
    before = models.read_config(folder)
    name = "flash_attention_2"
    configure(
        folder, lambda c: (c.update(attn_implementation=name), c["text_config"].update(_attn_implementation=name))
    )
    assert models.read_config(folder) == before
    assert models.load(folder).model.config._attn_implementation != name


@pytest.mark.parametrize("place", ["text_config", "compression_config"])
def test_a_quantization_config_is_read_where_vllm_reads_it(quantized, tmp_path, place):
    """InternVL's AWQ has it in text_config. Oracle: the same checkpoint with the block at the top."""
    folder = Path(shutil.copytree(quantized("llava", "fp8 with tower"), tmp_path / "model"))
    expected = models.read_config(folder)

    def move(config: dict) -> None:
        block = config.pop("quantization_config")
        if place == "text_config":
            config["text_config"]["quantization_config"] = block
        else:
            config[place] = block

    configure(folder, move)
    assert models.read_config(folder) == expected
    model, info = models.open_model(folder)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.hf_quantizer is not None


def test_files_that_belong_to_a_model(folder):
    """Trainers leave states, logs and checkpoints next to a model; readers ask for none of them."""
    for name in (
        "checkpoint-10/config.json",
        "checkpoint-10/model.safetensors",
        "runs/events.out",
        "global_step10/a.pt",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    leftovers = ["latest", "trainer_state.json", "training_args.bin", "optimizer.pt", "all_results.json", "train.py"]
    for name in (
        *leftovers,
        "README.md",
        "LICENSE.txt",
        "Notice",
        "added_tokens.json",
        "vocab.json",
        "tokenizer.model",
    ):
        (folder / name).write_text("x")
    for name in ("additional_chat_templates", "reducer"):
        (folder / name).mkdir()
    (folder / "reducer" / "scorer.safetensors").write_text("what a checkpoint of ours carries")
    (folder / "rng_state").symlink_to("gone")
    (folder / "additional_chat_templates" / "tools.jinja").write_text("x")
    named = {str(place) for place in model_folder.companions(folder)}
    assert named == {
        *("README.md", "LICENSE.txt", "Notice", "added_tokens.json", "vocab.json", "tokenizer.model", "tokenizer.json"),
        *("tokenizer_config.json", "processor_config.json", "generation_config.json", "chat_template.jinja"),
        *("additional_chat_templates/tools.jinja", "reducer/scorer.safetensors"),
    }
    assert model_folder.unrelated_files(folder) == sorted([*leftovers, "checkpoint-10", "runs", "global_step10"])
    configure(folder, lambda config: config.update(auto_map={"AutoModel": "train.Y"}))
    assert Path("train.py") in model_folder.companions(folder)
    (folder / "vocab.txt").symlink_to("gone")
    with pytest.raises(UserError, match="vocab.txt is a device, a pipe or a link that leads nowhere"):
        model_folder.companions(folder)


def test_a_link_out_of_the_folder_is_not_copied(folder, tmp_path, capsys):
    """Archives and checkouts of strangers can hold links to what is private; the Hub's cache has links to its blobs."""
    (tmp_path / "key").write_text("secret")
    (folder / "NOTICE.md").symlink_to(tmp_path / "key")
    assert cli.main(["quantize", str(folder), "-o", str(tmp_path / "out"), "--scheme", "rtn"]) == 2
    assert "NOTICE.md is a link that leads out of the model's folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    cache = tmp_path / "hub" / "models--a--b"
    blob, snapshot = cache / "blobs" / "0123", cache / "snapshots" / "4567"
    for place in (blob, snapshot):
        place.parent.mkdir(parents=True)
    blob.write_text("a notice")
    (folder / "NOTICE.md").unlink()
    shutil.copytree(folder, snapshot)
    (snapshot / "NOTICE.md").symlink_to(Path("..", "..", "blobs", "0123"))
    (snapshot / "README.md").symlink_to("NOTICE.md")
    assert {Path("NOTICE.md"), Path("README.md")} <= set(model_folder.companions(snapshot))


def test_tokens_beyond_the_embedding(folder, tmp_path, capsys):
    """A prompt with one of them fails in every engine: `check` objects, `quantize` warns and names what it leaves out."""
    processor = models.load_processor(folder)
    processor.tokenizer.add_tokens([f"<new{number}>" for number in range(400)])
    processor.save_pretrained(folder)
    (folder / "trainer_state.json").write_text("{}")
    assert cli.main(["check", str(folder), "--scheme", "rtn"]) == 2
    line = r"has \d+ tokens for which the embedding of 384 rows has none, first '<new\d+>' \(384\); "
    assert re.search(f"PROBLEM  tokenizer .*{line}add rows", capsys.readouterr().out)
    assert cli.main(["quantize", str(folder), "-o", str(tmp_path / "out"), "--scheme", "rtn"]) == 0
    assert re.search(f"warning: .*{line}a prompt with one of them fails", warned := capsys.readouterr().err)
    assert "not copied, as no reader of a checkpoint needs it: trainer_state.json\n" in warned
    assert not (tmp_path / "out" / "trainer_state.json").exists()
