"""Launch files: how to start a checkpoint in each engine and form of deployment; `_table.py` lists them.

They are pure functions from `LoadFacts` (from config.json and the manifest) to text; `export.launch_files` writes it to the
checkpoint's folder `serve/`.
"""

from __future__ import annotations

from vlmcompress.export.launch._table import LAUNCHERS, Launcher
from vlmcompress.export.readers import LoadFacts, engine_support

__all__ = ["LAUNCHERS", "command", "commands", "launch_problem", "render_launch_files"]

_NOTES = """HOST, PORT and MODEL may be set for the scripts; further flags go to the engine and override those in the file. The
scripts listen on this machine only unless HOST says otherwise; put an API key and a proxy in front of anything that others can
reach. Servers fetch images from any address that a request names; vLLM's only from the hosts in MEDIA_DOMAINS
(`"a.org b.org"`), if that is set."""


def launch_problem(name: str, facts: LoadFacts) -> str | None:
    """The reason why an entry has no files for a checkpoint, as the end of a sentence about it; None if it has files."""
    launcher = LAUNCHERS[name]
    if launcher.gpus and facts.machine and facts.machine.capability is None:
        return f"its files are for NVIDIA GPUs, and the target is {facts.machine.title}"
    return engine_support(launcher.engine, facts).reason or launcher.problem(facts)


def render_launch_files(facts: LoadFacts) -> dict[str, str]:
    """All launch files of a checkpoint: path below `serve/` -> text, with a `README.md` on the files, how each was checked, and
    the reasons for missing ones."""
    texts, rows, missing = dict[str, str](), list[str](), list[str]()
    for name, launcher in LAUNCHERS.items():
        if reason := launch_problem(name, facts):
            missing.append(f"- {launcher.title}: {reason}.")
            continue
        files = launcher.files(facts)
        of_launcher = ", ".join(f"`{path}`" for path in files)
        rows.append(f"| {launcher.title} | {of_launcher} | `{command(name, facts)}` | {launcher.checked} |")
        texts |= files
    sections = [f"# How to serve {facts.name}"]
    if rows:
        sections += ["\n".join(["| | files | from the folder above | checked |", "|---|---|---|---|", *rows]), _NOTES]
    loading = _loading(facts).values()
    if facts.machine and any(launcher.engine == "vllm" or launcher.gpus for launcher in loading):
        count = f"{facts.gpus} of them" if facts.gpus > 1 else "one of them"
        sections.append(f"Flags are for {facts.machine.title}, {count}.")
    if facts.reducer and "vllm.sh" in texts:
        sections.append(
            f"The checkpoint carries the reducer `{facts.reducer.label}`: vLLM needs vlmcompress's plugin next to it "
            "(`pip install vlmcompress` in its environment). `vlmcompress serve` starts the same server."
        )
    if missing:
        sections += ["No files for these:", "\n".join(missing)]
    return texts | {"README.md": "\n\n".join(sections) + "\n"}


def commands(facts: LoadFacts) -> list[tuple[str, str, str]]:
    """(title, command, how it was checked) of each entry with files for the checkpoint, vLLM first."""
    launchers = _loading(facts)
    names = sorted(launchers, key=lambda name: (name != "vllm", name))
    return [(launchers[name].title, command(name, facts), launchers[name].checked) for name in names]


def command(name: str, facts: LoadFacts) -> str:
    """The command that uses the files of an entry, run in the checkpoint's folder."""
    return LAUNCHERS[name].command.format(resource=facts.resource)


def _loading(facts: LoadFacts) -> dict[str, Launcher]:
    """The entries that have files for a checkpoint, by name."""
    return {name: launcher for name, launcher in LAUNCHERS.items() if launch_problem(name, facts) is None}
