"""A recipe: everything that decides what is written, as data.

Values come from four places, and the first that gives one wins: command line, recipe file, target, default. `resolve`
merges them, remembers for each key where it came from (the plan shows it) and checks all of it before any weight is read.
Values are checked strictly, as JSON would be: `"64"` is no number and `1` no truth value.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from vlmcompress.recipe import adapter as adapters
from vlmcompress.recipe import presets, targets
from vlmcompress.recipe.allocation import RULES
from vlmcompress.reduction import choice as reducers
from vlmcompress.reduction.resize import Resize
from vlmcompress.utils import hub, yaml_files
from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.model_folder import is_adapter
from vlmcompress.utils.registry import FORMATS, SCHEMES
from vlmcompress.utils.settings import Layer, find_recipe, merge
from vlmcompress.utils.text import require_size

if TYPE_CHECKING:
    from vlmcompress.numerics import Scheme
    from vlmcompress.quantization.schemes import Quantizer, QuantizerOptions
    from vlmcompress.reduction.choice import ReducerChoice
else:  # pydantic reads annotations when the class is made, and these bring torch along; `resolve` checks the values
    ReducerChoice = QuantizerOptions = Any

DEFAULT = "default"
MOST = 10**9
"""The most samples of a calibration, and the most tokens of a sample."""
WIDTHS, NAMED_WIDTHS = (2, 3, 4, 8), ("fp8", "int8", "bf16")
"""What a group of layers can get where `bits` names nothing: bits of the recipe's scheme; and the other schemes."""

# Dotted keys that are paths -> the kind of repository on the Hub that they may name instead.
_PATHS: dict[str, hub.Kind | None] = {
    **dict.fromkeys(("model", "adapter"), "model"),
    "calibrate.data": "dataset",
    **dict.fromkeys(("out", "calibrate.text", "reduce.scorer", "reduce.thresholds"), None),
}

# Earlier key, dotted -> what to do instead.
RETIRED = {
    "calibrate.stats": "name the samples by --calib",
    "vision_attention": "leave it out",
    "goal": "name the scheme; vlmcompress list targets has those of a machine",
    "options.clip_sweeps": "take gptq-plus, whose error feedback gains more",
    "options.correct": "take gptq-plus",
    "options.behind": "take gptq-plus",
    **dict.fromkeys(("options.duo", "options.block", "options.clip_grid"), "leave it out, its default is used"),
}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Calibrate(_Frozen):
    """The calibration data.

    Attributes:
        data: folder of images, .jsonl, .parquet, data set folder or id on the Hub (see `hub.local`); None: the images
            bundled with a demo model.
        columns: field (`image`, `video`, `question`, `answer`, `messages`, `id` or `family`) -> the column of `data` with it,
            where the names differ.
        skip_bad: how many unusable rows are skipped, each with a note: below 1 a share, else a number.
        text: file of samples without images, of which one is mixed in for each sample of `data`.
        samples: how many samples to take, those of `text` included.
        tokens: how many tokens layers are fitted to, drawn from each sample and modality in proportion; None: 32 for each
            input of the decoder's widest layer and at least 65,536, or all, for mixtures of experts, a `balance`, and schemes
            that read maxima; 0: all.
        max_length: longest sample in tokens; None: the model's context.
        all_experts: feed every expert of a mixture all tokens, not only those routed to it.
    """

    data: str | None = None
    columns: dict[str, str] = {}
    skip_bad: float = Field(default=0, ge=0, le=MOST)
    text: str | None = None
    samples: int = Field(default=128, ge=1, le=MOST)
    tokens: int | None = Field(default=None, ge=0, le=MOST)
    max_length: int | None = Field(default=None, ge=1, le=MOST)
    all_experts: bool = False


