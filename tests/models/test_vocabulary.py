"""Output head and token embedding of every family: found, untied where they share weights, and quantized by what they see."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from safetensors.torch import load_file

from tests.kit.inputs import encode
from vlmcompress import models
from vlmcompress.evaluation.doctor import files as doctor
from vlmcompress.export.stored import Stored
from vlmcompress.models import Source, data
from vlmcompress.models.data import load_samples
from vlmcompress.models.layer_names import EMBEDDING
from vlmcompress.numerics import round_to_nearest
from vlmcompress.numerics.statistics.balance import MODALITIES
from vlmcompress.quantization.plan import make_plan
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.utils.errors import UserError


def test_logits_are_those_of_norm_and_head(family, loaded):
    """What comes after the last block is the norm of the spec and the head: else the head's statistics would be wrong."""
    vlm = loaded(family)
    with torch.no_grad():
        output = vlm.model(**encode(vlm, 1), output_hidden_states=True)
        stack = dict(vlm.model.named_modules())[vlm.spec.layers]
        outputs = []
        handle = stack[-1].register_forward_hook(lambda _module, _args, result: outputs.append(result))
        logits = vlm.model(**encode(vlm, 1)).logits
        handle.remove()
        hidden = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
        ours = models.NormAndHead(vlm.model, vlm.spec)(hidden)
    text = vlm.model.config.get_text_config()
    if cap := getattr(text, "final_logit_softcapping", None):
        ours = torch.tanh(ours / cap) * cap
    ours = ours / getattr(text, "logits_scaling", 1)  # Granite's
    torch.testing.assert_close(ours, logits)
    assert output.logits.shape == logits.shape


def test_a_tied_head_becomes_a_matrix_that_every_reader_finds(family, checkpoint):
    source = Source.of(checkpoint(family))
    ready = models.with_head(source)
    assert models.embedding_name(source.meta_model).endswith(f".{EMBEDDING}")
    name = ready.names[f"{source.spec.lm_head}.weight"]
    assert ready.stored[name].shape == source.meta_model.get_output_embeddings().weight.shape
    assert models.unfound(ready.names, ready.spec, ready.stored) == {} or source.unfound
    assert (ready is source) == (not models.is_tied(source.meta_model, source.spec))


@pytest.fixture(scope="module")
def written(checkpoint, samples, tmp_path_factory):
    """`written(family)`: the tiny model with head and embedding quantized, next to its manifest."""

    @functools.cache
    def get(family: str):
        keys = {"model": str(checkpoint(family)), "out": str(tmp_path_factory.mktemp("out") / family), "scheme": "gptq"}
        keys |= {"options": {"group_size": 32}, "head": "w4a16", "embeddings": "w8a16"}
        result = quantize(resolve(keys | {"calibrate": {"data": str(samples), "samples": 4}}).recipe)
        return result.out, result.manifest

    return get


@pytest.mark.parametrize(
    "kind", ["gemma3", "llava", "qwen3-vl"]
)  # tied with gains of 1 + w, untied, tied with DeepStack
def test_the_heads_error_is_measured_after_quantized_blocks(kind, written, checkpoint, samples):
    """Oracle: the inputs of the head in transformers, of the checkpoint itself, and the definition of the error."""
    out, manifest = written(kind)
    source, answering = models.load(checkpoint(kind)), hf_model(out)
    head = source.model.get_submodule(source.spec.lm_head).weight.float()
    stored = Stored.of(out)
    assert doctor_objects(out) == []
    codes = stored[source.spec.lm_head][0].dequantize(torch.float32)
    rows: dict[str, list[torch.Tensor]] = {"text": [], "answer": []}
    calls: list[torch.Tensor] = []
    answering.get_output_embeddings().register_forward_pre_hook(lambda _module, args: calls.append(args[0]))
    for batch in data.encode(load_samples(samples, samples=4, seed=0), source):
        modality = batch.pop("modality")[0]
        with torch.no_grad():
            answering(**batch)
        for name, inputs in rows.items():
            inputs.append(calls[-1][0][modality == 1 + MODALITIES.index(name)].float())
    for name, inputs in rows.items():
        x = torch.cat(inputs)
        expected = ((x @ (codes - head).T).square().sum() / (x @ head.T).square().sum()).item()
        assert manifest["errors"]["lm_head"][name] == pytest.approx(expected, rel=0.1)
    assert "vision" not in manifest["errors"]["lm_head"]
    nearest = round_to_nearest(head, stored["lm_head"][0].format, scale_dtype=torch.bfloat16).dequantize(torch.float32)
    x = torch.cat([row for inputs in rows.values() for row in inputs])
    assert (x @ (codes - head).T).square().sum() < 0.8 * (x @ (nearest - head).T).square().sum()


