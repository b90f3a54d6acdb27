"""vLLM with disaggregated stages: separate servers for encoding images, prefill and decoding, in one shell script.

Encoder outputs are passed through a shared folder (`ECExampleConnector`, vLLM's reference), keys and values through NIXL
(`NixlConnector`), as in vLLM's `examples/disaggregated/disaggregated_encoder`. A server that only encodes has no KV cache,
and its token budget is irrelevant, so it is practically unlimited. Requests go to the encoder first (`max_tokens` 1), then to
the prefill server, then to the decoder; vLLM's example has a proxy that does that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from vlmcompress.export.launch import vllm
from vlmcompress.export.launch._template import execute, script
from vlmcompress.export.readers import LoadFacts

ENGINE, GPUS = "vllm", False
TITLE = "vLLM 0.32, encode, prefill and decode apart"
CHECKED = "encode and prefill-decode executed by our tests on vLLM's CPU build, the others read by vLLM's own parser"

_ROLES = """# Roles: encode | prefill-decode (two servers), or encode | prefill | decode (three). STORE is a folder
# that the encoder and the next stage share, in memory and yours alone: STORE=$(mktemp -d -p /dev/shm). A request
# goes to the encoder with max_tokens 1, then, unchanged, to the next stage; from prefill to decode, with the
# parameters that the prefill server answers. vLLM has a proxy for it:
# examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py
ROLE="${1:?role: encode, prefill-decode, prefill or decode}"
shift
[ "$ROLE" = decode ] || : "${STORE:?the folder that encoder and next stage share; make one by mktemp -d -p /dev/shm}"
"""


def further(facts: LoadFacts) -> str | None:
    """The refusal of a query-aware reducer, as the encoder gets no text; else None."""
    query_aware = facts.reducer and facts.reducer.query_aware
    return "the reducer is query-aware, and a separate encoder does not get the question" if query_aware else None


def files(facts: LoadFacts) -> Mapping[str, str]:
    """`vllm-split.sh`, which takes the role as its first argument."""
    lines = [_ROLES.rstrip()]
    if facts.reducer:
        lines.append(f"{vllm.PLUGIN}  # the reducer's plugin")
    lines += [f"export {key}={value}" for key, value in vllm.environment(facts).items()]
    lines.append('case "$ROLE" in')
    for role, (port, role_flags, raw) in _roles().items():
        flags = _encoding(vllm.flags(facts)) if role == "encode" else vllm.flags(facts)
        channel = {"prefill": 5559, "decode": 6000}.get(role)  # two NIXL servers of one machine must not share a port
        lines += [f"{role})"]
        lines += (
            [f'export VLLM_NIXL_SIDE_CHANNEL_PORT="${{VLLM_NIXL_SIDE_CHANNEL_PORT:-{channel}}}"'] if channel else []
        )
        lines += [execute('vllm serve "$MODEL"', [*flags, *role_flags], *raw, vllm.address(port)), ";;"]
    lines += ['*) echo "no role $ROLE: encode, prefill-decode, prefill or decode" >&2; exit 2 ;;', "esac"]
    return {"vllm-split.sh": script(f"{facts.name} in {TITLE}", *lines)}


def command(facts: LoadFacts) -> str:
    """The lines that start two servers, from the checkpoint's folder."""
    servers = "sh serve/vllm-split.sh encode & sh serve/vllm-split.sh prefill-decode"
    return f'export STORE="$(mktemp -d -p /dev/shm)"; {servers}'


def _roles() -> dict[str, tuple[int, list[str], list[str]]]:
    """Role -> port, flags, and flags that the shell expands."""
    common = ["--enable-request-id-headers"]
    encoder_only = [
        "--no-enable-prefix-caching",
        "--mm-encoder-only",
        "--enforce-eager",
        "--max-num-batched-tokens",
        "114688",
    ]
    return {
        "encode": (8001, [*common, *encoder_only], [_stored("ec_producer")]),
        "prefill-decode": (8002, common, [_stored("ec_consumer")]),
        "prefill": (8002, [*common, *_keys("kv_producer")], [_stored("ec_consumer")]),
        "decode": (8003, [*common, *_keys("kv_consumer")], []),
    }


def _encoding(flags: list[str]) -> list[str]:
    """The flags that also apply to an encoder, without those of the KV cache and the language model's steps."""
    left_out = {"--enable-prefix-caching", "--kv-cache-dtype", "--attention-backend", "--max-num-batched-tokens"}
    kept: list[str] = []
    skipping = False
    for flag in flags:
        skipping = flag in left_out if flag.startswith("--") else skipping
        kept += [] if skipping else [flag]
    return kept


def _stored(role: str) -> str:
    """`--ec-transfer-config` with the folder, which the shell inserts."""
    head = f'{{"ec_connector": "ECExampleConnector", "ec_role": "{role}", "ec_connector_extra_config": '
    return f"""--ec-transfer-config '{head}{{"shared_storage_path": "'"$STORE"'"}}}}'"""


def _keys(role: str) -> list[str]:
    return ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": role})]
