"""Recipes: merging, origins, strict values, and messages that say which key is wrong, where, and what it should be."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from vlmcompress.export.formats import compressed_tensors
from vlmcompress.recipe import SCHEMES, Recipe, resolve
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.settings import assign, bundled_recipes, merge

BASE = {"model": "m"}
BUNDLED = bundled_recipes()


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_merge_keeps_the_first_value_and_its_origin():
    layers = [("a", {"x": 0, "n": {"p": None}}), ("b", {"x": 5, "n": {"p": 1, "q": 2}, "y": 3})]
    values, origins = merge(layers)
    assert values == {"x": 0, "n": {"p": None, "q": 2}, "y": 3}
    assert origins == {"x": "a", "n.p": "a", "n.q": "b", "y": "b"}


def test_merge_does_not_change_its_input():
    first, second = {"n": {"p": 1}}, {"n": {"q": 2}}
    merge([("a", first), ("b", second)])
    assert first == {"n": {"p": 1}} and second == {"n": {"q": 2}}


def test_precedence(tmp_path):
    file = write(tmp_path, "target: a100\nseed: 7\nscheme: gptq\ncalibrate: {samples: 16, data: d}\nskip: [lm]\n")
    got = resolve(BASE | {"seed": 0, "calibrate": {"samples": 1}, "skip": []}, file)
    assert (got.recipe.seed, got.recipe.calibrate.samples, got.recipe.skip) == (0, 1, ())  # falsy, but given
    assert (got.recipe.scheme, got.recipe.calibrate.data) == ("gptq", str(tmp_path / "d"))
    assert got.origin("seed") == "command line"
    assert got.origin("scheme") == f"recipe {file}"
    assert got.origin("shard_size") == "default"


def test_null_on_the_command_line_overrides(tmp_path):
    file = write(tmp_path, "scheme: fp8-static\nkv_cache: fp8\n")
    assert resolve(BASE | {"kv_cache": None}, file).recipe.kv_cache is None


def test_target_gives_the_scheme():
    got = resolve(BASE | {"target": "a100"})
    assert got.recipe.scheme == "gptq-plus"
    assert got.origin("scheme") == "target a100"


def test_presets_of_other_tools_map_to_schemes(tmp_path):
    """In any case, from flags, files and Python, recorded by our name; each alias is in one file and no entry's name."""
    names = {"w4a16": "gptq-plus", "w4a16_asym": "gptq-plus", "INT4": "gptq-plus", "W8A8": "int8", "W8A16": "w8a16"}
    names |= {"FP8_DYNAMIC": "fp8", "fp8": "fp8", "Fp8": "fp8", "FP8": "fp8-static", "FP8-static": "fp8-static"}
    names |= {"NVFP4": "nvfp4", "GPTQ": "gptq", "fp8-block": "fp8-block", "unquantized": "none"}
    for name, scheme in names.items():
        recipe = resolve(BASE, write(tmp_path, f"scheme: {name}")).recipe
        assert (recipe.scheme, recipe.plain()["scheme"]) == (scheme, scheme)
    on_target = resolve(BASE | {"target": "A100"})
    assert (on_target.recipe.target, on_target.origin("scheme")) == ("a100", "target a100")
    aliases = [alias for name in SCHEMES for alias in SCHEMES.aliases(name)]
    assert len(aliases) == len(set(aliases)) and not {*aliases} & {*SCHEMES.names()}
    assert all(alias == alias.lower() and "_" not in alias for alias in aliases)


OUR_REASONS = ("W2A4", "W3A4", "W4A4", "W2A8", "W3A8", "W4A8", "W5A8", "W6A8", "W7A8", "MXFP8A16")


