"""Counters of servers: `/metrics` of vLLM and llama.cpp."""

from __future__ import annotations

import dataclasses
import re
import urllib.request
from dataclasses import astuple, dataclass
from itertools import zip_longest

from vlmcompress.engines.local import last_words
from vlmcompress.engines.vllm.serve import Server
from vlmcompress.utils.errors import UserError

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


NAMES = {
    "vllm:prefix_cache_hits": "prefix_hits",
    "llamacpp:prompt_tokens_cached": "prefix_hits",
    "vllm:mm_cache_hits": "media_hits",
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:request_decode_time_seconds_sum": "decode_seconds",
}
BY_PLACE = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class Counters:
    """Counts since the server's start: prompt tokens from the prefix cache, images from the processor's cache; for speculative
    decoding the steps with a draft, drafted tokens, accepted tokens, and accepted tokens by position; the time from first to
    last token in seconds, summed over the requests."""

    prefix_hits: float = 0.0
    media_hits: float = 0.0
    drafts: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    decode_seconds: float = 0.0
    accepted_at: tuple[float, ...] = ()

    def since(self, before: Counters) -> Counters:
        """The counts since an earlier reading."""
        *now, places = astuple(self)
        *then, earlier = astuple(before)
        counts = (after - count for after, count in zip(now, then, strict=True))
        differences = (a - b for a, b in zip_longest(places, earlier, fillvalue=0.0))
        return dataclasses.replace(Counters(*counts), accepted_at=tuple(differences))


def counters(server: Server) -> Counters:
    """The counters, summed over the server's engines."""
    total = dict.fromkeys(NAMES.values(), 0.0)
    places: dict[int, float] = {}
    for name, labels, value in metrics(server):
        if key := NAMES.get(name.removesuffix("_total")):
            total[key] += float(value)
        elif name.removesuffix("_total") == BY_PLACE:
            place = int(labels["position"])
            places[place] = places.get(place, 0.0) + float(value)
    return Counters(**total, accepted_at=tuple(places[place] for place in sorted(places)))


def cache_config(server: Server) -> dict[str, str]:
    """vLLM's cache configuration, as strings: `block_size`, `cache_dtype`, `kv_cache_size_tokens`, ..."""
    configs = [labels for name, labels, _ in metrics(server) if name == "vllm:cache_config_info"]
    if not configs:
        raise UserError(f"{server.url}/metrics has no vllm:cache_config_info; is this vLLM 0.32?")
    return configs[0]


def metrics(server: Server) -> list[tuple[str, dict[str, str], str]]:
    """Read all samples at `/metrics`, in the form of `parse_metrics`."""
    try:
        with _DIRECT.open(f"{server.url}/metrics", timeout=60) as reply:
            return parse_metrics(reply.read().decode())
    except OSError as error:
        raise UserError(f"the server of {server.name} has ended ({error}){last_words(server.log_path)}") from error


def parse_metrics(text: str) -> list[tuple[str, dict[str, str], str]]:
    """Parse Prometheus' text format: name, labels and value of each sample."""
    matches = (_SAMPLE.match(line) for line in text.splitlines())
    return [(match[1], dict(_LABEL.findall(match[2] or "")), match[3]) for match in matches if match]
