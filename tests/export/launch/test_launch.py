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
from vlmcompress.export.launch import REGISTRY, compose, vllm
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


@pytest.mark.parametrize("name", REGISTRY)
def test_every_entry_keeps_the_contract(name: str) -> None:
    launcher = REGISTRY.get(name)
    assert launcher.TITLE and launcher.CHECKED and "\n" not in launcher.TITLE + launcher.CHECKED
    for case, checkpoint in KNOWN.items():
        reason = launch.launch_problem(name, checkpoint)
        if reason is not None:
            assert reason and reason[0].islower() and "\n" not in reason and not reason.endswith("."), case
            continue
        texts = launcher.files(checkpoint)
        for place, text in texts.items():
            path = Path(place)
            assert not path.is_absolute() and ".." not in path.parts and text.endswith("\n") and text.isascii(), place
        command = launch.command(name, checkpoint)
        named = re.findall(r"serve/[\w./-]+", command)
        assert named and "\n" not in command and "`" not in command, case
        assert all(any(f"serve/{place}".startswith(mention) for place in texts) for mention in named), case


@pytest.mark.parametrize("case", KNOWN)
def test_files_of_all(case: str) -> None:
    """No two entries write the same file, the page names each of them and the reasons for the rest, and all is small."""
    checkpoint = KNOWN[case]
    texts = launch.render_launch_files(checkpoint)
    loads = [name for name in REGISTRY if launch.launch_problem(name, checkpoint) is None]
    parts = [place for name in loads for place in REGISTRY.get(name).files(checkpoint)]
    assert len(parts) == len(set(parts))
    assert set(texts) - set(parts) == {"README.md"} | ({"grafana.json"} if "vllm" in loads else set())
    page = texts["README.md"]
    assert all(f"`{place}`" in page for place in parts)
    for name in REGISTRY:
        assert (f"- {REGISTRY.get(name).TITLE}: {launch.launch_problem(name, checkpoint)}." in page) is (
            name not in loads
        )
    named = {f"serve/{place}" for place in texts}
    assert set(re.findall(r"serve/[\w.-]+\.(?:sh|py|yaml|json)", page)) <= named
    assert ("Flags are for" in page) is (checkpoint.machine is not None and "vllm" in loads)
    assert sum(map(len, texts.values())) < 60_000
    titles = [title for title, *_ in launch.commands(checkpoint)]
    assert titles[:1] == [vllm.TITLE] if "vllm" in loads else vllm.TITLE not in titles


@pytest.mark.parametrize("name", REGISTRY)
def test_engines_that_have_launch_files(name: str) -> None:
    """What its engine loads (`tests/export/readers`), less what its files are not for."""
    launcher = REGISTRY.get(name)
    assert {form for form in FORMATS if launch.launch_problem(name, facts(form)) is None} == {
        form for form in FORMATS if readers.engine_support(launcher.ENGINE, facts(form)).reason is None
    }
    ours = {"vllm", "compose", "kubernetes", "triton", "vllm-split"}
    assert (launch.launch_problem(name, facts(reducer="blind")) is None) is (name in ours)
    assert (launch.launch_problem(name, facts(reducer="asking")) is None) is (name in ours - {"vllm-split"})
    assert launch.launch_problem(name, facts(reducer="unserved")) is not None
    elsewhere = launch.launch_problem(name, facts(architecture="NobodysForConditionalGeneration"))
    assert (elsewhere is None) is (name in ours)
    assert (launch.launch_problem(name, facts(machine="cpu")) is None) is (name in {"vllm", "vllm-split"})


