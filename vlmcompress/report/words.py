"""Numbers, names and ratios in plain English, as text without markup; `typeset` gives it true minus signs for a page."""

from __future__ import annotations

import math
import re

from vlmcompress.common.text import points, times
from vlmcompress.results import Bench, Comparison, Ratio, Verdict

VERDICTS: dict[Verdict, str] = {"pass": "pass", "fail": "fail", "inconclusive": "can't tell"}
MODES = {"serve": "served", "offline": "offline"}
TIMES = (
    "TTFT: time to first token. ITL: time between tokens. TPOT: mean time per output token. E2E: time to last token."
)
MEASURE = "squared error of a layer's output relative to the output, over the tokens of a modality"
OF_WEIGHTS = "squared error of a layer's weights relative to the weights"
MODALITIES = (
    "Vision tokens stand for images, text tokens for the words of the prompt, answer tokens for those of the answer that "
    "comes with a calibration sample"
)
_METRICS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "E2E",
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "goodput": "requests/s within the SLO",
}


_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """Remove control characters, which a model may answer with and neither XML nor HTML can hold."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def typeset(text: str) -> str:
    """Put true minus and multiplication signs into a text, for a page."""
    return re.sub(r"(?<=\d)x\b", "\N{MULTIPLICATION SIGN}", re.sub(r"(?<!\w)-(?=\d)", "\N{MINUS SIGN}", text))


def percent(share: float) -> str:
    """Write a share as a percentage: `0.9633` as `96.3%`."""
    return f"{100 * share:.1f}%"


def margin(share: float) -> str:
    """Write an allowed loss: `1 point`, `0.5 points`."""
    return "1 point" if (text := f"{100 * share:.4g}") == "1" else f"{text} points"


def brief(value: float) -> str:
    """Write a number with as few figures as it needs: `0.5`, `1e-5`, `1,000`."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}".replace("e-0", "e-")


def interval(c: Comparison) -> str:
    """Write an interval: `95% interval -0.9 to +0.3`."""
    return f"{c.level:.0%} interval {points(c.low)} to {points(c.high)}"


def pace(r: Ratio) -> str:
    """Write a change of speed: `1.40x faster`, `1.25x slower`, or `can't tell (1.10x)` where it may be chance."""
    middle = gain(r, r.ratio)
    if not comparable(r):
        return "not comparable"
    if unclear(r):
        return f"can't tell ({times(middle)})"
    return f"{times(middle)} faster" if middle > 1 else f"{times(1 / middle)} slower"


def spread(r: Ratio) -> str:
    """Write the extremes of the repeats, in the direction that `pace` names: `1.31x to 1.46x`; empty for one repeat."""
    if not comparable(r) or r.low == r.high:
        return ""
    ends = [gain(r, r.low), gain(r, r.high)]
    if gain(r, r.ratio) < 1 and not unclear(r):
        ends = [1 / end for end in ends]
    return f"{times(min(ends))} to {times(max(ends))}"


def comparable(r: Ratio) -> bool:
    """Whether both sides had a good request to compare; a side without one makes the ratio zero or undefined."""
    return all(0 < ratio < math.inf for ratio in (r.low, r.ratio, r.high))


def unclear(r: Ratio) -> bool:
    """Whether a change may be chance: its 95% interval reaches 1, or there is none; or it is less than can be written."""
    if r.interval is None or f"{r.ratio:.2f}" == "1.00":
        return True
    low, high = r.interval
    return not (low > 1 and r.ratio > 1 or high < 1 and r.ratio < 1)


def gain(r: Ratio, ratio: float) -> float:
    """Turn a ratio so that more is better."""
    return ratio if r.higher_is_better else 1 / ratio


def metric(name: str) -> str:
    """Name a metric: `ttft_p50_ms` as `TTFT median, ms`; `TIMES` explains the capitals."""
    first, _, rest = name.removesuffix("_ms").partition("_")
    if name in _METRICS or first not in _METRICS:
        return _METRICS.get(name) or name.replace("_", " ")
    return f"{_METRICS[first]} {'median' if rest == 'p50' else rest}, ms"


def error_kind(name: str) -> str:
    """Name a kind of layer error: a modality, or `weight`, the only kind of a scheme without calibration data."""
    return "weights" if name == "weight" else name


def load(bench: Bench) -> str:
    """Name a benchmark's load: `closed:8` as `8 clients at once`."""
    kind, _, number = bench.load.partition(":")
    clients = "one client" if number == "1" else f"{number} clients at once"
    return {"closed": clients, "rate": f"{number} requests per second, arriving at random"}.get(kind, bench.load)
