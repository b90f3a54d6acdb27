"""Results of an evaluation or a benchmark as typed, versioned data: the content of `results.json`.

They are the only input of gates and reports. Scores are in 0 to 1, differences are candidate minus
baseline, times are seconds unless a name ends in `_ms`, sizes are bytes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError

SCHEMA = 2
FILE = "results.json"
Verdict = Literal["pass", "fail", "inconclusive"]
State = Literal["cold", "warm"]  # caches off or on; `bench` measures cold alone since November 2026
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Counts = tuple[Count, Count]
Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")


class Calibration(_Record):
    """The samples that a checkpoint was calibrated on. `prefix`: blocks were observed after "float" or "quantized" ones.

    `images`: different images; `tokens`: numbers by modality; `text`: samples of text alone, from `text_source`.
    """

    source: str
    samples: int
    images: int | None = None
    tokens: dict[str, int] = {}
    text: int = 0
    text_source: str = ""
    seed: int | None = None
    prefix: str | None = None


class Provenance(_Record):
    """How a checkpoint was made, from its manifest.

    Attributes:
        source, family: name of the original's folder, family of its architecture.
        scheme, options: how the decoder was quantized.
        formats: number formats of weights and activations that are stored, a line each.
        bits: bits per weight of the decoder's quantized layers, if widths differ between groups of layers.
        vision, kv_cache: formats of the vision tower and the KV cache; "" if not in the manifest.
        skip: regular expressions of layers that stayed in 16 bits.
        resize: how the processor's settings make images smaller; "" if they do not.
        reducer: the checkpoint's visual-token reducer; "" for none.
        calibration: the calibration samples; None if no data were needed.
        warnings: deviations from the recipe, one line each.
        versions: package -> version with which the checkpoint was written.
    """

    source: str = ""
    family: str = ""
    scheme: str = ""
    options: dict[str, Any] = {}
    formats: list[str] = []
    bits: float | None = None
    vision: str = ""
    kv_cache: str = ""
    skip: list[str] = []
    resize: str = ""
    reducer: str = ""
    calibration: Calibration | None = None
    seed: int | None = None
    warnings: list[str] = []
    versions: dict[str, str] = {}


class Side(_Record):
    """A checkpoint that was measured.

    Attributes:
        name: short display name; `path`: folder or served model name.
        weight_bytes: bytes of its tensors, without file headers; 0 if they are not accessible (a server).
        scheme: the scheme in its vlmcompress manifest; "" for an original.
        reducer: its visual-token reducer, carried or attached; "" for none.
        made: its provenance; None without a manifest.
        layer_errors: linear layer -> modality -> relative output error, from the manifest.
        engine: the engine's description of itself.
    """

    name: str
    path: str
    weight_bytes: Count = 0
    scheme: str = ""
    reducer: str = ""
    made: Provenance | None = None
    layer_errors: dict[str, dict[str, float]] = {}
    engine: dict[str, Any] = {}

    def identity(self) -> tuple[str, int, str]:
        """A key that is equal for records of the same checkpoint."""
        return self.name, self.weight_bytes, self.scheme + self.reducer


class Scored(_Record):
    """One question and the answers of both sides. Questions with equal `image` are about the same image(s).

    `*_tokens` are those of the language model's prompt, `*_visual` the visual ones among them, if known. `*_parsed` is False if
    the task found no answer in the text. `kl` is the divergence of the first token's distribution. `*_refused` is the reason
    why the model or its engine failed on the question, which then counts as wrong; for both sides if the baseline failed.
    `*_finish`: why the answer ended, as the engine says ("stop", "length", ...); "thinking" if its thoughts do not end.
    """

    id: str
    suite: str
    family: str
    question: str
    expected: str
    baseline: str
    candidate: str
    baseline_score: Share
    candidate_score: Share
    baseline_parsed: bool = True
    candidate_parsed: bool = True
    baseline_tokens: Count = 0
    candidate_tokens: Count = 0
    baseline_visual: Count | None = None
    candidate_visual: Count | None = None
    image: str = ""
    kl: float | None = None
    baseline_refused: str = ""
    candidate_refused: str = ""
    baseline_finish: str = ""
    candidate_finish: str = ""

    @property
    def change(self) -> Literal[0, 1, 2]:
        """0 if the answer got worse, 1 if it got better, 2 if its score is the same."""
        # Scores may be shares (of several references, of edit distance), so a change of any size counts.
        change = self.candidate_score - self.baseline_score
        return 0 if change < 0 else 1 if change > 0 else 2


class Comparison(_Record):
    """Paired scores of n samples in `clusters` images.

    Attributes:
        low, high: limits of the confidence interval of `difference` at `level`.
        method: of the interval: Gaffke's bounds with images as observations.
        p: two-sided p-value of no difference; `adjusted_p`: corrected for the number of families.
        both, baseline_only, candidate_only, neither: counts of right answers if scores are 0 or 1, else None.
        detectable: the smallest true drop that n samples like these would show with 80% power.
        margin, verdict: the allowed drop, and whether the candidate is shown to stay within it.
        sensitive: False if the baseline has too few right answers for a loss of the margin to show, so that nothing can pass.
        needed: number of samples, in images of the same sizes, that would decide an inconclusive verdict if the true
            difference is the observed one.
        largest: number of samples of the image with the most samples.
    """

    n: Count
    clusters: Count
    baseline: float
    candidate: float
    difference: float
    low: float
    high: float
    level: Share
    method: Literal["gaffke"]
    p: Share
    adjusted_p: Share | None = None
    design_effect: float = 1.0
    both: Count | None = None
    baseline_only: Count | None = None
    candidate_only: Count | None = None
    neither: Count | None = None
    detectable: float
    margin: float
    verdict: Verdict
    sensitive: bool = True
    needed: Count | None = None
    largest: Count = 0

    @property
    def unit(self) -> str:
        """The unit of the interval: images, or samples if no two share an image."""
        return "images" if self.clusters < self.n else "samples"

    @property
    def heavy(self) -> bool:
        """Whether one image has enough of the samples to lose the margin by itself."""
        return self.clusters < self.n and self.largest > self.margin * self.n

    @property
    def missing(self) -> int | None:
        """How many more images (or samples, see `unit`) would decide an inconclusive verdict; None if no number would."""
        if self.needed is None:
            return None
        # `needed` counts samples; images of the same sizes have as many samples each as those that were asked.
        return max(math.ceil(self.needed * self.clusters / self.n) - self.clusters, 1)


class Divergence(_Record):
    """Kullback-Leibler divergence (nats) of the first answer token's distribution, candidate from baseline.

    `same_first`: share of samples with the same most likely first token.
    """

    n: Count
    mean: float
    median: float
    p95: float
    same_first: Share


class Suite(_Record):
    """One suite's accuracy. `cut_off`, `empty`, `unparsed`, `refused`, `unfinished` (thoughts that do not end) and `*_tokens`:
    counts (baseline, candidate) of all samples; `empty_finish`: why the empty answers ended -> their number.

    `scoring` defines `metric`; `choice` explains how it was chosen by the baseline's answers, if it was; `derived_ids`: some
    samples had no id in the data and are identified by a hash of their content; `calibrated`: number of samples with an image
    that the candidate was calibrated on, None where that is not known.
    """

    name: str
    metric: str
    source: str
    sha256: str
    samples: Count
    available: Count
    seed: int
    max_tokens: Count
    overall: Comparison
    families: dict[str, Comparison]
    agreement: Share
    divergence: Divergence | None = None
    unparsed: Counts = (0, 0)
    refused: Counts = (0, 0)
    empty: Counts = (0, 0)
    empty_finish: tuple[dict[str, Count], dict[str, Count]] = ({}, {})
    unfinished: Counts = (0, 0)
    cut_off: Counts = (0, 0)
    prompt_tokens: Counts = (0, 0)
    visual_tokens: Counts | None = None
    scoring: str = ""
    choice: str = ""
    derived_ids: bool = False
    calibrated: Count | None = None


class LoadRun(_Record):
    """One measured burst of requests against a server.

    Lists hold one value per request (`itl_ms`: per token). `cached_tokens` and `media_hits`: prompt tokens and images from the
    server's caches. With speculative decoding, `drafts` counts steps with a draft, `drafted` their tokens, `accepted` those in
    answers, `accepted_at` these by position; `decode_seconds`: first to last token by the server's clock, over all requests.
    """

    side: Literal["baseline", "candidate"]
    mode: Literal["serve"] = "serve"
    state: State
    repeat: Count
    duration: Amount
    completed: Count
    failed: Count
    text_tokens: Count
    visual_tokens: Count
    output_tokens: Count
    cached_tokens: Count = 0
    media_hits: Count = 0
    drafts: Count = 0
    drafted: Count = 0
    accepted: Count = 0
    accepted_at: list[Count] = []
    decode_seconds: Amount = 0.0
    goodput: Amount | None = None
    ttft_ms: list[float] = []
    tpot_ms: list[float] = []
    itl_ms: list[float] = []
    e2e_ms: list[float] = []


class Ratio(_Record):
    """A figure of both sides over the repeats: medians, and the median `gain` with its extremes over the paired repeats.

    A gain says how many times as good the candidate is as the baseline, so that more is better for rates and times: candidate /
    baseline if `higher_is_better`, else baseline / candidate. Terminal, `report.md`, report and gates have this direction.
    `unit` is for display. `interval` is the 95% interval of the gain from `speed.measure`; None: there was one repeat.
    """

    baseline: float
    candidate: float
    gain: float
    low: float
    high: float
    higher_is_better: bool
    unit: str
    interval: tuple[Amount, Amount] | None = None

    @model_validator(mode="before")
    @classmethod
    def _turned(cls, values: Any) -> Any:
        """Earlier files have `ratio`, and all of it as candidate / baseline."""
        if not isinstance(values, dict) or "ratio" not in values:
            return values
        ratio, low, high = (values[key] for key in ("ratio", "low", "high"))
        # A time's ratio turns round, and with it the order of its two ends.
        ends = values.get("interval")
        if not values["higher_is_better"]:
            ratio, low, high = (1 / value if value else math.inf for value in (ratio, high, low))
            ends = ends and [1 / end if end else math.inf for end in reversed(ends)]
        rest = {key: value for key, value in values.items() if key != "ratio"}
        return rest | {"gain": ratio, "low": low, "high": high, "interval": ends}


class Memory(_Record):
    """Memory of a side: bytes of weights, tokens that vLLM's KV cache holds, and how many mean requests fit into it at once."""

    weight_bytes: Count
    kv_cache_tokens: Count
    max_concurrency: Amount