@pytest.mark.parametrize("name", [name for name in PRESET_SCHEMES if name not in OUR_REASONS])
def test_a_preset_means_what_it_means_there(name, capsys):
    """Oracle: compressed-tensors' own table: bits, zero points, which weights share a scale, and activations."""
    theirs = preset_name_to_scheme(name, ["Linear"])
    recipe = resolve(BASE | {"scheme": name}).recipe
    if theirs.weights is None:
        assert recipe.number_formats is None
        return
    group = QuantizationConfig(config_groups={"group_0": theirs}).to_dict()["config_groups"]["group_0"]
    assert recipe.number_formats == compressed_tensors.scheme_of(group)
    config = compressed_tensors.quantization_config([(recipe.number_formats, ["Linear"])], [])
    ours = QuantizationConfig.model_validate(config).config_groups["group_0"]
    for mine, their in ((ours.weights, theirs.weights), (ours.input_activations, theirs.input_activations)):
        assert (mine is None) == (their is None)
        if mine is not None:
            for key in ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic"):
                assert getattr(mine, key) == getattr(their, key), key
    assert getattr(recipe.options, "mixed", False) is False
    small = resolve(BASE | {"scheme": name.lower()}).recipe
    output = "is compressed-tensors' preset" in capsys.readouterr().err
    assert (
        output
        == ((small.scheme, small.options) != (recipe.scheme, recipe.options))
        == (name in ("FP8", "NVFP4", "W8A16"))
    )


@pytest.mark.parametrize("name", OUR_REASONS)
def test_an_unsupported_preset_is_refused_with_the_reason(name):
    assert name in PRESET_SCHEMES
    with pytest.raises(UserError, match=f"^scheme {name}: .*; take "):
        resolve(BASE | {"scheme": name})


def test_options_next_to_a_preset(tmp_path):
    """They go before its own, and its own before those of a file that another place names it over."""
    next_to = resolve(BASE | {"scheme": "W8A16", "options": {"group_size": 32}}).recipe
    assert (next_to.scheme, next_to.options.group_size) == ("w8a16", 32)
    file = write(tmp_path, "scheme: gptq\noptions: {symmetric: false, bits: 3}\n")
    over = resolve(BASE | {"scheme": "W4A16"}, file).recipe
    assert (over.scheme, over.options.symmetric, over.options.bits) == ("gptq-plus", True, 4)
    head = resolve(BASE | {"scheme": "rtn", "head": "w4a16"}).recipe
    assert head.parts["output head"].weights.symmetric


def test_options_are_those_of_the_scheme():
    options = resolve(BASE | {"scheme": "gptq", "options": {"group_size": 64, "damp": 1}}).recipe.options
    assert (options.bits, options.group_size, options.damp) == (4, 64, 1.0)


def test_balance_as_people_write_it():
    """`off` is false in YAML; weights may come one by one."""
    for text, expected in (("off", "off"), ("ratio", "ratio"), ("{text: 0, vision: 0.5, answer: 1}", None)):
        keys = {"scheme": "awq"}
        assign(keys, f"options.balance={text}")
        resolved = resolve(BASE | keys).recipe
        assert resolved.options.balance == (expected or {"text": 0.0, "vision": 0.5, "answer": 1.0})
        assert resolved.plain()["options"]["balance"] == resolved.options.balance


