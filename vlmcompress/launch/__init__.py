"""Launch files: how to start a checkpoint in each engine and form of deployment. One file per engine, its name is the entry's.

Everything here is a pure map from `Facts` (what config.json and the manifest say) to text; `checkpoint.launch_files` writes it
into the checkpoint's folder `serve/`. An entry is a module with

    TITLE: str                        the engine's name for people, with the version that the files are for
    CHECKED: str                      how the files were checked
    refusal(facts) -> str | None      why there are none: what it cannot load, as the end of a sentence about it
    files(facts) -> {path: text}      paths below `serve/`, relative to it
    command(facts) -> str             the line that uses them, from the checkpoint's folder

No flag is guessed: each entry says in its docstring where its flags were read. All files together are some 20 kB.
"""

from __future__ import annotations

from vlmcompress.common.registry import LAUNCHERS as REGISTRY
from vlmcompress.launch import _grafana
from vlmcompress.launch._facts import Facts, Group, Machine, Reducer, read

__all__ = ["REGISTRY", "Facts", "Group", "Machine", "Reducer", "commands", "files", "read"]

_NOTES = """HOST, PORT and MODEL may be set for the scripts; further flags go to the engine and win over those in the file:
`PORT=9000 sh serve/vllm.sh --max-model-len 8192`. The scripts listen on this machine only unless HOST says otherwise; put
an API key and a proxy before whatever others can reach."""
_DASHBOARD = """`grafana.json` is a dashboard of vLLM's Prometheus metrics (`/metrics` of the server): import it in Grafana and
choose the data source."""


def files(facts: Facts) -> dict[str, str]:
    """All launch files of a checkpoint: path below `serve/` -> text. Always has `README.md`, which says what is there and why
    the rest is not; `grafana.json` where vLLM serves it."""
    texts: dict[str, str] = {}
    for launcher in map(REGISTRY.get, REGISTRY):
        if launcher.refusal(facts) is None:
            texts |= launcher.files(facts)
    if REGISTRY.get("vllm").refusal(facts) is None:
        texts["grafana.json"] = _grafana.dashboard(facts)
    return texts | {"README.md": _readme(facts)}


def commands(facts: Facts) -> list[tuple[str, str]]:
    """Title and command of each engine that loads the checkpoint, vLLM first."""
    names = sorted(REGISTRY, key=lambda name: (name != "vllm", name))
    launchers = [REGISTRY.get(name) for name in names]
    return [(launcher.TITLE, launcher.command(facts)) for launcher in launchers if launcher.refusal(facts) is None]


def _readme(facts: Facts) -> str:
    """The page `serve/README.md`: which launch files there are, how each was checked, which engines have none and why."""
    rows, missing = [], []
    for name in REGISTRY:
        launcher = REGISTRY.get(name)
        reason = launcher.refusal(facts)
        if reason is None:
            paths = ", ".join(f"`{path}`" for path in launcher.files(facts))
            rows.append(f"| {launcher.TITLE} | {paths} | `{launcher.command(facts)}` | {launcher.CHECKED} |")
        else:
            missing.append(f"- {launcher.TITLE}: {reason}.")
    sections = [f"# How to serve {facts.name}"]
    if rows:
        head = "| | files | from the folder above | checked |\n|---|---|---|---|\n"
        sections += [head + "\n".join(rows), _NOTES]
    if facts.machine:
        count = f"{facts.gpus} of them" if facts.gpus > 1 else "one of them"
        sections.append(f"Flags are for {facts.machine.title}, {count}.")
    if facts.reducer and facts.reducer.served:
        sections.append(
            f"The checkpoint carries the reducer `{facts.reducer.label}`: vLLM needs vlmcompress's plugin beside it "
            "(`pip install vlmcompress` in its environment). `vlmcompress serve` starts the same server."
        )
    if REGISTRY.get("vllm").refusal(facts) is None:
        sections.append(_DASHBOARD)
    if missing:
        sections += ["No files for these:", "\n".join(missing)]
    return "\n\n".join(sections) + "\n"
