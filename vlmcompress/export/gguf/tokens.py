"""llama.cpp's tokens of texts, for the tokenizer of a GGUF file: the package `xllamacpp` on a model with dummy weights.

llama.cpp ends its process on errors, so it runs in another one. This file is run by path: `python tokens.py MODEL TEXTS
TOKENS`, where TEXTS and TOKENS are JSON files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ != "__main__":  # the script does not import the package
    from vlmcompress.utils.errors import UserError
    from vlmcompress.utils.messages import shortened

WIDTH, CONTEXT, TIMEOUT = 32, 64, 300  # seconds


def gguf_token_ids(
    keys: Mapping[str, Any], texts: Sequence[str], add: Callable[[Any, str, Any], None]
) -> list[list[int]] | None:
    """The tokens of each text, with BOS and EOS; None: xllamacpp is not installed, or cannot be imported.

    Args:
        keys: the metadata of a tokenizer, see `tokenizer.metadata`.
        add: function that adds a metadata entry to a `gguf.GGUFWriter`.

    Raises:
        UserError: llama.cpp refuses the tokenizer, or TMPDIR has no space for a small file.
    """
    if find_spec("xllamacpp") is None:
        return None
    with tempfile.TemporaryDirectory(prefix="vlmcompress-tokens-") as place:
        model, lines, result = (Path(place, name) for name in ("model.gguf", "texts.json", "tokens.json"))
        try:
            _write(model, keys, add)
            lines.write_text(json.dumps(texts), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write to {place} ({error}); free some space there, or set TMPDIR") from error
        command = [sys.executable, __file__, str(model), str(lines), str(result)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=False)
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"llama.cpp did not tokenize with this tokenizer within {TIMEOUT} s; write another format"
            ) from error
        tokens = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else None
    if tokens == []:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UserError(f"llama.cpp refuses the tokenizer ({shortened(last, 200)}); write another format")
    return tokens


def _write(path: Path, keys: Mapping[str, Any], add: Callable[[Any, str, Any], None]) -> None:
    """Write a model of one block with this tokenizer and zero weights."""
    import gguf
    import numpy as np

    writer, size = gguf.GGUFWriter(path, "llama"), len(keys["tokenizer.ggml.tokens"])
    sizes = {"context_length": CONTEXT, "embedding_length": WIDTH, "block_count": 1, "feed_forward_length": WIDTH}
    # The minimum for llama.cpp's loader of `llama`: shapes must fit, values are never used.
    for key, value in {**sizes, "attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5}.items():
        add(writer, f"llama.{key}", value)
    for key, value in keys.items():
        add(writer, key, value)
    writer.add_tensor("token_embd.weight", np.zeros((size, WIDTH), np.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.zeros(WIDTH, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((WIDTH, WIDTH), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Ask llama.cpp's server for the tokens of each text."""
    model, lines, result = sys.argv[1:]
    import xllamacpp

    Path(result).write_text("[]", encoding="utf-8")  # exists even if llama.cpp ends the process
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = model, CONTEXT, 1
    params.cpuparams.n_threads, params.warmup, params.fit_params = 1, False, False
    server = xllamacpp.Server(params)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    tokens = []
    for text in json.loads(Path(lines).read_text(encoding="utf-8")):
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        call = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with opener.open(call) as response:
            tokens.append(json.load(response)["tokens"])
    Path(result).write_text(json.dumps(tokens), encoding="utf-8")
    os._exit(0)  # here, as xllamacpp's `~Server` waits for ever for the end of a loop that has not begun yet


if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    try:
        main()
    except Exception:  # which holds the server
        traceback.print_exc()
        os._exit(1)
