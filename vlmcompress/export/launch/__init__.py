"""Launch files: how to start a checkpoint in each engine and form of deployment; `_table.py` lists them.

They are pure functions from `LoadFacts` (from config.json and the manifest) to text; `export.launch_files` writes it to the
checkpoint's folder `serve/`. All files together are about 20 kB.
"""

from __future__ import annotations

from vlmcompress.export.launch import _grafana
from vlmcompress.export.launch._table import LAUNCHERS, Launcher
from vlmcompress.export.readers import LoadFacts, engine_support

__all__ = ["LAUNCHERS", "command", "commands", "launch_problem", "render_launch_files"]

_NOTES = """HOST, PORT and MODEL may be set for the scripts; further flags go to the engine and override those in the file:
`PORT=9000 sh {script} {length} 8192`. The scripts listen on this machine only unless HOST says otherwise; put
an API key and a proxy in front of anything that others can reach. Servers fetch images from any address that a request
names; vLLM's only from the hosts in MEDIA_DOMAINS (`"a.org b.org"`), if that is set."""
_LENGTHS = {"vllm.sh": "--max-model-len", "llamacpp.sh": "--ctx-size"}  # the flag of a context's length
_DASHBOARD = """`grafana.json` is a dashboard of vLLM's Prometheus metrics (`/metrics` of the server): import it in Grafana and
choose the data source."""


def launch_problem(name: str, facts: LoadFacts) -> str | None:
    """The reason why an entry has no files for a checkpoint, as the end of a sentence about it; None if it has files."""
    launcher = LAUNCHERS[name]
    if launcher.gpus and facts.machine and facts.machine.capability is None:
        return f"its files are for NVIDIA GPUs, and the target is {facts.machine.title}"
    return engine_support(launcher.engine, facts).reason or launcher.problem(facts)


def render_launch_files(facts: LoadFacts) -> dict[str, str]:
    """All launch files of a checkpoint: path below `serve/` -> text. Always includes `README.md`, which lists the files and the
    reasons for missing ones; includes `grafana.json` if vLLM serves the checkpoint."""
    texts: dict[str, str] = {}
    for launcher in _loading(facts).values():
        texts |= launcher.files(facts)
    if launch_problem("vllm", facts) is None:
        texts["grafana.json"] = _grafana.dashboard(facts)
    return texts | {"README.md": _readme(facts, list(texts))}


def commands(facts: LoadFacts) -> list[tuple[str, str, str]]:
    """(title, command, how it was checked) of each entry with files for the checkpoint, vLLM first."""
    launchers = _loading(facts)
    names = sorted(launchers, key=lambda name: (name != "vllm", name))
    return [(launchers[name].title, command(name, facts), launchers[name].checked) for name in names]


def command(name: str, facts: LoadFacts) -> str:
    """The command that uses the files of an entry, run in the checkpoint's folder."""
    line = LAUNCHERS[name].command
    return line.format(resource=facts.resource) if isinstance(line, str) else line(facts)


def _loading(facts: LoadFacts) -> dict[str, Launcher]:
    """The entries that have files for a checkpoint, by name."""
    return {name: launcher for name, launcher in LAUNCHERS.items() if launch_problem(name, facts) is None}


def _readme(facts: LoadFacts, paths: list[str]) -> str:
    """The page `serve/README.md`: which launch files there are, how each was checked, which engines have none and why."""
    rows, missing = [], []
    for name, launcher in LAUNCHERS.items():
        reason = launch_problem(name, facts)
        if reason is None:
            of_launcher = ", ".join(f"`{path}`" for path in launcher.files(facts))
            rows.append(f"| {launcher.title} | {of_launcher} | `{command(name, facts)}` | {launcher.checked} |")
        else:
            missing.append(f"- {launcher.title}: {reason}.")
    sections = [f"# How to serve {facts.name}"]
    if rows:
        head = "| | files | from the folder above | checked |\n|---|---|---|---|\n"
        sections.append(head + "\n".join(rows))
    if script := next((name for name in _LENGTHS if name in paths), None):
        sections.append(_NOTES.format(script=f"serve/{script}", length=_LENGTHS[script]))
    if facts.machine and any(launcher.engine == "vllm" or launcher.gpus for launcher in _loading(facts).values()):
        count = f"{facts.gpus} of them" if facts.gpus > 1 else "one of them"
        sections.append(f"Flags are for {facts.machine.title}, {count}.")
    if facts.reducer and launch_problem("vllm", facts) is None:
        sections.append(
            f"The checkpoint carries the reducer `{facts.reducer.label}`: vLLM needs vlmcompress's plugin next to it "
            "(`pip install vlmcompress` in its environment). `vlmcompress serve` starts the same server."
        )
    if "grafana.json" in paths:
        sections.append(_DASHBOARD)
    if missing:
        sections += ["No files for these:", "\n".join(missing)]
    return "\n\n".join(sections) + "\n"