ERRORS = [
    ("scheme: rtnn", "unknown scheme 'rtnn'; did you mean 'rtn'"),
    ("scheme: rtn\ntraget: a100", "unknown key 'traget'; did you mean 'target'"),
    ("scheme: rtn\ntarget: a1000", "unknown target 'a1000'; did you mean 'a100'"),
    (
        "scheme: rtn\ncalibrate: {sample: 3}",
        "unknown key 'calibrate.sample'; did you mean 'calibrate.samples'|'samples'",
    ),
    ("scheme: rtn\noptions: {groupsize: 3}", "no option 'options.groupsize'; did you mean 'group_size'"),
    ("scheme: fp8\noptions: {bits: 8}", "'fp8' has no options, got 'options.bits'; remove it"),
    ("scheme: rtn\nseed: soon", 'seed is "soon", it should be a valid integer'),
    ("scheme: rtn\nseed: true", "seed is true, it should be a valid integer"),
    ("scheme: rtn\nseed: -1", "seed is -1, it should be greater than or equal to 0"),
    ("scheme: rtn\ncalibrate: 3", "calibrate is 3, it should be"),
    ("scheme: rtn\ncalibrate: {samples: '64'}", 'calibrate.samples is "64", it should be a valid integer'),
    ("scheme: rtn\ncalibrate: {samples: 0}", "calibrate.samples is 0, it should be greater than or equal to 1"),
    ("scheme: rtn\nvision: fp9", "vision is \"fp9\", it should be 'bf16', 'fp8', 'int8' or 'w8a16'"),
    ("scheme: rtn\nkv_cache: int8", "kv_cache is \"int8\", it should be 'fp8'"),
    ("scheme: rtn\nskip: lm_head", 'skip is "lm_head", it should be a valid'),
    ("scheme: rtn\nskip: ['(']", "'\\(' is not a regular expression"),
    ("scheme: rtn\nshard_size: huge", 'shard_size is "huge", it should be a size like 5GB'),
    ("scheme: rtn\nshard_size: 0GB", "should be a size like 5GB"),
    ("scheme: rtn\nformat: ggml", "unknown format 'ggml'"),
    ("scheme: rtn\noptions: [1]", r"options is \[1\], it should be a mapping"),
    ("scheme: rtn\noptions: {bits: four}", 'options.bits is "four", it should be a valid integer'),
    ("scheme: rtn\noptions: {symmetric: 1}", "options.symmetric is 1, it should be a valid boolean"),
    ("scheme: rtn\noptions: {bits: 99}", "scheme 'rtn': bits must be"),
    ("scheme: rtn\noptions: {balance: ratio}", "scheme 'rtn' has no option 'options.balance'"),
    ("scheme: gptq\noptions: {balance: even}", "recipe .*: scheme 'gptq': balance must be off, ratio, mbq or"),
    (
        "scheme: int8\noptions: {balance: {vision: 1}}",
        "recipe .*: scheme 'int8': balance must give weights of text, vision, answer",
    ),
    ("scheme: 4", "unknown scheme '4'|scheme is 4, it should be a valid string"),
    ("target: 5\nscheme: rtn", "target is 5, it should be a valid string"),
    ("target: a100\nscheme: fp8", "A100 80GB has no FP8 tensor cores"),
    ("target: a100\nscheme: awq\nvision: fp8", "vision tower: A100 80GB has no FP8"),
    ("seed: 3", "no scheme given; add --scheme"),
    ("scheme: rtn\nscheme: awq", "line 2 is not valid YAML: key 'scheme' is given twice"),
    ("scheme: rtn\n  seed: [", "line 2 is not valid YAML"),
    ("- scheme", "holds no mapping"),
    ("", "holds no mapping"),
]


@pytest.mark.parametrize(("text", "message"), ERRORS)
def test_bad_recipes_are_refused(tmp_path, text, message):
    file = write(tmp_path, text)
    with pytest.raises(UserError, match=message) as error:
        resolve(BASE, file)
    assert "\n" not in str(error.value)


def test_messages_name_the_place(tmp_path):
    file = write(tmp_path, "scheme: rtn\nseed: soon")
    with pytest.raises(UserError, match=f"^recipe {file}: seed"):
        resolve(BASE, file)
    with pytest.raises(UserError, match="^command line: options.bits"):
        resolve(BASE | {"scheme": "rtn", "options": {"bits": "x"}})