class Bits(_Frozen):
    """A budget of bits: either `budget` or `max_size` is given.

    Attributes:
        budget: bits per weight of the decoder's quantized layers, scales and zero points included.
        max_size: bytes of all weights that are written, like 2.4GB.
        among: the widths that a group of layers can get: bits of the recipe's own scheme, `fp8`, `int8` (weights and
            activations) or `bf16` (not quantized); None: those of 2, 3, 4 and 8 bits that the target runs. On a target
            without 8-bit weights with 16-bit activations, 8 bits mean its own 8-bit scheme.
        by: the rule that allocates the budget (`vlmcompress.recipe.allocation`).
    """

    budget: float | None = Field(default=None, gt=0, le=16)
    max_size: str | None = None
    among: tuple[int | str, ...] | None = Field(default=None, min_length=1)
    by: str = "error"

    @field_validator("max_size")
    @classmethod
    def _size(cls, text: str | None) -> str | None:
        return None if text is None else require_size(text)

    @field_validator("among")
    @classmethod
    def _known(cls, among: tuple[int | str, ...] | None) -> tuple[int | str, ...] | None:
        for width in among or ():
            if width not in NAMED_WIDTHS and not (type(width) is int and 2 <= width <= 8):
                hint = did_you_mean(width, NAMED_WIDTHS) if isinstance(width, str) else ""
                raise ValueError(
                    f"should have whole numbers from 2 to 8, {', '.join(NAMED_WIDTHS)}, and has {width!r}{hint}"
                )
        if among and len(set(among)) < len(among):
            raise ValueError("should name each width once")
        return among

    @field_validator("by")
    @classmethod
    def _rule(cls, name: str) -> str:
        if name not in RULES:
            raise ValueError(f"should be one of {', '.join(RULES)}")
        return name

    @model_validator(mode="after")
    def _one(self) -> Any:
        if (self.budget is None) == (self.max_size is None):
            raise ValueError("should have one of budget (bits per weight) and max_size (like 2.4GB)")
        return self


