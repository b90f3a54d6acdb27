"""Targets and ignore entries mean the same layers to transformers, in the files and to vLLM, for every family."""

from __future__ import annotations

import functools

import pytest

from tests.kit.rtn import SCHEMES
from tests.kit.tiny import build
from vlmcompress import models
from vlmcompress.export.formats import compressed_tensors as ct
from vlmcompress.export.layer_targets import describe_layers, misread, targets
from vlmcompress.numerics import Format, Scheme

W4, FP8 = SCHEMES["w4-symmetric"], SCHEMES["fp8"]


@pytest.fixture(scope="module")
def family_of(tmp_path_factory):
    @functools.cache
    def get(family):
        folder = build(family, tmp_path_factory.mktemp(family))
        model = models.build_meta_model(folder)
        names = models.disk_names(model, models.tensor_headers(folder))
        return model, models.spec_for(models.read_config(folder)), names

    return get


def configure(model, spec, names, schemes):
    """Config and expected group of every layer."""
    groups = targets(schemes, names, spec)
    config = ct.FORMAT.configs(describe_layers(schemes, model, names, spec))["config.json"]
    order = [scheme for scheme, _ in groups]
    expected = {
        name: f"group_{order.index(schemes[name])}" if name in schemes else None for name in models.linear_names(model)
    }
    return config, expected


def decoder(model, spec, scheme):
    return {name: scheme for group in models.resolve_groups(model, spec) for name in group.linears}


def tower(model, spec, scheme):
    return {name: scheme for group in models.vision_linears(model, spec) for name in group.linears}


@pytest.mark.parametrize("family", models.REGISTRY.names())
def test_every_reader_agrees(family_of, family):
    """On the decoder alone, with a tower of the same scheme, of another, and on the tower alone."""
    model, spec, names = family_of(family)
    language, same, other = decoder(model, spec, W4), tower(model, spec, W4), tower(model, spec, FP8)
    for schemes in filter(None, (language, language | same, language | other, other)):
        config, expected = configure(model, spec, names, schemes)
        assert misread(config, expected, names, spec) == []
        assert len(config["config_groups"]) == len({str(scheme) for scheme in schemes.values()})


@pytest.mark.parametrize("family", models.REGISTRY.names())
def test_single_layers_may_differ(family_of, family):
    """One layer skipped, one in another scheme, or all experts of a block, one of the tower skipped."""
    model, spec, names = family_of(family)
    schemes = decoder(model, spec, W4) | tower(model, spec, FP8)
    groups = models.resolve_groups(model, spec)
    alike = [group for group in groups if (group.layer, group.unit) == (groups[-1].layer, groups[-1].unit)]
    schemes |= {name: FP8 for group in alike for name in group.linears}
    for group in [groups[0], *models.vision_linears(model, spec)[1:2]]:
        del schemes[group.linears[0]]
    config, expected = configure(model, spec, names, schemes)
    assert misread(config, expected, names, spec) == []


def test_misread_names_the_layer(family_of):
    """A pattern that only fits memory names is noticed."""
    model, spec, names = family_of("qwen2-5-vl")
    config, expected = configure(model, spec, names, decoder(model, spec, W4))
    config["config_groups"]["group_0"]["targets"] = [r"re:model\.language_model\.layers\..*"]
    assert misread(config, expected, names, spec)[0] == ("model.layers.0.self_attn.q_proj", "group_0", None)


@pytest.mark.parametrize("family", models.REGISTRY.names())
def test_one_scheme_is_one_group_that_lmdeploy_reads(family_of, family):
    """LMDeploy's TurboMind looks at `config_groups.group_0` alone: pack-quantized, 4 bits, groups of 32 or 128."""
    model, spec, names = family_of(family)
    config, _ = configure(model, spec, names, decoder(model, spec, Scheme(Format("int", 4, 128))))
    assert list(config["config_groups"]) == ["group_0"]
    block = config["config_groups"]["group_0"]
    assert block["format"] == "pack-quantized" and block["input_activations"] is None
    assert (block["weights"]["num_bits"], block["weights"]["group_size"]) == (4, 128)
