"""Launch files: every entry keeps the contract, scripts say what they should when they run, other files are read by parsers."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit import launching
from tests.kit.launching import FORMATS, called, facts, written
from vlmcompress.engines.vllm import serve
from vlmcompress.export import launch, launch_files, readers
from vlmcompress.export.launch import LAUNCHERS, containers, vllm
from vlmcompress.export.readers import LoadFacts

KNOWN: dict[str, LoadFacts] = {
    **{form: facts(form) for form in FORMATS},
    **{
        f"{form} on {machine}": facts(form, machine=machine)
        for form in ("fp8", "int8", "gguf", "openvino")
        for machine in launching.MACHINES
    },
    **{kind: facts("w4-g128", reducer=kind) for kind in launching.REDUCERS},
    "large": facts(machine="h100", weights=144 * 10**9, heads=64),
    "nothing known": readers.gather_facts({}, ""),
}


@pytest.mark.parametrize("case", KNOWN)
def test_files_of_all(case: str) -> None:
    """No two entries write the same file, the page names each of them with its command and the reasons for the rest."""
    checkpoint = KNOWN[case]
    texts = launch.render_launch_files(checkpoint)
    page, places = texts["README.md"], list[str]()
    for name, launcher in LAUNCHERS.items():
        reason = launch.launch_problem(name, checkpoint)
        assert (f"- {launcher.title}: {reason}." in page) is (reason is not None), name
        if reason is None:
            files, command = launcher.files(checkpoint), launch.command(name, checkpoint)
            assert files.items() <= texts.items() and all(f"`{place}`" in page for place in files), name
            assert f"| `{command}` | {launcher.checked} |" in page and "\n" not in command, name
            mentioned = re.findall(r"serve/[\w./-]+", command)
            assert mentioned and all(any(f"serve/{place}".startswith(path) for place in files) for path in mentioned)
            places += files
    for place in places:
        assert ".." not in Path(place).parts and not Path(place).is_absolute() and texts[place].isascii(), place
    loaded = launch.launch_problem("vllm", checkpoint) is None
    assert sorted(texts) == sorted([*places, "README.md"])
    assert ("Flags are for" in page) is (checkpoint.machine is not None and loaded)
    titles = [title for title, *_ in launch.commands(checkpoint)]
    assert titles[:1] == [vllm.TITLE] if loaded else vllm.TITLE not in titles


@pytest.mark.parametrize("name", LAUNCHERS)
def test_engines_that_have_launch_files(name: str) -> None:
    """What its engine loads (`tests/export/readers`), less what its files are not for."""
    launcher = LAUNCHERS[name]
    assert {form for form in FORMATS if launch.launch_problem(name, facts(form)) is None} == {
        form for form in FORMATS if readers.engine_support(launcher.engine, facts(form)).reason is None
    }
    ours = {"vllm", "compose", "kubernetes", "vllm-split"}
    assert (launch.launch_problem(name, facts(reducer="blind")) is None) is (name in ours)
    assert (launch.launch_problem(name, facts(reducer="on demand")) is None) is (name in ours - {"vllm-split"})
    assert launch.launch_problem(name, facts(reducer="unserved")) is not None
    elsewhere = launch.launch_problem(name, facts(architecture="NobodysForConditionalGeneration"))
    assert (elsewhere is None) is (name in ours)
    assert (launch.launch_problem(name, facts(machine="cpu")) is None) is (name in {"vllm", "vllm-split"})


SCRIPTS = {
    "vllm.sh": ("vllm", ["serve"]),
    "sglang.sh": ("python3", ["-m", "sglang.launch_server", "--model-path"]),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts_its_engine(name: str, tmp_path: Path) -> None:
    """From another folder, with a path of odd characters; what the user adds comes last and wins."""
    folder = tmp_path / "a b'c"
    serving = written(folder, facts("bf16", machine="h100", weights=100 * 10**9, auto_map={"AutoModel": "x.Y"}))
    program, start = SCRIPTS[name]
    called_program, flags, _ = called(serving / name, "--log-level", "two words", PORT="9")
    assert called_program == program and flags[: len(start)] == start and flags[len(start)] == str(folder)
    assert flags[-2:] == ["--log-level", "two words"]
    assert flags[flags.index("--port") + 1] == "9"
    assert "--trust-remote-code" in flags
    assert any(flag.startswith(("--tensor-parallel", "--tp")) for flag in flags)
    called_program, flags, _ = called(serving / name, MODEL="elsewhere", HOST="0.0.0.0", MEDIA_DOMAINS="a.org b.org")
    assert ("--allowed-media-domains a.org b.org" in " ".join(flags)) is (program == "vllm")
    assert flags[len(start)] == "elsewhere" and "0.0.0.0" in flags


def test_a_head_that_drafts_has_a_script(tmp_path: Path) -> None:
    """It starts the plain one, with vLLM's own setting; without a head there is none."""
    serving = written(tmp_path / "out", replace(facts("bf16"), draft="mtp"))
    _, flags, _ = called(serving / "vllm-mtp.sh")
    assert json.loads(flags[flags.index("--speculative-config") + 1]) == {"method": "mtp", "num_speculative_tokens": 1}
    assert "vllm-mtp.sh" in (serving / "README.md").read_text()
    assert not (written(tmp_path / "none", facts("bf16")) / "vllm-mtp.sh").exists()


