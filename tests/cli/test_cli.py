"""The command line: exit codes, one-line errors, clean stdout with `--json`, and no heavy imports where none is needed."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kit import calibration_rows, tiny
from tests.kit.command_line import loud  # noqa: F401
from tests.kit.next_steps import follow
from tests.kit.places import DEMO_LLAVA
from vlmcompress import cli
from vlmcompress import cli as commands
from vlmcompress.cli import quantize
from vlmcompress.utils.errors import GateError, UserError
from vlmcompress.utils.messages import foreign_errors
from vlmcompress.utils.registry import VERBS, Registry


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.build("llava", tmp_path_factory.mktemp("cli") / "llava")


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "vlmcompress", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def replaced(monkeypatch, verb):
    """`vlmcompress list` does what `verb` does."""
    monkeypatch.setattr(cli.VERBS.get("list"), "run", verb)


def test_quantize_in_a_new_process(model, tmp_path, capfd):
    """One JSON object on stdout, nothing on stderr (no terminal, no bars), a whole OUT; then OUT exists."""
    out = tmp_path / "out"
    done = run("quantize", model, "-o", out, "--scheme", "rtn", "--set", "options.group_size=64", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["ok"] and result["weights_after"] < result["weights_before"]
    assert result["next"] == [f"vlmcompress eval {out} --baseline {model} --data FILE", f"vlmcompress serve {out}"]
    data = calibration_rows.write(tmp_path, 4)
    assert follow(result["next"], data, tmp_path) == ["eval", "serve"]
    demo = quantize.result(out, str(DEMO_LLAVA), json.loads((out / "vlmcompress.json").read_text()), 1.0)
    assert follow(demo["next"], data, tmp_path) == ["eval", "serve"] and "--data" not in demo["next"][0]
    assert json.loads((out / "vlmcompress.json").read_text())["recipe"]["options"]["group_size"] == 64

    assert cli.main(["quantize", str(model), "-o", str(out), "--scheme", "rtn"]) == 2
    again = capfd.readouterr()
    assert again.out == "" and again.err.startswith("error: output ") and again.err.count("\n") == 1


def test_every_verb_is_in_help(capfd):
    """`--help` has the verbs under the headings of their groups, in the order of their places; each is a whole file."""
    verbs = sorted(cli.VERBS, key=lambda name: cli.VERBS.constant(name, "PLACE"))
    assert len({cli.VERBS.constant(name, "PLACE") for name in verbs}) == len(verbs)
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    output = capfd.readouterr().out
    groups = re.findall(r"^([a-z ]+):\n((?:  .*\n)+)", output, re.MULTILINE)
    by_group = {
        title: re.findall(r"^  ([a-z-]+)  ", text, re.MULTILINE) for title, text in groups if title != "options"
    }
    assert list(by_group) == ["look first", "compress", "measure", "carry on"]
    assert [name for names in by_group.values() for name in names] == verbs
    for title, names in by_group.items():
        assert {cli.VERBS.constant(name, "GROUP") for name in names} == {title}
    for name in verbs:
        module = cli.VERBS.get(name)
        assert callable(module.options) and callable(module.run)
        assert f"{cli.VERBS.summary(name)}." in " ".join((module.__doc__ or "").split())


# The call of a verb -> two names of the same flag, of which the second is not shown, and a value.
SPELLINGS = {
    "plan m": "tp tensor-parallel-size 2, kv-cache kv-cache-dtype fp8, image-size image 8x8, images-per-request images 2, "
    "text-tokens text 5, out-tokens out 5",
    "serve o": "images-per-request images 2, videos-per-request videos 2",
    "bench o --baseline m": "data images d",
    "search m -o o": "suite tasks a, max-time budget 1h, image-size image 8x8, keep-work keep",
    "quantize m": "kv-cache kv-cache-dtype fp8, samples num-calibration-samples 9",
    "check m": "tp tensor-parallel-size 2, kv-cache kv-cache-dtype fp8",
    "eval o": "suite tasks a",
}


@pytest.mark.parametrize("call", SPELLINGS)
def test_other_spellings_of_a_flag(call, capsys):
    """One word has one meaning in `--help`; what it was called before, and what other tools call it, is still read."""
    with pytest.raises(SystemExit):
        cli.main([*call.split()[:1], "--help"])
    output = re.findall(r"--[\w-]+", capsys.readouterr().out)
    plain = vars(cli.parse(call.split()))
    for flags in SPELLINGS[call].split(", "):
        name, other, *value = flags.split()
        assert vars(cli.parse([*call.split(), f"--{name}", *value])) != plain
        assert vars(cli.parse([*call.split(), f"--{name}", *value])) == vars(
            cli.parse([*call.split(), f"--{other}", *value])
        )
        assert f"--{name}" in output and f"--{other}" not in output


GREET = '''"""Greet somebody. Politely."""

PASSES_ON = "another program"


def options(parser):
    """Add the verb's flags."""
    parser.add_argument("name")


