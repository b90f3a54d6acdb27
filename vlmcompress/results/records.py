"""`results.json`: what an evaluation or a benchmark found, as typed, versioned data.

Everything that measures returns these models and everything that judges or draws reads them; nothing else passes between
the two. Scores are in 0 to 1, differences are candidate minus baseline, times are seconds unless a name ends in `_ms`,
sizes are bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vlmcompress.errors import UserError

SCHEMA = 2
FILE = "results.json"
Verdict = Literal["pass", "fail", "inconclusive"]
State = Literal["cold", "warm"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")


class Side(_Record):
    """A checkpoint that was measured.

    Attributes:
        name: short name for people; `path`: folder or served model name.
        weight_bytes: size of its safetensors files; 0 if the files are out of reach (a server).
        scheme: from its vlmcompress manifest; "" for an original.
        reducer: of visual tokens, that it carries or that was attached; "" for none.
        layer_errors: linear layer -> modality -> relative output error, from the manifest.
        engine: what the engine says about itself.
    """

    name: str
    path: str
    weight_bytes: int = 0
    scheme: str = ""
    reducer: str = ""
    layer_errors: dict[str, dict[str, float]] = {}
    engine: dict[str, Any] = {}


class Scored(_Record):
    """One question and what both sides answered. Equal `image` means: about the same image(s).

    `*_tokens` are those of the prompt that the language model got, `*_visual` those of images among them, where known.
    `*_parsed` is False where the task found no answer in the text. `kl` is the divergence of the first token's distribution.
    """

    id: str
    suite: str
    family: str
    question: str
    expected: str
    baseline: str
    candidate: str
    baseline_score: float
    candidate_score: float
    baseline_parsed: bool = True
    candidate_parsed: bool = True
    baseline_tokens: int = 0
    candidate_tokens: int = 0
    baseline_visual: int | None = None
    candidate_visual: int | None = None
    image: str = ""
    kl: float | None = None


class Comparison(_Record):
    """Paired scores of n samples in `clusters` images.

    Attributes:
        low, high: limits of the confidence interval of `difference` at `level`: Tango's score interval, or for graded
            scores the empirical-likelihood one.
        p: two-sided p-value of no difference; `adjusted_p`: corrected for the number of families.
        both, baseline_only, candidate_only, neither: counts of right answers where scores are 0 or 1, else None.
        detectable: smallest true drop that n samples like these would show with 80% power.
        margin, verdict: the allowed drop and whether the candidate is shown to stay within it.
        needed: samples that would decide an inconclusive verdict, if the true difference is the one seen.
    """

    n: int
    clusters: int
    baseline: float
    candidate: float
    difference: float
    low: float
    high: float
    level: float
    method: Literal["tango", "likelihood"]
    p: float
    adjusted_p: float | None = None
    design_effect: float = 1.0
    both: int | None = None
    baseline_only: int | None = None
    candidate_only: int | None = None
    neither: int | None = None
    detectable: float
    margin: float
    verdict: Verdict
    needed: int | None = None


class Divergence(_Record):
    """Kullback-Leibler divergence (nats) of the first answer token's distribution, candidate from baseline.

    `same_first`: share of samples with the same most likely first token.
    """

    n: int
    mean: float
    median: float
    p95: float
    same_first: float


class Suite(_Record):
    """One suite's accuracy. `cut_off`, `empty`, `unparsed`, `*_tokens`: counts (baseline, candidate), over all samples.

    `derived_ids`: the data had no ids for some samples, which go by a hash of their content.
    """

    name: str
    metric: str
    source: str
    sha256: str
    samples: int
    available: int
    seed: int
    max_tokens: int
    overall: Comparison
    families: dict[str, Comparison]
    agreement: float
    divergence: Divergence | None = None
    unparsed: tuple[int, int] = (0, 0)
    empty: tuple[int, int] = (0, 0)
    cut_off: tuple[int, int] = (0, 0)
    prompt_tokens: tuple[int, int] = (0, 0)
    visual_tokens: tuple[int, int] | None = None
    scoring: str = ""
    derived_ids: bool = False


class LoadRun(_Record):
    """One measured burst of requests against a server (`mode` "serve") or the engine itself ("offline").

    Lists hold one value a request (`itl_ms`: one a token). `cached_tokens` are prompt tokens that the server took from its
    prefix cache, `media_hits` images it took from its media caches.
    """

    side: Literal["baseline", "candidate"]
    mode: Literal["serve", "offline"]
    state: State
    repeat: int
    duration: float
    completed: int
    failed: int
    text_tokens: int
    visual_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    media_hits: int = 0
    goodput: float | None = None
    ttft_ms: list[float] = []
    tpot_ms: list[float] = []
    itl_ms: list[float] = []
    e2e_ms: list[float] = []


class Ratio(_Record):
    """A figure of both sides over the repeats: medians, the median of the paired ratios candidate / baseline, its extremes.

    `higher_is_better` tells which way is good; `unit` is for people.
    """

    baseline: float
    candidate: float
    ratio: float
    low: float
    high: float
    higher_is_better: bool
    unit: str


class Memory(_Record):
    """`kv_bytes_per_request` is for a mean request of the benchmark; `max_concurrency` of such requests fit at once."""

    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_request: int
    kv_cache_bytes: int
    max_concurrency: float


class Bench(_Record):
    """Speed and memory. `summary[mode][state][metric]`, e.g. `summary["serve"]["cold"]["ttft_p50_ms"]`.

    Attributes:
        load: `closed:8` (eight clients) or `rate:2.0` (requests per second, Poisson).
        order: sides in the order in which they ran.
        tool: what generated the load.
    """

    load: str
    requests: int
    out_tokens: int
    source: str
    sizes: list[str]
    slo: dict[str, float] = {}
    repeats: int
    order: list[str]
    tool: str
    runs: list[LoadRun]
    summary: dict[str, dict[str, dict[str, Ratio]]]
    memory: dict[str, Memory] = {}


class Rule(_Record):
    """One line of a gate: what was asked, what was found, and how that was judged."""

    name: str
    verdict: Verdict
    value: str
    limit: str
    reason: str = ""


class Gate(_Record):
    """A gate's outcome: the worst of its rules (fail, then inconclusive, then pass)."""

    name: str
    verdict: Verdict
    rules: list[Rule]