def test_flags_are_those_of_serve(tmp_path: Path) -> None:
    """`vlmcompress serve` and the script start the same server; the script has more comments."""
    config = {"quantization_config": FORMATS["fp8"], "architectures": [launching.QWEN]}
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    _, flags, _ = called(written(folder, facts("fp8")) / "vllm.sh")
    of_serve, (first, *rest) = pairs(serve.arguments_of(folder)[1:]), flags[1:]
    assert first == str(folder) and of_serve.items() <= pairs(rest).items()
    assert pairs(rest).keys() - of_serve.keys() == {"--enable-prefix-caching"}


def pairs(flags: list[str]) -> dict[str, str]:
    """Flag -> value; empty for a flag without one."""
    values: dict[str, str] = {}
    for flag in flags:
        if flag.startswith("--"):
            values[flag] = ""
        else:
            values[list(values)[-1]] = flag
    return values


@pytest.mark.parametrize(
    ("form", "machine", "flags", "variables"),
    [
        ("fp8", "h100", {"--kv-cache-dtype": "fp8"}, {}),
        ("fp8", "a100", {"--attention-backend": "FLASHINFER"}, {}),
        ("int8", "b200", {}, {"VLLM_DISABLED_KERNELS": "CutlassInt8ScaledMMLinearKernel"}),
        ("int8", "h100", {}, {}),
        ("bf16", "cpu", {}, {}),
    ],
)
def test_flags_for_the_machine(form: str, machine: str, flags: dict, variables: dict, tmp_path: Path) -> None:
    script = written(tmp_path, facts(form, machine=machine)) / "vllm.sh"
    _, arguments, environment = called(script)
    assert flags.items() <= pairs(arguments[2:]).items()
    assert {key: value for key, value in environment.items() if key.startswith("VLLM_")} == variables
    assert ("--attention-backend" in arguments) is ("--attention-backend" in flags)


def test_a_reducer_keeps_the_plugin(tmp_path: Path) -> None:
    """A list of plugins is lengthened, none is made where there is none; only a reducer that asks trusts requests."""
    script = written(tmp_path / "blind", facts(reducer="blind")) / "vllm.sh"
    assert called(script, VLLM_PLUGINS="other")[2]["VLLM_PLUGINS"] == "other,vlmcompress"
    _, flags, environment = called(script)
    assert "VLLM_PLUGINS" not in environment and "--trust-request-mm-kwargs" not in flags
    shares = written(tmp_path / "shares", facts(reducer="on demand")) / "vllm.sh"
    assert "--trust-request-mm-kwargs" in called(shares)[1]
    assert "FROM vllm/vllm-openai" in (shares.parent / "Dockerfile").read_text()


