"""Checkpoint formats. One file per format: pure maps from quantized weights to stored tensors and back, and its config block.

A recipe's `format` names the file. A format that is written has what `Writer` lists, one that is read what `Reader` lists; most
have both. Optional:

    problems(layers) -> [str]       reasons why it cannot hold these layers together in one checkpoint
    SCALES                          the dtype of all its scales, for which quantizers then solve; without it that of the weights
    OTHER_NAMES                     other names that its files have for a layer's tensors -> those in `specs`
    VOCABULARY                      True: output head and token embedding may be quantized, too
    GROUP_SIZE                      a literal: the group size of schemes that have one, where the recipe gives none
    ENGINE                          a literal: the engine (`engines.NAMES`) that alone reads its files
    write_files(tree, family, parts, progress) -> bytes      its files, where they are not safetensors under the source's names;
                                    `tree` has the source's other files already, `parts` is a `Parts`
    source_problems(folder, family, config) -> [str]         with it: reasons why it cannot hold a model
    reducer_problem(family, reducer) -> str | None           with it: why its engine lacks a reducer, as in recipes
    token_ids(folder, config, texts) -> [[int]] | None       with it, where its engine has a tokenizer of its own: its tokens of
                                    texts, by what was written into the folder or would be; None: the engine is not there
    TITLE                           with it: a literal, the engine's name for people

A local name has no module path (`weight_packed`, `weight_scale`, ...). Nothing here reads a model or writes a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from vlmcompress.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from vlmcompress.models.layer_names import Layers, Names
    from vlmcompress.numerics import QTensor, Scheme
    from vlmcompress.utils.tensor_files import Entry, Spec


class ExportFormat(Protocol):
    """What every format has.

    Attributes:
        FORMAT: `quant_method` in config.json.
        KV_SCALES: names below an attention module of an FP8 KV cache's scales; None: the format holds none.
    """

    FORMAT: str
    KV_SCALES: tuple[str, str] | None

    def specs(self, scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
        """Local names, types and shapes of the tensors stored for a layer of `rows` outputs and `columns` inputs.

        Args:
            dtype: safetensors' name of the type of scales, where the format leaves a choice.

        Raises:
            ValueError: the scheme cannot have a layer of this shape.
            UserError: the format cannot hold the scheme.
        """
        ...


@runtime_checkable
class Writer(ExportFormat, Protocol):
    """A format that is written."""

    def storage(self, scheme: Scheme) -> str:
        """The format's name for how it stores a scheme. Raises UserError where it cannot."""
        ...

    def tensors(self, qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors stored for one linear layer, as `specs` lists them, with scales in the type that they have in `qt`.

        Args:
            qt: codes [out, in], scales [out, groups] ([out, 1], [1]) and, when asymmetric, zero points [out, groups].
            input_scale: the scale of static activations, one value; of NVFP4 activations their global scale.
        """
        ...

    def configs(self, layers: Layers) -> dict[str, dict]:
        """What JSON files say of the layers, by file name; `config.json`: its `quantization_config` block, if it has any."""
        ...


@runtime_checkable
class Reader(ExportFormat, Protocol):
    """A format that is read."""

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise `UserError` for what a checkpoint's block says that may change what the weights mean and is not read."""
        ...

    def scheme_in(
        self, config: Mapping[str, Any], names: Names, stored: Mapping[str, Spec], shape: tuple[int, int]
    ) -> Scheme | None:
        """The scheme of a linear layer `[out, in]` with these tensors, by the checkpoint's block; None: it is not quantized.

        Args:
            names: the layer's names in memory, on disk and in vLLM.

        Raises:
            UserError: the block is not one that is read.
        """
        ...

    def quantizes(self, config: Mapping[str, Any], name: str) -> bool:
        """Whether an engine reads the linear layer called `name` as quantized, by the checkpoint's block."""
        ...

    def read(
        self, stored: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]
    ) -> tuple[QTensor, Tensor | None]:
        """A layer's codes, scales and zero points, and the scale of its inputs where that is fixed: the inverse of `tensors`.

        Raises:
            UserError: the tensors hold what their scheme excludes.
        """
        ...


@dataclass(frozen=True)
class Parts:
    """A checkpoint's tensors and settings, for a format with files of its own.

    Attributes:
        specs: parameter (memory name) that is not quantized -> type and shape; `read` reads it.
        entries: those of them whose bytes are in a file -> where.
        layers: linear layer (memory name) that is quantized -> scheme and shape `[out, in]`.
        quantized: linear layer (memory name) -> weight, scheme, scale of static activations; read at each look.
        config: transformers' configuration with all defaults; `image`: the settings of its image processor.
        title: the model's name for people.
    """

    specs: Mapping[str, Spec]
    read: Callable[[str], Tensor]
    entries: Mapping[str, Entry]
    layers: Mapping[str, tuple[Scheme, tuple[int, ...]]]
    quantized: Mapping[str, tuple[QTensor, Scheme, Tensor | None]]
    config: Mapping[str, Any]
    image: Mapping[str, Any]
    title: str

    @property
    def names(self) -> list[str]:
        """The memory names of all parameters."""
        return [*self.specs, *(f"{layer}.weight" for layer in self.quantized)]


def files_problems(
    exporter: Any, folder: Path, family: str, config: Mapping[str, Any], reducer: Mapping | None
) -> list[str]:
    """Reasons why a format with files of its own cannot hold a model; none for other formats.

    Args:
        folder: the source's.
        config: transformers' configuration with all defaults.
        reducer: the reducer that the checkpoint is to carry, as recipes have it; None: none.
    """
    if not hasattr(exporter, "write_files"):
        return []
    reasons = list(exporter.source_problems(folder, family, config))
    if reducer and not reasons and (reason := exporter.reducer_problem(family, reducer)):
        reasons.append(reason)
    return reasons


def format_problems(exporter: Any, layers: Layers) -> list[str]:
    """Reasons why a format cannot hold these layers: it is not written, lacks a scheme, or cannot hold them together."""
    if not isinstance(exporter, Writer):
        return [f"files of quant_method {exporter.FORMAT} are read, not written; write compressed-tensors or modelopt"]
    reasons = []
    for scheme in layers.schemes:
        try:
            exporter.storage(scheme)
        except UserError as error:
            reasons.append(str(error))
    if layers.vocabulary and not getattr(exporter, "VOCABULARY", False):
        reasons.append(
            f"{exporter.FORMAT} files have no place for {' and '.join(layers.vocabulary)} quantized; leave head and "
            "embeddings in bf16, or write compressed-tensors"
        )
    return reasons + (exporter.problems(layers) if hasattr(exporter, "problems") else [])
