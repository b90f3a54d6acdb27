"""What llama.cpp's server says otherwise than vLLM's: its version, and how many of a prompt's tokens show an image.

A side that is GGUF is served by llama.cpp (`engines/llamacpp_server.py`), its requests by as many slots as there are clients,
up to `SLOTS`. It has no cache of processed images, and its prompt cache is off, so that runs are cold ones.
"""

from __future__ import annotations

import importlib.metadata
import json
import urllib.request
from collections.abc import Sequence
from typing import Any

from vlmcompress.engines.vllm.serve import Server
from vlmcompress.evaluation.speed.client import Outcome

SLOTS = 8
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def version() -> str:
    """The version of the package that holds llama.cpp."""
    return f"xllamacpp {importlib.metadata.version('xllamacpp')}"


def count_visual_tokens(
    running: Server, conversations: Sequence[list[dict[str, Any]]], outcomes: Sequence[Outcome]
) -> None:
    """Fill in the visual tokens of answered requests: what prompts have more than the same conversations without images."""
    for messages, outcome in zip(conversations, outcomes, strict=True):
        if not outcome.error:
            without = []
            for message in messages:
                if not isinstance(content := message["content"], str):
                    content = "".join(part["text"] for part in content if part["type"] == "text")
                without.append(message | {"content": content})
            prompt = _post(running, "/apply-template", {"messages": without})
            text = {"content": prompt["prompt"], "add_special": True, "parse_special": True}
            outcome.visual_tokens = outcome.prompt_tokens - len(_post(running, "/tokenize", text)["tokens"])


def _post(running: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        running.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with _DIRECT.open(request, timeout=60) as reply:
        return json.load(reply)