def test_recipe_file_problems(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        resolve(BASE, tmp_path / "none.yaml")
    with pytest.raises(UserError, match="no bundled recipe is called 'awqcpu'; did you mean 'awq-cpu'"):
        resolve(BASE, "awqcpu")
    with pytest.raises(UserError, match="cannot read recipe"):
        resolve(BASE, tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UserError, match="cannot read recipe .*binary.yaml"):
        resolve(BASE, tmp_path / "binary.yaml")


def test_paths_in_a_file_are_relative_to_its_folder(tmp_path, monkeypatch):
    folder = tmp_path / "kept"
    (folder / "org" / "here").mkdir(parents=True)
    file = write(folder, "{scheme: rtn, out: new, adapter: /abs, reduce: 'learned:scorer=s.safetensors'}")
    (folder / "data.yaml").write_text("{scheme: rtn, calibrate: {data: org/here, text: t.jsonl}}")
    (folder / "hub.yaml").write_text("{scheme: rtn, calibrate: {data: org/there}}")
    monkeypatch.chdir(tmp_path)
    recipe = resolve(BASE, file.relative_to(tmp_path)).recipe
    assert (recipe.out, recipe.adapter) == (Path("kept/new"), Path("/abs"))
    assert recipe.reduce.reducer.scorer == "kept/s.safetensors"
    assert resolve(BASE, folder / "data.yaml").recipe.calibrate.data == str(folder / "org" / "here")
    assert resolve(BASE, folder / "hub.yaml").recipe.calibrate.data == "org/there"  # an id of the Hub
    flags = {"calibrate": {"data": "d.jsonl"}, "out": "o"}
    assert resolve(BASE | flags, folder / "data.yaml").recipe.calibrate.data == "d.jsonl"


def test_yaml_runs_no_code(tmp_path):
    with pytest.raises(UserError, match="not valid YAML"):
        resolve(BASE, write(tmp_path, "scheme: !!python/object/apply:os.system ['true']"))


def test_exponents_are_numbers(tmp_path):
    assert resolve(BASE, write(tmp_path, "scheme: gptq\noptions: {damp: 1e-2}")).recipe.options.damp == 0.01


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("seed=3", {"seed": 3}),
        ("options.symmetric=false", {"options": {"symmetric": False}}),
        ("kv_cache=null", {"kv_cache": None}),
        ("skip=[a, b]", {"skip": ["a", "b"]}),
        ("calibrate.data=a=b", {"calibrate": {"data": "a=b"}}),
    ],
)
def test_assign(setting, expected):
    values: dict = {}
    assign(values, setting)
    assert values == expected


@pytest.mark.parametrize("setting", ["seed", "=3", "a..b=1", ".a=1"])
def test_assign_refuses_other_forms(setting):
    with pytest.raises(UserError, match="is not of the form key.sub=value"):
        assign({}, setting)


def test_assign_below_a_value():
    with pytest.raises(UserError, match="has a value already"):
        assign({"seed": 1}, "seed.x=1")


def test_plain_is_json_and_resolves_to_itself():
    first = resolve(BASE | {"scheme": "awq", "target": "cpu", "options": {"group_size": 32}, "out": "o"}).recipe
    assert resolve(first.plain()).recipe == first


def test_reading_a_recipe_brings_no_torch():
    """The types of its options and its reducer do, and only checkers of types import them."""
    code = "import sys; from vlmcompress.recipe import Recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_recipe_is_immutable():
    got = resolve(BASE | {"scheme": "rtn"}).recipe
    with pytest.raises(ValueError):
        got.seed = 4


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_bundled_recipes(name):
    """Each resolves, opens with its purpose, and leaves machine and model to the caller."""
    text = BUNDLED[name].read_text()
    assert text.startswith("# ") and len(text.splitlines()[0]) <= 130
    assert resolve(BASE, name).recipe.scheme
    assert not {"model", "out"} & set(yaml.safe_load(text))


def test_every_flag_is_a_recipe_key():
    from vlmcompress.cli._flags import RECIPE_KEYS
    from vlmcompress.recipe import Calibrate

    keys = {*Recipe.model_fields, *(f"calibrate.{key}" for key in Calibrate.model_fields)}
    keys |= {f"options.{field.name}" for name in SCHEMES for field in dataclasses.fields(SCHEMES.get(name).OPTIONS)}
    assert set(RECIPE_KEYS.values()) <= keys