class Recipe(_Frozen):
    """A checked recipe. Make one with `Recipe.of`, or with `resolve`, which also says where each value came from.

    Attributes:
        model: folder of the source checkpoint.
        out: folder to write; None only for plans and checks.
        target: machine to serve on; None: do not check.
        scheme: name of a module in `vlmcompress.quantization.schemes`.
        options: the scheme's `Options`.
        vision: scheme of the vision tower's linear layers; `bf16` leaves them in 16 bits.
        head: format of the output head's weights: `fp8` and `int8` with 8-bit activations, `w8a16` with a scale per row,
            `w4a16` in groups; one that shares the embedding's weights becomes a matrix of its own. `bf16` leaves it in 16 bits.
        embeddings: format of the token embedding's weights: `w8a16` with a scale per row, `w4a16` in groups, rounded to
            nearest; `bf16` leaves them in 16 bits.
        kv_cache: `fp8` stores scales for an FP8 KV cache.
        rotate: kind of orthogonal matrix (`vlmcompress.numerics.rotation`) that rotates the decoder's hidden states before
            quantization, which makes weights easier to round and keeps the answers. It is drawn with `seed`; null: none.
        skip: regular expressions (`re.search`) of linear layers, by memory name, that stay in 16 bits.
        calibrate: the calibration data, or statistics collected before.
        adapter: folder of a PEFT LoRA adapter, merged into the model first; a MODEL that is an adapter means its base with
            the adapter merged.
        dtype: type of everything that is not quantized, and of scales; `auto` is that of config.json, or else that of most
            weights.
        from_quantized: dequantize an FP8 source to 16 bits and quantize that; false: a quantized source is refused.
        trust_remote_code: run Python code from the model's folder.
        bits: widths that differ between groups of layers, within a budget; None: the scheme's width everywhere.
        resize: smaller images before the encoder, by the processor's settings; None: their size stays.
        reduce: the visual-token reducer (`reduction.choice`) that the checkpoint carries; None: all tokens are kept.
        engine: engine that will run the checkpoint; `vllm` refuses reducers that only transformers can run.
        seed: seed of every random choice.
        shard_size: size of the largest file of weights.
        format: name of a module in `vlmcompress.export.formats`.
        mmproj: with the format `gguf`, type of the matrices of tower and projector; None: `q8_0` if a layer of the decoder is
            quantized, else `f16`; those of a float32 model stay float32.
    """

    model: Path
    out: Path | None = None
    target: str | None = None
    scheme: str
    options: QuantizerOptions = None  # type: ignore[assignment]  # `resolve` sets it
    vision: Literal["bf16", "fp8", "int8", "w8a16"] = "bf16"
    head: Literal["bf16", "fp8", "int8", "w8a16", "w4a16"] = "bf16"
    embeddings: Literal["bf16", "w8a16", "w4a16"] = "bf16"
    kv_cache: Literal["fp8"] | None = None
    rotate: Literal["hadamard", "random"] | None = None
    skip: tuple[str, ...] = ()
    calibrate: Calibrate = Calibrate()
    bits: Bits | None = None
    resize: Resize | None = None
    reduce: ReducerChoice | None = None
    engine: Literal["vllm", "transformers"] = "vllm"
    adapter: Path | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    from_quantized: bool = False
    trust_remote_code: bool = False
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    shard_size: str = "5GB"
    format: str = "compressed-tensors"
    mmproj: Literal["q8_0", "f16"] | None = None

    @field_validator("skip")
    @classmethod
    def _compiles(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"'{pattern}' is not a regular expression ({error})") from error
        return patterns

    @field_validator("shard_size")
    @classmethod
    def _size(cls, text: str) -> str:
        return require_size(text)

    @staticmethod
    def of(model: str | Path, out: str | Path | None = None, *, file: str | Path | None = None, **keys: Any) -> Recipe:
        """Make a checked recipe from Python values.

        Args:
            model: the source checkpoint.
            out: folder to write.
            file: a recipe file, or the name of a bundled one, for keys that are not set here.
            keys: any keys of a recipe, nested as in a file: `scheme="awq"`, `calibrate={"data": "images", "samples": 64}`.

        Raises:
            UserError: an unknown key or an invalid value.
        """
        settings = {"model": str(model), **({"out": str(out)} if out is not None else {}), **keys}
        return resolve(settings, file, caller="Recipe.of").recipe

    @property
    def output(self) -> Path:
        """`out`. Raises `UserError` where it is None, which only a recipe for a plan or check may have."""
        if self.out is None:
            raise UserError("no output folder given; add -o OUT, or `out` to the recipe")
        return self.out

    @property
    def quantizer(self) -> Quantizer[Any]:
        """The scheme's algorithm, an entry of `vlmcompress.quantization.schemes`."""
        return SCHEMES.get(self.scheme)

    @property
    def number_formats(self) -> Scheme | None:
        """The number formats of the decoder; None when nothing is quantized."""
        return self.quantizer.scheme(self.options)

    @property
    def parts(self) -> dict[str, Scheme]:
        """Part (`vision tower`, `output head`, ...) -> its number formats, of what is quantized besides the decoder."""
        names = {"vision tower": self.vision, "output head": self.head}
        chosen = {part: presets.resolve_scheme(name) for part, name in names.items() if name != "bf16"}
        entries = {part: (SCHEMES.get(scheme), options) for part, (scheme, options) in chosen.items()}
        return {part: entry.scheme(entry.OPTIONS(**options)) for part, (entry, options) in entries.items()}

    @property
    def rotation(self) -> dict[str, Any] | None:
        """Kind and seed of the rotation, as statistics record them; None without one."""
        return {"kind": self.rotate, "seed": self.seed} if self.rotate else None

    @property
    def inputs_folder(self) -> Path:
        """The folder of the written checkpoint's tokenizer, processor and chat template: the model's, unless the
        adapter has its own."""
        return adapters.inputs_folder(self.model, self.adapter)

    @property
    def exporter(self) -> Any:
        """The format that is written, an `ExportFormat` of `vlmcompress.export.formats`."""
        return FORMATS.get(self.format)

    @property
    def group_size(self) -> int:
        """Columns that share a scale of 8-bit integers outside the decoder blocks; -1: a row, where the format has such."""
        return self.exporter.GROUP_SIZE or -1

    def plain(self) -> dict[str, Any]:
        """The recipe as JSON data, as the manifest keeps it."""
        data = self.model_dump(mode="json", exclude={"options", "reduce"}) | {"model": hub.display_path(self.model)}
        reduce = self.reduce.plain() if self.reduce else None
        return data | {"options": dataclasses.asdict(self.options), "reduce": reduce}