@pytest.mark.parametrize("kind", ["gemma3", "llava"])
def test_embeddings_are_rounded_row_by_row_and_read_by_transformers(kind, written, checkpoint):
    out, _ = written(kind)
    source, answering = models.load(checkpoint(kind)), hf_model(out)
    name = models.embedding_name(source.model)
    groups = models.read_config(out)["quantization_config"]["config_groups"].values()
    assert any(
        "VocabParallelEmbedding" in group["targets"] for group in groups
    )  # some of vLLM's classes give it no name
    weight = source.model.get_parameter(f"{name}.weight")
    q = Stored.of(out)[name][0]
    codes, scale = q.q.float(), q.scale.float()
    assert (scale.shape, q.format.bits, q.zero_point) == ((len(weight), 1), 8, None)
    used = weight.float().abs().amax(1) > 0  # rows of padding are zero
    assert (
        (codes * scale - weight)[used].abs() <= 0.505 * scale[used]
    ).all()  # a step of the scale, rounded to bfloat16
    top = codes.abs().amax(1)[used]
    assert ((top == 127) | (top == 128)).all()
    ids = torch.arange(100)[None]
    with torch.no_grad():
        answering(input_ids=ids)  # transformers unpacks weights when the model is first called
        torch.testing.assert_close(
            answering.get_input_embeddings()(ids), source.model.get_input_embeddings()(ids), atol=0.02, rtol=0.02
        )


def test_in_mlx_a_tied_head_reads_the_quantized_embedding(checkpoint, tmp_path):
    """As mlx-vlm's own conversion has it: no matrix for the head, and 4 bits with zero points."""
    keys = {"model": str(checkpoint("gemma3")), "scheme": "rtn", "options": {"group_size": 32}, "format": "mlx"}
    quantize(resolve(keys | {"out": str(tmp_path / "out"), "embeddings": "w4a16"}).recipe)
    config, stored = models.read_config(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    assert config.get("tie_word_embeddings", True) and not [name for name in stored if "lm_head" in name]
    embedding = next(name.removesuffix(".scales") for name in stored if name.endswith("embed_tokens.scales"))
    scales, biases = (stored[f"{embedding}.{part}"].float() for part in ("scales", "biases"))
    assert stored[f"{embedding}.weight"].dtype == torch.uint32
    assert (-8 * scales != biases).any()


@pytest.mark.parametrize(
    ("family_name", "keys", "message"),
    [
        ("lfm2-vl", {"head": "fp8"}, "gives the output head the embedding's weights"),
        ("lfm2-vl", {"embeddings": "w8a16"}, "embeddings: vLLM's class of lfm2-vl gives"),
        ("glm4v-moe", {"head": "w4a16", "embeddings": "w8a16"}, "vLLM's class of glm4v-moe reads no quantized ones"),
        ("gemma3", {"embeddings": "w8a16"}, "the output head shares these weights"),
        ("llava", {"head": "w8a16", "target": "cpu"}, "output head: vLLM's CPU build has no kernel for 8-bit weights"),
        ("llava", {"head": "w4a16", "format": "gptq"}, "cannot hold a quantized lm_head"),
        ("llava", {"head": "w4"}, "head is \"w4\", it should be 'bf16', 'fp8'"),
    ],
)
def test_unsupported_heads_are_refused(family_name, keys, message, checkpoint):
    with pytest.raises(UserError, match=re.escape(message)):
        make_plan(
            resolve(
                {"model": str(checkpoint(family_name)), "scheme": "rtn", "options": {"group_size": 32}} | keys
            ).recipe
        )


def hf_model(out):
    with models.quiet_transformers():
        model, info = models.open_model(out, dtype="auto")
    assert not any(info.values()), info
    return model.eval()


def doctor_objects(out):
    return [check for check in doctor.diagnose(out) if not check.ok]
