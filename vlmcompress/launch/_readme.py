"""The page `serve/README.md`: which launch files there are, how each was checked, and which engines have none and why."""

from __future__ import annotations

from vlmcompress.common.registry import LAUNCHERS as REGISTRY
from vlmcompress.launch._facts import Facts

_NOTES = """HOST, PORT and MODEL may be set for the scripts; further flags go to the engine and win over those in the file:
`PORT=9000 sh serve/vllm.sh --max-model-len 8192`. The scripts listen on this machine only unless HOST says otherwise; put
an API key and a proxy before whatever others can reach."""
_DASHBOARD = """`grafana.json` is a dashboard of vLLM's Prometheus metrics (`/metrics` of the server): import it in Grafana and
choose the data source."""


def text(facts: Facts) -> str:
    """The text of the page."""
    there, missing = [], []
    for name in REGISTRY:
        launcher = REGISTRY.get(name)
        reason = launcher.refusal(facts)
        if reason is None:
            paths = ", ".join(f"`{path}`" for path in launcher.files(facts))
            there.append(f"| {launcher.TITLE} | {paths} | `{launcher.command(facts)}` | {launcher.CHECKED} |")
        else:
            missing.append(f"- {launcher.TITLE}: {reason}.")
    sections = [f"# How to serve {facts.name}"]
    if there:
        head = "| | files | from the folder above | checked |\n|---|---|---|---|\n"
        sections += [head + "\n".join(there), _NOTES]
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