@pytest.mark.parametrize("role", ["encode", "prefill-decode", "prefill", "decode"])
def test_roles_of_separated_stages(role: str, tmp_path: Path) -> None:
    """Who produces and consumes encoder outputs, and keys and values; both sides name the same folder."""
    store = tmp_path / "store of 1"
    script = written(tmp_path, facts("fp8", machine="h100")) / "vllm-split.sh"
    _, flags, _ = called(script, role, STORE=str(store))
    values = pairs(flags[2:])
    encoder = json.loads(values.get("--ec-transfer-config", "{}"))
    keys = json.loads(values.get("--kv-transfer-config", "{}"))
    assert encoder.get("ec_role") == {"encode": "ec_producer", "decode": None}.get(role, "ec_consumer")
    assert not encoder or encoder["ec_connector_extra_config"] == {"shared_storage_path": str(store)}
    assert keys.get("kv_role") == {"prefill": "kv_producer", "decode": "kv_consumer"}.get(role)
    assert ("--mm-encoder-only" in values) is ("--kv-cache-dtype" not in values) is (role == "encode")
    for word, stores, line in (("nonsense", {"STORE": str(store)}, "no role nonsense"), ("encode", {}, "mktemp -d")):
        done = subprocess.run(["sh", script, word], env=stores, capture_output=True, text=True)
        assert done.returncode == 2 and line in done.stderr


def test_containers(tmp_path: Path) -> None:
    """Compose and Kubernetes give vLLM the script's flags, a GPU each that it wants, and ask /health."""
    checkpoint = facts("int8", machine="b200", weights=300 * 10**9, heads=64, name="My_Model.v1")
    serving = written(tmp_path, checkpoint)
    flags = called(serving / "vllm.sh")[1][2:]
    expected = {key: value for key, value in pairs(flags).items() if key not in ("--host", "--port")}
    text = (serving / "compose.yaml").read_text() + (serving / "kubernetes.yaml").read_text()
    assert "&id" not in text
    ((name, service),) = yaml.safe_load((serving / "compose.yaml").read_text())["services"].items()
    deployment, balancer = yaml.safe_load_all((serving / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    for command in (service["entrypoint"] + service["command"], container["command"]):
        assert command[:3] == ["vllm", "serve", "/model"] and all(isinstance(part, str) for part in command)
        assert expected.items() <= pairs(command[3:]).items() and pairs(command[3:])["--port"] == "8000"
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == checkpoint.gpus == 4
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    variables = vllm.environment(checkpoint)
    assert service["environment"] == variables
    assert {variable["name"]: variable["value"] for variable in container["env"]} == variables
    labels, ports = pod["metadata"]["labels"], balancer["spec"]["ports"]
    assert deployment["spec"]["selector"]["matchLabels"] == balancer["spec"]["selector"] == labels
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": ports[0]["port"]}
    assert container["ports"][0]["containerPort"] == ports[0]["port"] == 8000
    for variable in (name, deployment["metadata"]["name"], balancer["metadata"]["name"]):
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", variable)  # RFC 1123


def test_a_reducer_comes_with_its_image(tmp_path: Path) -> None:
    checkpoint = facts(reducer="blind")
    serving = written(tmp_path, checkpoint)
    ((_, service),) = yaml.safe_load((serving / "compose.yaml").read_text())["services"].items()
    assert service["build"] == {"context": ".", "dockerfile": "Dockerfile"} and (serving / "Dockerfile").is_file()
    deployment = next(yaml.safe_load_all((serving / "kubernetes.yaml").read_text()))
    assert (
        deployment["spec"]["template"]["spec"]["containers"][0]["image"]
        == containers.image(checkpoint)
        != containers.IMAGE
    )
    assert "build" not in yaml.safe_load(launch.render_launch_files(facts())["compose.yaml"])["services"]["my-model"]


HOSTILE = "x\n$(touch pwned); `id` 'a' \"b\" | ../..: {} # é"


def test_hostile_names(tmp_path: Path) -> None:
    """A name and an architecture of any characters are words without meaning to a shell, YAML, JSON or Markdown."""
    checkpoint = facts("fp8", name=HOSTILE, architecture=HOSTILE)
    assert re.fullmatch(r"[\w.-]+", checkpoint.name, re.ASCII) and re.fullmatch(
        r"[\w.-]+", checkpoint.architecture, re.ASCII
    )
    serving = written(tmp_path, checkpoint)
    _, flags, _ = called(serving / "vllm.sh")
    assert pairs(flags[2:])["--served-model-name"] == checkpoint.name and not list(tmp_path.rglob("pwned"))
    assert all("$(touch" not in text and "`id`" not in text for text in launch.render_launch_files(checkpoint).values())


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": None, "text_config": [], "quantization_config": 3},
        {"architectures": [7], "quantization_config": {"quant_method": None, "config_groups": [1]}},
        {"quantization_config": {"config_groups": {"a": None, "b": {"weights": "x", "input_activations": 1}}}},
        {"quantization_config": {"quant_method": "gptq", "bits": "four", "group_size": "x"}},
        {"text_config": {"max_position_embeddings": -1, "num_attention_heads": True}},
    ],
)
def test_odd_configs_count_as_unknown(config: dict) -> None:
    checkpoint = readers.gather_facts(config, "m")
    assert checkpoint.max_len is None and checkpoint.heads is None
    assert "README.md" in launch.render_launch_files(checkpoint)