class Bench(_Record):
    """A benchmark of speed and memory, summed up in e.g. `summary["serve"]["cold"]["ttft_p50_ms"]` (mode, state, metric).

    Attributes:
        load: `closed:8` (eight clients) or `rate:2.0` (requests per second, Poisson).
        order: sides in the order in which they ran.
        tool: name of the tool that generated the load.
    """

    load: str
    requests: Count
    out_tokens: Count
    source: str
    sizes: list[str]
    slo: dict[str, float] = {}
    repeats: Count
    order: list[str]
    tool: str
    runs: list[LoadRun]
    summary: dict[str, dict[str, dict[str, Ratio]]]
    memory: dict[str, Memory] = {}


class GateRule(_Record):
    """One line of a judged gate: the rule, the measured value, and the verdict.

    A rule on accuracy names its `suite`, its `family` (None: all samples) and the `margin`, so that a table of the suite
    can show this verdict; other rules have none of the three.
    """

    name: str
    verdict: Verdict
    value: str
    limit: str
    reason: str = ""
    suite: str = ""
    family: str | None = None
    margin: float | None = None


class Gate(_Record):
    """A gate's outcome: the worst of its rules (fail, then inconclusive, then pass).

    `file` is the content of the gate's file, with which results that are joined later are judged again.
    """

    name: str
    verdict: Verdict
    rules: list[GateRule]
    file: dict[str, Any] = {}

    @property
    def title(self) -> str:
        """Its name with the word gate, once: `gate strict`, `my-gate`."""
        return self.name if "gate" in self.name.lower() else f"gate {self.name}"