SCRIPTS = {
    "vllm.sh": ("vllm", ["serve"], "--port"),
    "vllm-speculative.sh": ("vllm", ["serve"], "--port"),
    "sglang.sh": ("python3", ["-m", "sglang.launch_server", "--model-path"], "--port"),
    "lmdeploy.sh": ("lmdeploy", ["serve", "api_server"], "--server-port"),
    "tensorrt-llm.sh": ("trtllm-serve", [], "--port"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts_its_engine(name: str, tmp_path: Path) -> None:
    """From another folder, with a path of odd characters; what the user adds comes last and wins."""
    folder = tmp_path / "a b'c"
    serving = written(folder, facts("bf16", machine="h100", weights=100 * 10**9, auto_map={"AutoModel": "x.Y"}))
    program, start, port = SCRIPTS[name]
    called_program, flags, _ = called(serving / name, "--log-level", "two words", PORT="9")
    assert called_program == program and flags[: len(start)] == start and flags[len(start)] == str(folder)
    assert flags[-2:] == ["--log-level", "two words"]
    assert flags[flags.index(port) + 1] == "9"
    assert {"--trust-remote-code", "--trust_remote_code"} & set(flags)
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
    """`vlmcompress serve` and the script start the same server; the script says more about it."""
    config = {"quantization_config": FORMATS["fp8"], "architectures": [launching.QWEN]}
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    _, flags, _ = called(written(folder, facts("fp8")) / "vllm.sh")
    of_serve, (first, *rest) = pairs(serve.arguments_of(folder)[1:]), flags[1:]
    assert first == str(folder) and of_serve.items() <= pairs(rest).items()
    assert pairs(rest).keys() - of_serve.keys() == {
        "--enable-prefix-caching",
        "--enable-chunked-prefill",
        "--structured-outputs-config",
    }


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
        ("fp8", "h100", {"--max-num-batched-tokens": "8192", "--kv-cache-dtype": "fp8"}, {}),
        ("fp8", "a100", {"--max-num-batched-tokens": "2048", "--attention-backend": "FLASHINFER"}, {}),
        (
            "int8",
            "b200",
            {"--max-num-batched-tokens": "16384"},
            {"VLLM_DISABLED_KERNELS": "CutlassInt8ScaledMMLinearKernel"},
        ),
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
    assert ("--max-num-batched-tokens" in arguments) is (machine != "cpu")


def test_a_reducer_keeps_the_plugin(tmp_path: Path) -> None:
    """A list of plugins is lengthened, none is made where there is none; only a reducer that asks trusts requests."""
    script = written(tmp_path / "blind", facts(reducer="blind")) / "vllm.sh"
    assert called(script, VLLM_PLUGINS="other")[2]["VLLM_PLUGINS"] == "other,vlmcompress"
    _, flags, environment = called(script)
    assert "VLLM_PLUGINS" not in environment and "--trust-request-mm-kwargs" not in flags
    asking = written(tmp_path / "asking", facts(reducer="asking")) / "vllm.sh"
    assert "--trust-request-mm-kwargs" in called(asking)[1]
    assert "FROM vllm/vllm-openai" in (asking.parent / "Dockerfile").read_text()


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
    assert service["healthcheck"]["test"][0] == "CMD" and ":8000/health" in service["healthcheck"]["test"][-1]
    check_kubernetes(deployment, balancer, pod, container)
    for variable in (name, deployment["metadata"]["name"], balancer["metadata"]["name"]):
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", variable)  # RFC 1123


def check_kubernetes(deployment: dict, balancer: dict, pod: dict, container: dict) -> None:
    """What the API server, the scheduler and kubelet ask of these objects, as far as they refer to each other."""
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    assert (balancer["apiVersion"], balancer["kind"]) == ("v1", "Service")
    labels = pod["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert balancer["spec"]["selector"].items() <= labels.items()
    assert all(isinstance(value, str) for value in pod["metadata"]["annotations"].values())
    ports = {port["name"] for port in container["ports"]}
    assert all(port["targetPort"] in ports for port in balancer["spec"]["ports"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/health" and container[probe]["httpGet"]["port"] in ports
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 1200
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["spec"]["volumes"]
    }


def test_a_reducer_comes_with_its_image(tmp_path: Path) -> None:
    checkpoint = facts(reducer="blind")
    serving = written(tmp_path, checkpoint)
    ((_, service),) = yaml.safe_load((serving / "compose.yaml").read_text())["services"].items()
    assert service["build"] == {"context": ".", "dockerfile": "Dockerfile"} and (serving / "Dockerfile").is_file()
    deployment = next(yaml.safe_load_all((serving / "kubernetes.yaml").read_text()))
    assert (
        deployment["spec"]["template"]["spec"]["containers"][0]["image"] == compose.image(checkpoint) != compose.IMAGE
    )
    assert "build" not in yaml.safe_load(launch.render_launch_files(facts())["compose.yaml"])["services"]["my-model"]


def test_triton(tmp_path: Path) -> None:
    """Oracle: protobuf's text parser, with the fields of Triton's model_config.proto that are used."""
    serving = written(tmp_path, facts("fp8", machine="h100"))
    config = parsed_pbtxt((serving / "triton/my-model/config.pbtxt").read_text())
    assert (config.name, config.backend) == ("my-model", "vllm")
    (instances,) = config.instance_group
    assert (instances.count, instances.kind) == (1, 4)  # KIND_MODEL: vLLM chooses its devices
    settings = json.loads((serving / "triton/my-model/1/model.json").read_text())
    assert settings["model"] == "/model" and settings["kv_cache_dtype"] == "fp8"


def parsed_pbtxt(text: str) -> Any:
    """A `ModelConfig` of triton-inference-server/common `protobuf/model_config.proto`, of which name, backend and
    instance_group are declared here with their types and numbers."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    file = descriptor_pb2.FileDescriptorProto(name="config.proto", package="test", syntax="proto3")
    group = file.message_type.add(name="ModelInstanceGroup")
    kinds = group.enum_type.add(name="Kind")
    for number, name in enumerate(("KIND_AUTO", "KIND_GPU", "KIND_CPU", "", "KIND_MODEL")):
        if name:
            kinds.value.add(name=name, number=number)
    group.field.add(name="name", number=1, type=9, label=1)
    group.field.add(name="kind", number=4, type=14, label=1, type_name=".test.ModelInstanceGroup.Kind")
    group.field.add(name="count", number=2, type=5, label=1)
    config = file.message_type.add(name="ModelConfig")
    config.field.add(name="name", number=1, type=9, label=1)
    config.field.add(name="instance_group", number=7, type=11, label=3, type_name=".test.ModelInstanceGroup")
    config.field.add(name="backend", number=17, type=9, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("test.ModelConfig"))
    return text_format.Parse(text, kind())


def test_tensorrt_llm_passes_its_options_on(tmp_path: Path) -> None:
    serving = written(tmp_path, facts("fp8"))
    _, flags, _ = called(serving / "tensorrt-llm.sh")
    options = yaml.safe_load(Path(flags[flags.index("--config") + 1]).read_text())
    assert options["guided_decoding_backend"] == "xgrammar" and options["kv_cache_config"]["enable_block_reuse"] is True
    assert flags[flags.index("--max_seq_len") + 1] == "32768"


def test_dashboard() -> None:
    """Panels do not lie over each other, and every query is one of balanced brackets about the chosen model."""
    dashboard = json.loads(launch.render_launch_files(facts())["grafana.json"])
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    for query in (target["expr"] for panel in panels for target in panel["targets"]):
        assert all(query.count(a) == query.count(b) for a, b in ("()", "{}", "[]"))
        assert query.count('{model_name="$model"}') == query.count("vllm:") > 0
    assert dashboard["templating"]["list"][1]["current"]["value"] == "my-model"


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
    ("weights", "heads", "machine", "gpus"),
    [(10**10, 28, "h100", 1), (144e9, 64, "h100", 4), (144e9, 14, "h100", 2), (10**13, 64, "h100", 8),
     (10**13, 7, "h100", 1), (144e9, 64, "cpu", 1), (144e9, 64, None, 1)],
)  # fmt: skip
def test_number_of_gpus(weights: float, heads: int, machine: str | None, gpus: int) -> None:
    """72 billion weights in BF16 want four H100s: 2 of 44 GB for weights each hold 88 GB, 4 hold 177 GB."""
    assert facts(weights=int(weights), heads=heads, machine=machine).gpus == gpus


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


def modelfile(text: str) -> list[tuple[str, str]]:
    """Instructions and arguments of a Modelfile, in lower case and as Ollama's `parser/parser.go` reads them.

    A line is a comment, or an instruction and its argument, from which one pair of quotes is taken; an argument in quotes goes
    on to the line where these end.
    """
    instructions = {"from", "parameter", "template", "system", "adapter", "license", "message", "requires"}
    commands, lines = [], iter(text.splitlines())
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, value = line.strip().partition(" ")
        assert name.lower() in instructions, line
        quotes = next((quotes for quotes in ('"""', '"') if value.strip().startswith(quotes)), "")
        while quotes and not (len(value.strip()) >= 2 * len(quotes) and value.strip().endswith(quotes)):
            value += "\n" + next(lines)
        commands.append((name.lower(), value.strip().removeprefix(quotes).removesuffix(quotes)))
    assert any(name == "from" for name, _ in commands)
    return commands


FLOATS = {"temperature", "top_p", "min_p", "repeat_penalty"}
WHOLE = {"top_k", "repeat_last_n"}
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
    read = modelfile((tmp_path / "serve/Modelfile").read_text())
    sources = [(tmp_path / "serve" / value).resolve() for name, value in read if name == "from"]
    assert sources == [tmp_path.resolve() / "model.gguf", tmp_path.resolve() / "mmproj.gguf"]
    assert ("requires", "0.30.0") in read and "template" not in dict(read)
    parameters: dict[str, list[str]] = {}
    for key, _, value in (value.partition(" ") for name, value in read if name == "parameter"):
        assert key == "stop" or (float(value) if key in FLOATS else int(value) if key in WHOLE else None) is not None
        parameters.setdefault(key, []).append(value.strip('"'))
    assert parameters == expected
