"""Files for CI servers: the steps of the GitHub action run here with bash, what they name exists, commands parse."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit import forks
from tests.kit.places import DEMO_LLAVA, ROOT
from vlmcompress import cli

CI = ROOT / "eval" / "ci"
ACTION = yaml.safe_load((CI / "action.yml").read_text())
STEPS = ACTION["runs"]["steps"]
WRITTEN = re.compile(r'echo "(\w+)=.*GITHUB_OUTPUT')
EXPRESSION = re.compile(r"\$\{\{ *(.*?) *\}\}")
GATES = {"fail": ("size: 0.01", 1), "inconclusive": ('suites: {"*": {margin: 0.001}}', 4)}  # and their exit codes


def run(folder: Path, inputs: Mapping[str, str], github: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """Run the action's own steps as GitHub does, in `folder`; return the exit code of the last one and the action's outputs.

    Steps of other actions are left out. An expression that names an unknown input, step or variable raises KeyError.
    """
    texts = {f"inputs.{name}": str(entry.get("default", "")) for name, entry in ACTION["inputs"].items()}
    texts |= {"github.action_path": str(CI), "runner.temp": str(folder)}
    texts |= {f"github.{name}": text for name, text in github.items()}
    assert inputs.keys() <= ACTION["inputs"].keys()
    texts |= {f"inputs.{name}": text for name, text in inputs.items()}
    writing = [(step["id"], name) for step in STEPS if "id" in step for name in WRITTEN.findall(step["run"])]
    texts |= {f"steps.{step}.outputs.{name}": "" for step, name in writing}

    def value(expression: str) -> str:
        return next((texts[name] for name in expression.split(" || ") if texts[name]), "")

    def holds(condition: str) -> bool:
        tests = [re.fullmatch(r"(\S+) (==|!=) '(.*)'", part) for part in condition.split(" && ")]
        return condition == "always()" or all(
            (texts[test[1]] == test[3]) == (test[2] == "==") for test in tests if test
        )

    files = {name: folder / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "GITHUB_ENV")}
    for step in STEPS:
        if "run" not in step or not holds(step.get("if", "always()")):
            continue
        files["GITHUB_OUTPUT"].write_text("")
        environment = {name: EXPRESSION.sub(lambda match: value(match[1]), text) for name, text in step["env"].items()}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            env=os.environ
            | {name: str(path) for name, path in files.items()}
            | environment
            | {"PATH": f"{folder}:{os.environ['PATH']}", "GITHUB_REPOSITORY": "me/mine"},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        outputs = dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
        texts |= {f"steps.{step['id']}.outputs.{name}": text for name, text in outputs.items()} if "id" in step else {}
        if done.returncode:
            break
    outputs = ACTION["outputs"].items()
    return done.returncode, {name: value(EXPRESSION.fullmatch(output["value"])[1]) for name, output in outputs}


def test_the_steps_give_the_exit_code_of_the_gate(tmp_path: Path) -> None:
    """On a demo model that the action compresses: the verdict, the summary, and a comment that is updated. The second run goes
    on from the answers of the first."""
    (tmp_path / "recipe.yaml").write_text("scheme: rtn\n")
    (tmp_path / "gh").write_text('#!/bin/sh\n{ echo "$@"; cat; } > comment\n')
    (tmp_path / "vlmcompress").write_text(f'#!/bin/sh\nexec "{forks.python(*forks.OURS)}" -m vlmcompress "$@"\n')
    for program in ("gh", "vlmcompress"):
        (tmp_path / program).chmod(0o755)
    inputs = {"model": str(DEMO_LLAVA), "install": "", "arguments": "--engine hf --suite world --limit 6"}
    for verdict, (gate, exit_code) in GATES.items():
        (tmp_path / "gate.yaml").write_text(gate)
        recipe = "recipe.yaml" * (verdict == "fail")
        event = {"event_name": "pull_request", "event.pull_request.number": "7", "token": "secret"}
        code, outputs = run(tmp_path, inputs | {"recipe": recipe, "gate": "gate.yaml"}, event)
        assert (code, outputs) == (exit_code, {"verdict": verdict, "report": "report"})
        report = (tmp_path / "report" / "report.md").read_text()
        flags = "pr comment 7 --repo me/mine --edit-last --create-if-none --body-file -\n"
        assert (tmp_path / "comment").read_text() == flags + report
        assert (tmp_path / "GITHUB_STEP_SUMMARY").read_text().endswith(report)
    (tmp_path / "comment").unlink()
    code, outputs = run(tmp_path, inputs | {"recipe": "", "gate": "missing.yaml"}, {"event_name": "push"})
    assert code == 2 and not outputs["verdict"] and not (tmp_path / "comment").exists()


def test_the_action_is_well_formed() -> None:
    """By GitHub's reference of its syntax; no expression stands in a script, where its text would be executed."""
    assert (
        ACTION.keys() == {"name", "description", "inputs", "outputs", "runs"} and ACTION["runs"]["using"] == "composite"
    )
    assert all(entry.keys() <= {"description", "required", "default"} for entry in ACTION["inputs"].values())
    for step in STEPS:
        needed = {"name", "run", "shell", "env"} if "run" in step else {"name", "uses", "with"}
        assert needed <= step.keys() <= needed | {"if", "id"}
        assert not EXPRESSION.search(step.get("run", "")) and step.get("shell", "bash") == "bash"


def test_the_workflow_calls_the_action() -> None:
    workflow = yaml.safe_load((CI / "github-actions.yml").read_text())
    (call,) = [step for step in workflow["jobs"]["gate"]["steps"] if step["uses"].endswith("eval/ci")]
    needed = {name for name, entry in ACTION["inputs"].items() if entry.get("required")}
    assert needed <= call["with"].keys() <= ACTION["inputs"].keys()
    assert workflow["permissions"]["pull-requests"] == "write"


@pytest.mark.parametrize("name", ["gitlab-ci.yml", "Jenkinsfile"])
def test_commands_for_other_servers_parse(name: str) -> None:
    text = (CI / name).read_text().replace("\\\n", " ")
    commands: list[Any] = [
        shlex.split(command)[1:] for command in re.findall(r"vlmcompress [^'\n]+", text) if " -" in command
    ]
    assert [cli.parse(command).verb for command in commands] == ["quantize", "eval"]