class Results(_Record):
    """One comparison of a candidate with its baseline.

    `pictures` (id -> PNG files of a sample, base64) has some of the samples that were answered differently.
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
        """A key that is equal for results about the same two checkpoints."""
        return [self.baseline.identity(), self.candidate.identity()]

    def to_dict(self, pictures: bool = True) -> dict[str, Any]:
        """The results as JSON data."""
        return self.model_dump(mode="json", by_alias=True, exclude=None if pictures else {"pictures"})


def load_results(path: str | Path) -> Results:
    """Read a `results.json`, or the one in a folder.

    Raises:
        UserError: it is missing, of another version, or invalid.
    """
    path = Path(path)
    file = path / FILE if path.is_dir() else path
    try:
        data = json_files.read(file, finite=True)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; give a folder that vlmcompress eval or bench wrote") from error
    except ValueError as error:
        raise UserError(f"{file} is not readable JSON ({error}); write the report again") from error
    version = data.get("schema") if isinstance(data, dict) else None
    if version != SCHEMA:
        raise UserError(f"{file} has schema {version}, this version reads {SCHEMA}; write the report again")
    try:
        results = Results.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{file}: {where}: {first['msg'].lower()}; write the report again") from error
    return results


def join_results(new: Results, old: Results) -> Results:
    """Add to `new` the accuracy or the speed that only `old` has, and its gate, if both are of the same checkpoints."""
    if new.identity() != old.identity():
        return new
    missing = [name for name in ("suites", "samples", "pictures", "bench", "gate") if not getattr(new, name)]
    return new.model_copy(update={name: getattr(old, name) for name in missing})