@dataclass(frozen=True)
class Resolved:
    """A recipe and, for each dotted key that was set, where its value came from."""

    recipe: Recipe
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        """Where the value of a key came from; `default` for a key that was not set."""
        return self.origins.get(key, DEFAULT)


def resolve(
    settings: Mapping[str, Any],
    file: str | Path | None = None,
    *,
    strict: bool = True,
    weights: Literal["values", "headers"] = "values",
    caller: str = "command line",
) -> Resolved:
    """Merge the settings of the command line (or a caller), a recipe file and the target into a checked recipe.

    Args:
        settings: nested values of the command line or caller; absent keys are not set, falsy values are.
        file: a recipe file, or the name of a bundled one.
        strict: raise `UserError` for what the target cannot run.
        weights: which part of a Hub model's weight files is fetched; see `hub.local`.
        caller: name of the source of `settings` in messages.
    """
    layers: list[Layer] = [(caller, settings)]
    if file is not None:
        path = find_recipe(file)
        layers.append((f"recipe {path}", yaml_files.read_yaml(path, "recipe")))
    for origin, layer in layers:
        _require_known_keys(layer, Recipe.model_fields, "", origin)
        for key, part in (("calibrate", Calibrate), ("bits", Bits), ("resize", Resize)):
            if isinstance(layer.get(key), Mapping):
                _require_known_keys(layer[key], part.model_fields, f"{key}.", origin)
    if any("reduce" in layer for _, layer in layers):
        layers = reducers.layered(layers)
    layers[1:] = [(origin, _anchored(layer, path.parent)) for origin, layer in layers[1:]]
    # A target's default scheme applies where command line and file set none, and the format's group size where none is set.
    layers = [presets.expanded(layer) for layer in layers]
    values, origins = merge(layers)
    if isinstance(target := values.get("target"), str):
        scheme = targets.get_target(target).schemes[None]
        layers.append((f"target {targets.REGISTRY.name(target)}", {"scheme": scheme}))
        values, origins = merge(layers)
    layers.append(_format_layer(values))
    values, origins = merge(layers)
    for key, registry in (("scheme", SCHEMES), ("target", targets.REGISTRY), ("format", FORMATS)):
        if isinstance(values.get(key), str):
            values[key] = registry.name(values[key])
            registry.require(values[key])
    if "scheme" not in values:
        fewer = values.get("reduce") or values.get("resize")
        alone = " (none leaves the weights as they are)" if fewer else ""
        raise UserError(f"no scheme given; add --scheme ({', '.join(SCHEMES.names())}), --recipe or --target{alone}")
    if "model" not in values:
        raise UserError("no model given; name the folder of the checkpoint")
    options, reduce = values.pop("options", {}), values.pop("reduce", None)
    try:
        recipe = Recipe.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if isinstance(part, str))
        raise UserError(_wrong(key, first["input"], _first_problem(error), origins)) from error
    fields = {"reduce": reducers.merged_reducer(reduce, origins), "options": _options(recipe.scheme, options, origins)}
    recipe = recipe.model_copy(update=fields)
    if recipe.target and strict:
        for problem in targets.target_problems(recipe.target, recipe.number_formats, recipe.kv_cache, recipe.parts):
            raise UserError(problem)
    model = hub.local(recipe.model, weights=weights, code=recipe.trust_remote_code)
    adapter = hub.local(recipe.adapter) if recipe.adapter else None
    if is_adapter(model) and adapter is None:
        adapter = model
        model = hub.local(adapters.base_of(adapter), weights=weights, code=recipe.trust_remote_code)
    return Resolved(recipe.model_copy(update={"model": model, "adapter": adapter}), origins)