GREEDY = {"temperature": ["0"]}
SAMPLED = {"temperature": ["0.1"], "top_k": ["50"], "top_p": ["0.001"], "min_p": ["0"]}
PENALIZED = {"repeat_penalty": ["1.05"], "repeat_last_n": ["-1"]}


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, GREEDY),
        ("not JSON", GREEDY),
        ({"eos_token_id": 7}, GREEDY | {"stop": ["<|im_end|>"]}),
        ({"eos_token_id": [9, [1], 7]}, GREEDY),  # damaged
        (
            {
                "do_sample": True,
                "temperature": 0.1,
                "top_p": 0.001,
                "repetition_penalty": 1.05,
                "eos_token_id": [7, 9, 8],
            },
            SAMPLED | PENALIZED | {"stop": ["<|im_end|>", "two words"]},
        ),
    ],
)
def test_a_modelfile_samples_as_transformers_does(generation: Any, expected: dict, tmp_path: Path) -> None:
    """Both files, next to the folder of the Modelfile; sampling and the ends of answers of generation_config.json."""
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FORMATS["gguf"]}))
    added = [(7, "<|im_end|>"), (8, "two words"), (9, 'a "quote"\n')]
    tokens = [{"id": number, "content": content} for number, content in added]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    if generation is not None:
        text = generation if isinstance(generation, str) else json.dumps(generation)
        (tmp_path / "generation_config.json").write_text(text)
    launch_files.write_launch_files(tmp_path, {}, "my model")
    lines = [line.split(" ", 1) for line in (tmp_path / "serve/Modelfile").read_text().splitlines() if line[0] != "#"]
    sources = [(tmp_path / "serve" / value).resolve() for name, value in lines if name == "FROM"]
    assert sources == [tmp_path.resolve() / "model.gguf", tmp_path.resolve() / "mmproj.gguf"]
    assert {name for name, _ in lines} == {"FROM", "REQUIRES", "PARAMETER"}
    parameters: dict[str, list[str]] = {}
    for key, value in (value.split(" ", 1) for name, value in lines if name == "PARAMETER"):
        parameters.setdefault(key, []).append(value.strip('"'))
    assert parameters == expected
