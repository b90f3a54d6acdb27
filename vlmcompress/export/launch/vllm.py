"""vLLM's OpenAI-compatible server, as a shell script, and variants: speculative decoding by a checkpoint's own head, and
separate servers for encoding images, prefill and decoding.

Flags are those of vLLM 0.32 (`engine/arg_utils.py`, `entrypoints/launchers/cli_args.py`). INT8 on Blackwell requires
disabling the CUTLASS kernel, which fails there (vllm issue 54311). Only FlashInfer supports FP8 keys and values on Ampere.

Between separate servers encoder outputs are passed through a shared folder (`ECExampleConnector`, vLLM's reference), keys and
values through NIXL (`NixlConnector`), as in vLLM's `examples/disaggregated/disaggregated_encoder`. A server that only encodes
has no KV cache, and its token budget is irrelevant, so it is practically unlimited.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from vlmcompress.export.launch import _script
from vlmcompress.export.launch._script import execute, script
from vlmcompress.export.readers import LoadFacts

TITLE = "vLLM 0.32"
IMAGES = 4
# If VLLM_PLUGINS lists the plugins to load, it must include the reducer's.
PLUGIN = 'if [ -n "${VLLM_PLUGINS+set}" ]; then export VLLM_PLUGINS="$VLLM_PLUGINS,vlmcompress"; fi'
# Hosts from which requests may have images fetched, separated by spaces; without it vLLM fetches any address.
DOMAINS = "${MEDIA_DOMAINS:+--allowed-media-domains $MEDIA_DOMAINS}"
_ROLES = """# Roles: encode | prefill-decode (two servers), or encode | prefill | decode (three). STORE is a folder
# that the encoder and the next stage share, in memory and yours alone: STORE=$(mktemp -d -p /dev/shm). A request
# goes to the encoder with max_tokens 1, then, unchanged, to the next stage; from prefill to decode, with the
# parameters that the prefill server answers. vLLM has a proxy for it:
# examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py
ROLE="${1:?role: encode, prefill-decode, prefill or decode}"
shift
[ "$ROLE" = decode ] || : "${STORE:?the folder that encoder and next stage share; make one by mktemp -d -p /dev/shm}\""""
# The folder of images' features, which the shell inserts.
_STORED = (
    """--ec-transfer-config '{"ec_connector": "ECExampleConnector", "ec_role": "ROLE", """
    """"ec_connector_extra_config": {"shared_storage_path": "'"$STORE"'"}}'"""
)


def flags(facts: LoadFacts, left_out: Collection[str] = ()) -> list[str]:
    """Flags of `vllm serve` for the checkpoint, without its path, host and port, and without those that are left out (by their
    names in `EngineArgs`)."""
    values: dict[str, Any] = {
        "served_model_name": facts.name,
        "dtype": "auto",
        "max_model_len": "auto",  # the model's, or less if memory is short
        "limit_mm_per_prompt": {"image": IMAGES, "video": 0},
        "enable_prefix_caching": True,  # its default is off for models with recurrent states
    }
    if facts.kv_fp8:
        values["kv_cache_dtype"] = "fp8"
        if facts.machine and facts.machine.capability and facts.machine.capability < (8, 9):
            values["attention_backend"] = "FLASHINFER"
    if facts.gpus > 1:
        values["tensor_parallel_size"] = facts.gpus
    if facts.code:
        values["trust_remote_code"] = True
    flags = []
    for key, value in ((key, value) for key, value in values.items() if key not in left_out):
        text = [] if value is True else [json.dumps(value) if isinstance(value, dict) else str(value)]
        flags += [f"--{key.replace('_', '-')}", *text]
    if facts.reducer and facts.reducer.takes_shares:
        flags.append("--trust-request-mm-kwargs")
    return flags


def address(port: int) -> str:
    """The flags that the shell expands from HOST, PORT and MEDIA_DOMAINS; `port`: the default port."""
    return f"{_script.address(port)} {DOMAINS}"


def environment(facts: LoadFacts) -> dict[str, str]:
    """Environment variables that the checkpoint needs on its machine."""
    capability = facts.machine.capability if facts.machine else None
    int8 = any(group.kind == "int" and group.activations == 8 for group in facts.groups.values())
    if capability and capability >= (10, 0) and int8:
        return {"VLLM_DISABLED_KERNELS": "CutlassInt8ScaledMMLinearKernel"}
    return {}