class Results(_Record):
    """One comparison of a candidate with its baseline.

    `pictures` (id -> PNG files of a sample, base64) is for some samples that were answered differently.
    """

    schema_: int = Field(default=SCHEMA, alias="schema")
    created: str
    version: str
    machine: dict[str, Any] = {}
    baseline: Side
    candidate: Side
    suites: list[Suite] = []
    samples: list[Scored] = []
    bench: Bench | None = None
    gate: Gate | None = None
    pictures: dict[str, list[str]] = {}

    def identity(self) -> list[tuple[str, int, str]]:
        """Equal for results about the same two checkpoints."""
        return [(side.name, side.weight_bytes, side.scheme + side.reducer) for side in (self.baseline, self.candidate)]

    def to_dict(self, pictures: bool = True) -> dict[str, Any]:
        """Plain data for JSON."""
        return self.model_dump(mode="json", by_alias=True, exclude=None if pictures else {"pictures"})


def load(path: str | Path) -> Results:
    """Read a `results.json`, or the one in a folder.

    Raises:
        UserError: it is missing, of another version, or not what this module describes.
    """
    path = Path(path)
    file = path / FILE if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; give a folder that vlmcompress eval or bench wrote") from error
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}); write the report again") from error
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        raise UserError(f"{file} has schema {found}, this version reads {SCHEMA}; write the report again")
    try:
        return Results.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{file}: {where}: {first['msg'].lower()}; write the report again") from error


def joined(new: Results, old: Results) -> Results:
    """`new` with the accuracy or the speed that only `old` has, if both are of the same checkpoints."""
    if new.identity() != old.identity():
        return new
    kept = [name for name in ("suites", "samples", "pictures", "bench") if not getattr(new, name)]
    return new.model_copy(update={name: getattr(old, name) for name in kept})
