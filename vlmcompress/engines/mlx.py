"""MLX as an engine, and mlx-vlm's OpenAI-compatible server, on a folder that the format `mlx` wrote or another that it loads.

`ENGINE` runs `mlx_worker.py` in a separate process. Both run in the Python that `VLMCOMPRESS_ENGINE_PYTHON` names, by default
this one: mlx-vlm brings opencv-python, which overwrites files of the opencv-python-headless of vLLM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vlmcompress.engines.local import OFFLINE, Local
from vlmcompress.engines.vllm import PYTHON_VARIABLE, available, interpreter
from vlmcompress.engines.vllm.serve import example, require_free_port
from vlmcompress.export import readers
from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError

ADVICE = f"pip install '.[mlx]' in the checkout of vlmcompress, or point {PYTHON_VARIABLE} to a Python that has mlx-vlm"
ENGINE = Local(
    name="mlx",
    title="MLX",
    module=Path(__file__).with_name("mlx_worker.py"),
    interpreter=interpreter,
    advice=ADVICE,
    shares=True,
)


def is_mlx(folder: str | Path) -> bool:
    """Whether a folder holds a quantized checkpoint for MLX."""
    try:
        return "quantization" in json_files.read(Path(folder) / "config.json")
    except (OSError, ValueError, TypeError):
        return False


def serve(folder: str | Path, host: str, port: int, refused: Sequence[str], extra: Sequence[str]) -> None:
    """Replace this process by the server.

    The server loads the model that a request names, so that the name has to be a path: it runs in the folder's parent.

    Args:
        refused: given flags that only vLLM has.
        extra: further flags of `mlx_vlm.server`.

    Raises:
        UserError: there is no such checkpoint, mlx-vlm is missing or would not load it, or the port is taken.
    """
    from vlmcompress.engines import mlx_reducers  # it imports numpy

    folder = Path(folder).resolve()
    if refused:
        raise UserError(f"mlx-vlm's server has no {refused[0]}; leave it out")
    try:
        config = json_files.read(folder / "config.json")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no checkpoint, its config.json can't be read ({error})") from error
    if reason := mlx_reducers.problem(config):
        raise UserError(f"{folder}: {reason}")
    readers.require_readable(folder, ["mlx"], "write it by vlmcompress export --format mlx")
    for package in ("mlx_vlm", "mlx_audio"):  # the second is the server's
        if not available(package):
            raise UserError(f"{interpreter()} has no {package.replace('_', '-')}; {ADVICE}")
    require_free_port(host, port)
    flags = ["--model", folder.name, "--host", host, "--port", str(port), *extra]
    if "vlmcompress" in config and mlx_reducers.name_of(config) not in mlx_reducers.MROPE:
        flags += ["--max-num-seqs", "1"]
    print(f"mlx-vlm's server\n\n{example(folder, host, port)}\n", file=sys.stderr, flush=True)
    os.chdir(folder.parent)
    server = str(Path(__file__).with_name("mlx_server.py"))
    program = [server] if "vlmcompress" in config else ["-P", "-m", "mlx_vlm.server"]
    os.execve(interpreter(), [interpreter(), *program, *flags], {**OFFLINE, **os.environ})