def _exports(facts: LoadFacts) -> list[str]:
    """Lines of a script that set what the checkpoint needs on its machine."""
    return [
        *([PLUGIN] if facts.reducer else []),
        *(f"export {key}={value}" for key, value in environment(facts).items()),
    ]


def scripts(facts: LoadFacts) -> dict[str, str]:
    """`vllm.sh`, and one for the checkpoint's draft head."""
    lines = _exports(facts)
    if facts.reducer:
        lines.insert(
            0,
            f"# The checkpoint carries the reducer {facts.reducer.label}: vLLM needs vlmcompress's plugin next to it, and\n"
            "# refuses the checkpoint by its architecture otherwise. `vlmcompress serve` starts the same server.",
        )
    lines += [
        "# Videos are off: raise their number in --limit-mm-per-prompt where the model takes any. MEDIA_DOMAINS: the",
        "# hosts from which requests may have images fetched; by default all. Set it where others reach the server.",
        execute('vllm serve "$MODEL"', flags(facts), address(8000)),
    ]
    title = f"{facts.name} in {TITLE}" + (f", for {facts.machine.title}" if facts.machine else "")
    texts = {"vllm.sh": script(title, *lines)}
    if facts.draft:
        setting = {"method": facts.draft, "num_speculative_tokens": 1}
        text = [
            "# The checkpoint's head drafts one token per step. Needs a GPU. Compare with more tokens and with no drafting.",
            execute('sh "$(dirname -- "$0")/vllm.sh"', ["--speculative-config", json.dumps(setting)]),
        ]
        texts[f"vllm-{facts.draft}.sh"] = script(f"{title}, drafting by the checkpoint's {facts.draft} head", *text)
    return texts


def drafted(facts: LoadFacts, tokens: int) -> dict[str, str]:
    """`vllm.sh` for a draft's folder `serve/`, which starts the draft's target with the draft.

    `tokens`: number of tokens that are guessed per step.
    """
    setting = json.dumps({"method": "eagle3", "model": "$DRAFT", "num_speculative_tokens": tokens}).replace('"', '\\"')
    lines = [
        'DRAFT="$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)"',
        f'[ "$MODEL" != "$DRAFT" ] || {{ echo "set MODEL to the folder of {facts.name}" >&2; exit 2; }}',
        *_exports(facts),
        execute('vllm serve "$MODEL"', flags(facts), address(8000), f'--speculative-config "{setting}"'),
    ]
    return {"vllm.sh": script(f"{facts.name} in {TITLE}, with the draft head next to this folder", *lines)}


def split_problem(facts: LoadFacts) -> str | None:
    """Why a reducer whose share requests may set has no separate encoder: that gets the images alone. None: it may."""
    shares = facts.reducer is not None and facts.reducer.takes_shares
    return "a separate encoder does not get the keep of a request" if shares else None


def split(facts: LoadFacts) -> dict[str, str]:
    """`vllm-split.sh`, which takes the role as its first argument."""
    lines = [_ROLES, *_exports(facts), 'case "$ROLE" in']
    whole = [*flags(facts), "--enable-request-id-headers"]
    # An encoder has no KV cache, nor steps of the language model.
    encoder = flags(facts, ("enable_prefix_caching", "kv_cache_dtype", "attention_backend"))
    encoder += ["--enable-request-id-headers", "--no-enable-prefix-caching", "--mm-encoder-only", "--enforce-eager"]
    encoder += ["--max-num-batched-tokens", "114688"]
    for role, port, arguments, images in (
        ("encode", 8001, encoder, "ec_producer"),
        ("prefill-decode", 8002, whole, "ec_consumer"),
        ("prefill", 8002, [*whole, *_keys("kv_producer")], "ec_consumer"),
        ("decode", 8003, [*whole, *_keys("kv_consumer")], ""),
    ):
        lines.append(f"{role})")
        # Two NIXL servers of one machine must not share a port.
        if channel := {"prefill": 5559, "decode": 6000}.get(role):
            lines.append(f'export VLLM_NIXL_SIDE_CHANNEL_PORT="${{VLLM_NIXL_SIDE_CHANNEL_PORT:-{channel}}}"')
        stored = [_STORED.replace("ROLE", images)] if images else []
        lines += [execute('vllm serve "$MODEL"', arguments, *stored, address(port)), ";;"]
    lines += ['*) echo "no role $ROLE: encode, prefill-decode, prefill or decode" >&2; exit 2 ;;', "esac"]
    return {"vllm-split.sh": script(f"{facts.name} in {TITLE}, encode, prefill and decode apart", *lines)}


def _keys(role: str) -> list[str]:
    return ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": role})]