def _anchored(settings: Mapping[str, Any], folder: Path, prefix: str = "") -> dict[str, Any]:
    """The settings of a recipe file in a folder, to which relative paths become relative; ids of the Hub stay."""
    anchored: dict[str, Any] = {}
    for key, value in settings.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping):
            value = _anchored(value, folder, f"{dotted}.")
        elif dotted in _PATHS and isinstance(value, str) and value:
            kind = _PATHS[dotted]
            hosted = kind and not os.path.lexists(folder / value) and hub.parse_repository(value, kind)
            value = value if hosted else str(folder / value)
        anchored[key] = value
    return anchored


def _format_layer(values: Mapping[str, Any]) -> Layer:
    """The settings that a format gives: its group size (`GROUP_SIZE`), for schemes that have one."""
    name = FORMATS.name(values["format"]) if isinstance(values.get("format"), str) else ""
    scheme = SCHEMES.name(values["scheme"]) if isinstance(values.get("scheme"), str) else ""
    size = FORMATS.constant(name, "GROUP_SIZE") if name in FORMATS else None
    if size is None or scheme not in SCHEMES:
        return "format", {}
    has_groups = any(field.name == "group_size" for field in dataclasses.fields(SCHEMES.get(scheme).OPTIONS))
    return f"format {name}", {"options": {"group_size": size}} if has_groups else {}


def _require_known_keys(settings: Mapping[str, Any], allowed: Iterable[str], prefix: str, origin: str) -> None:
    for key in settings:
        if key not in allowed:
            if instead := RETIRED.get(f"{prefix}{key}"):
                raise UserError(f"{origin}: there is no key '{prefix}{key}' any more; {instead}")
            raise UserError(f"{origin}: unknown key '{prefix}{key}'{did_you_mean(str(key), allowed)}")


def _wrong(key: str, value: Any, expected: str, origins: Mapping[str, str]) -> str:
    text = json.dumps(value, default=str)
    return f"{origins.get(key, DEFAULT)}: {key} is {text}, it {expected}"


def _first_problem(error: ValidationError) -> str:
    text = error.errors()[0]["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return text if text.startswith(("should", "must")) else f"is wrong: {text}"


def _options(scheme: str, settings: Any, origins: Mapping[str, str]) -> QuantizerOptions:
    """The scheme's `Options` with these values, each checked against the type of its field."""
    cls = SCHEMES.get(scheme).OPTIONS
    if not isinstance(settings, Mapping):
        raise UserError(_wrong("options", settings, "should be a mapping", origins))
    fields = [field.name for field in dataclasses.fields(cls)]
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in settings.items():
        dotted = f"options.{key}"
        origin = origins.get(dotted, DEFAULT)
        if not fields and dotted not in RETIRED:
            raise UserError(f"{origin}: scheme '{scheme}' has no options, got '{dotted}'; remove it")
        if key not in fields and dotted in RETIRED:
            raise UserError(f"{origin}: there is no option '{dotted}' any more; {RETIRED[dotted]}")
        if key not in fields:
            raise UserError(f"{origin}: scheme '{scheme}' has no option '{dotted}'{did_you_mean(str(key), fields)}")
        try:
            values[key] = TypeAdapter(hints[key]).validate_json(json.dumps(value, default=str), strict=True)
        except ValidationError as error:
            raise UserError(_wrong(dotted, value, _first_problem(error), origins)) from error
    try:
        return cls(**values)
    except ValueError as error:
        named = next((key for key in values if re.search(rf"\b{key}\b", str(error))), None)
        keys = (key for key in origins if f"{key}.".startswith(f"options.{named}."))  # itself, or one below it
        origin = origins.get(next(keys, ""), "options")
        raise UserError(f"{origin}: scheme '{scheme}': {error}") from error