def run(args):
    """Greet."""
    return 0, {"greeted": args.name, "extra": args.extra}, f"Good day, {args.name}."
'''


def test_a_verb_is_one_file(capfd, monkeypatch, tmp_path):
    """A file in the folder is a verb: in `--help`, with flags, text, JSON and errors of its own."""
    (tmp_path / "say_hello.py").write_text(GREET)
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    verbs = Registry("vlmcompress.cli", "verb")
    monkeypatch.setattr(verbs, "_folder", tmp_path)
    monkeypatch.setattr(cli, "VERBS", verbs)
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert re.search(r"\nmore:\n  say-hello +Greet somebody\.\n", capfd.readouterr().out)
    assert cli.main(["say-hello", "Ada"]) == 0
    assert capfd.readouterr().out == "Good day, Ada.\n"
    assert cli.main(["say-hello", "Ada", "--json", "--", "--loud"]) == 0
    assert json.loads(capfd.readouterr().out) == {"greeted": "Ada", "extra": ["--loud"]}
    assert cli.main(["say-hello"]) == 2
    assert capfd.readouterr().err == "error: vlmcompress say-hello: missing name; see vlmcompress say-hello --help\n"
    assert cli.main(["say-helo", "Ada"]) == 2
    assert "did you mean 'say-hello'" in capfd.readouterr().err


def test_a_verb_of_another_package(capfd, monkeypatch, tmp_path):
    """A distribution with an entry point of the group adds a verb; one with a name that exists is refused."""
    (tmp_path / "their_verb.py").write_text(GREET)
    info = tmp_path / "their_verb-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-verb\nVersion: 1\n")
    points = info / "entry_points.txt"
    monkeypatch.syspath_prepend(str(tmp_path))

    points.write_text("[vlmcompress.cli]\ngreet = their_verb\n")
    monkeypatch.setattr(cli, "VERBS", Registry("vlmcompress.cli", "verb"))
    assert cli.main(["greet", "Ada"]) == 0
    assert capfd.readouterr().out == "Good day, Ada.\n"

    points.write_text("[vlmcompress.cli]\nlist = their_verb\n")
    monkeypatch.setattr(cli, "VERBS", Registry("vlmcompress.cli", "verb"))
    assert cli.main(["greet", "Ada"]) == 2
    assert "entry point 'their_verb' takes the verb name 'list', which exists" in capfd.readouterr().err


def test_only_the_verb_that_runs_is_imported():
    code = (
        "import sys; from vlmcompress.cli import parse\n"
        "parse(['doctor', 'm'])\n"
        "print(*sorted(name.rpartition('.')[2] for name in sys.modules if name.startswith('vlmcompress.cli.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if not name.startswith("_")] == ["doctor"]


UNUSED = {"sklearn", "scipy", "pandas", "pyarrow", "datasets", "vllm", "llmcompressor", "lm_eval", "openai"}
LIBRARIES = {"torch", "transformers", "numpy", *UNUSED}
# Calls that fail before anything is read, or with what standard Python reads.
REFUSED = """
check MODEL --nope
check nowhere --scheme fp8
check STRANGE
check STRANGE --scheme fp8
check MODEL --scheme nope
check MODEL --scheme fp8 --target nope
quantize MODEL -o OUT --scheme fp8 --set nope=1
quantize MODEL -o OUT --scheme fp8 --reduce nope
quantize nowhere -o OUT/new --scheme fp8
quantize STRANGE -o OUT/new --scheme fp8
calibrate OUT -o OUT/new
learn-reducer nowhere -o OUT/new.safetensors
search nowhere -o OUT/new --data nowhere --calib nowhere --target a100 --max-drop 0.01
plan nowhere
plan STRANGE
plan MODEL --reduce nope
plan MODEL --target nope
check nowhere --image-size 56x56
check STRANGE --image-size 56x56
check MODEL --image-size nope
check MODEL --image-size 56x56 --reduce nope
inspect nowhere a.png --reduce pool -o new.png
doctor nowhere
doctor OUT
convert MODEL -o OUT
export MODEL -o OUT --format nope
export nowhere -o OUT
serve nowhere
eval nowhere --baseline MODEL
eval MODEL --baseline nowhere
bench nowhere --baseline MODEL
"""
IMPORTS = {
    # Calls of one process: exit code, and what none of them imports.
    **{f"{verb} --help".strip(): (0, LIBRARIES) for verb in ("", *VERBS)},
    **{call: (0, LIBRARIES) for call in ("--version", "list schemes", "list reducers", "list formats", "list targets")},
    "check MODEL": (0, LIBRARIES),
    **dict.fromkeys(REFUSED.strip().splitlines(), (2, LIBRARIES)),
    # What follows knows a scheme's options, whose module computes with torch.
    "check MODEL --scheme fp8 --set options.nope=1": (2, {"transformers", *UNUSED}),
    "quantize MODEL -o MODEL/out --scheme fp8": (2, {"transformers", *UNUSED}),
    # And this needs the model's classes.
    "check MODEL --scheme fp8": (0, UNUSED),
    "plan MODEL --target h100": (0, UNUSED),
    "check MODEL --image-size 56x56": (0, UNUSED),
    "quantize MODEL -o OUT/new --scheme fp8 --dry-run": (0, UNUSED),
    "doctor MODEL": (2, UNUSED),
}


def test_modules_that_each_command_imports(model, tmp_path):
    """A verb that only looks, and an error that needs no model, import no more than they need: each library takes a second."""
    code = (
        "import json, sys; from vlmcompress.cli import main\nimports = {}\n"
        "for call, words in json.loads(sys.argv[1]):\n"
        "    try: code = main(words)\n    except SystemExit as end: code = end.code\n"
        "    imports[call] = code, sorted({name.partition('.')[0] for name in sys.modules})\n"
        "print(json.dumps(imports))"
    )
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text('{"model_type": "strange", "vision_config": {}}')
    places = {"MODEL": str(model), "OUT": str(tmp_path), "STRANGE": str(tmp_path / "strange")}
    calls = [
        (call, [re.sub("MODEL|OUT|STRANGE", lambda match: places[match[0]], word) for word in call.split()])
        for call in IMPORTS
    ]
    done = subprocess.run([sys.executable, "-c", code, json.dumps(calls)], capture_output=True, text=True, check=True)
    imports = json.loads(done.stdout.splitlines()[-1])
    assert {call: (code, sorted(IMPORTS[call][1] & {*names})) for call, (code, names) in imports.items()} == {
        call: (code, []) for call, (code, _) in IMPORTS.items()
    }


def test_flags_of_every_verb_may_stand_before_it(capfd):
    for call in ("--json list targets", "list --json targets"):
        assert cli.main(call.split()) == 0
        assert json.loads(capfd.readouterr().out)["targets"]
    assert cli.parse(["--debug", "list"]).debug and not cli.parse(["list"]).debug


def test_errors_as_json(capfd, model):
    assert cli.main(["quantize", str(model), "--scheme", "rtnn", "--json"]) == 2
    data = json.loads(capfd.readouterr().out)
    assert data["ok"] is False and data["exit_code"] == 2 and "did you mean 'rtn'" in data["error"]


def test_check(capfd, model):
    assert cli.main(["check", str(model), "--scheme", "rtn", "--target", "cpu"]) == 0
    assert "checks, no problem." in capfd.readouterr().out
    assert cli.main(["check", str(model), "--scheme", "w8a16", "--target", "cpu", "--json"]) == 2
    data = json.loads(capfd.readouterr().out)
    assert [finding["name"] for finding in data["findings"] if not finding["ok"]] == ["vllm: decoder"]


def test_list(capfd):
    assert cli.main(["list", "--json"]) == 0
    data = json.loads(capfd.readouterr().out)
    names = {kind: {entry["name"] for entry in entries} for kind, entries in data.items()}
    assert {"awq", "gptq", "fp8", "int8"} <= names["schemes"]
    assert {"h100", "a100", "cpu"} <= names["targets"]
    assert "qwen2-5-vl" in names["families"] and "awq-cpu" in names["recipes"]
    assert all(entry["about"] for entries in data.values() for entry in entries)


def test_list_reducers_prints_their_docstrings(capfd):
    from vlmcompress.reduction.choice import parse_reducer
    from vlmcompress.reduction.methods import REGISTRY
    from vlmcompress.reduction.support import SERVED_FAMILIES, engine_problem

    assert cli.main(["list", "reducers", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)["reducers"]
    assert [entry["name"] for entry in listed] == sorted([*REGISTRY.names(), "resize"])
    (resize,) = (entry for entry in listed if entry["name"] == "resize")
    assert resize["stage"] == "processor" and resize["served"] and resize.keys() == listed[0].keys()
    listed.remove(resize)
    for entry in listed:
        module = REGISTRY.get(entry["name"])
        assert (entry["stage"], entry["count"], entry["served"]) == (module.STAGE, module.COUNT, module.SERVED)
        assert entry["why_not"] == getattr(module, "WHY_NOT", None) and (entry["served"] or entry["why_not"])
        assert bool(entry["vllm"]) == entry["served"]
        for family in SERVED_FAMILIES.names():
            reason = engine_problem(SERVED_FAMILIES.constant(family, "ARCHITECTURE"), parse_reducer(entry["name"]))
            assert (reason is None) == (family in entry["vllm"])
    assert cli.main(["list", "reducers"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert " visionzip encoder fixed count vLLM: llava VisionZip: keep" in text
    assert " fastv llm fixed count transformers only FastV: after" in text
    assert " resize processor measured count by the processor Make images smaller" in text
    assert text.count("[measured: no better than random]") == sum(bool(entry["no_better_than"]) for entry in listed)


def test_methods_that_beat_no_baseline_are_labelled():
    """In eval/reducers.json, with default options at half the tokens, better than chance on no demo model."""
    from vlmcompress.reduction.methods import REGISTRY

    figures = json.loads((Path(__file__).resolve().parents[2] / "eval" / "reducers.json").read_text())["figures"]
    won: dict[str, list[bool]] = {}
    for row in figures:
        if row["keep"] == 0.5 and row["group"] == row["method"] and row.get("random"):
            won.setdefault(row["method"], []).append(row["random"][1] > 0)
    labelled = {name for name in REGISTRY.names() if REGISTRY.constant(name, "NO_BETTER_THAN")}
    assert labelled == {name for name, results in won.items() if not any(results) and name in REGISTRY}
    assert len(labelled) > 1 and "divprune" in won


def test_json_output_is_one_object_alone(capfd, monkeypatch):
    """Python, the descriptor and child processes print; only JSON arrives."""

    def noisy(_args):
        print("from python")
        os.write(1, b"from the descriptor\n")
        subprocess.run(["echo", "from a child"], check=True)
        return 0, {"ok": True}, "text"

    replaced(monkeypatch, noisy)
    assert cli.main(["list", "--json"]) == 0
    output = capfd.readouterr()
    assert json.loads(output.out) == {"ok": True}
    assert all(line in output.err for line in ("from python", "from the descriptor", "from a child"))


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def raising(error: BaseException):
    def verb(_args):
        raise error

    return verb


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("what\nand where"), 2, "error: what and where"),
        (GateError("accuracy fell"), 1, "error: accuracy fell"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 2, "error: out of memory"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            2,
            "error: out of memory",
        ),
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 7.79 GiB of which 0.9 GiB is "
                "free. Including non-PyTorch memory, this process has 6.9 GiB memory in use."
            ),
            2,
            "error: out of memory on the GPU: it has 7.79 GiB, of which 0.9 GiB are free, and needed 1.50 GiB more; ",
        ),
        (
            caused(UserError("config.json is not valid; restore it"), MemoryError()),
            2,
            "error: out of memory; use fewer",
        ),
        (ModuleNotFoundError("no", name="lm_eval.tasks"), 2, "pip install '.[eval]' in the checkout"),
        (ModuleNotFoundError("no", name="compressed_tensors"), 2, "pip install '.[compress]' in the checkout"),
    ],
)
def test_exit_codes(capfd, monkeypatch, error, code, message):
    replaced(monkeypatch, raising(error))
    assert cli.main(["list"]) == code
    output = capfd.readouterr().err
    assert message in output and output.count("\n") == 1


def test_a_package_that_other_code_misses_is_named_with_its_extra() -> None:
    for missing, remedy in (
        ("peft", r"pip install '\.\[compress\]' in the checkout"),
        ("tiktoken", "install tiktoken"),
    ):
        error = ModuleNotFoundError(f"No module named '{missing}'", name=missing)
        with pytest.raises(UserError, match=f"^what .No module named '{missing}'.; {remedy}"), foreign_errors("what"):
            raise error


def test_an_unusable_gpu_ends_in_a_note():
    """torch warns in these words where CUDA does not start; other warnings are silenced."""
    code = "import warnings; from vlmcompress.cli import _process; _process.quiet_libraries(); "
    code += "[warnings.warn(text) for text in ('CUDA initialization: CUDA unknown error', 'deprecated')]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "note: CUDA initialization: CUDA unknown error\n"


METADATA = "Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n"
MISFITS = {
    "torchvision": (
        "import torch; torch.library.register_fake('torchvision::roi_align')(print)",
        "operator torchvision::roi_align does not exist",
        r"pip install --force-reinstall --no-deps torchvision==0\.\d+\.\d+( --index-url https://download\.pytorch\.org/whl/\w+)?",
    ),
    "torchaudio": (
        "import ctypes; ctypes.CDLL('libtorch_of_another_release.so')",
        "libtorch_of_another_release.so: cannot open shared object file: No such file or directory",
        "pip uninstall torchaudio, which only sound needs",
    ),
}
"""Package -> how a build for another torch ends while it is imported, the reason in our line, and the remedy."""


@pytest.mark.parametrize("package", ["torchvision", pytest.param("torchaudio", marks=pytest.mark.slow)])
def test_a_package_for_another_torch_is_named(package, model, tmp_path):
    """transformers imports both where they are installed, and ends with an error of its own class or a library's path."""
    code, reason, remedy = MISFITS[package]
    for name, content in {f"{package}/__init__.py": code, f"{package}-0.1.dist-info/METADATA": METADATA}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content.format(package=package))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "vlmcompress", "plan", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    line = rf"error: {package} 0\.1 does not fit torch \S+ \({re.escape(reason)}\); {remedy}\n"
    assert done.returncode == 2 and re.fullmatch(line, done.stderr), done.stderr


def test_a_memory_limit_is_named(capfd, monkeypatch):
    """`ulimit -v`, which counts the mapped files of a model."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    replaced(monkeypatch, raising(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 46, before[1]))
    try:
        assert cli.main(["list"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert "error: out of memory: this process is limited to 70.4 TB, in which its libraries" in capfd.readouterr().err


def test_interrupted_quantize_prints_how_to_continue(capfd, monkeypatch):
    monkeypatch.setattr(cli.VERBS.get("quantize"), "run", raising(KeyboardInterrupt()))
    assert cli.main(["quantize", "m", "--scheme", "rtn"]) == 130
    assert capfd.readouterr().err == "interrupted; the same command goes on from here\n"
    assert cli.main(["quantize", "m", "--scheme", "rtn", "--dry-run"]) == 130
    assert capfd.readouterr().err == "interrupted\n"


def test_internal_error_keeps_its_traceback_in_a_file(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    replaced(monkeypatch, raising(ZeroDivisionError("by zero\nsecond line")))
    assert cli.main(["list"]) == 3
    line = capfd.readouterr().err
    assert line.startswith("error: internal error: ZeroDivisionError: by zero; traceback in ")
    assert line.count("\n") == 1
    assert "ZeroDivisionError" in Path(line.split("traceback in ")[1].strip()).read_text()
    assert cli.main(["list", "--debug"]) == 3
    assert "Traceback" in capfd.readouterr().err
