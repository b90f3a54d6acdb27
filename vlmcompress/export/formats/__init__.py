"""Checkpoint formats. One file per format: pure maps from quantized weights to stored tensors and back, and its config block.

A recipe's `format` names the file. A format that can be written implements `Writer`, one that can be read `Reader`; most
implement both. Optional:

    problems(layers) -> [str]       reasons why it cannot hold these layers together in one checkpoint
    SCALES                          the dtype of all its scales, for which quantizers then solve; default: that of the weights
    OTHER_NAMES                     alternative tensor names in its files -> those in `specs`
    renamed(entries, state) -> [Entry]     tensors of a folder that its own tools wrote, with names and layouts of torch's;
                                    `state`: memory name -> parameter
    VOCABULARY                      True: output head and token embedding may be quantized
    GROUP_SIZE                      a literal: default group size of schemes that have one
    ENGINE                          a literal: the only engine (`engines.NAMES`) that reads its files
    model_config(config) -> dict                config.json with the names that its engine reads, from the one with its block
    source_problems(folder, family, config) -> [str]         reasons why it cannot hold a model
    reducer_problem(family, reducer) -> str | None           with it: why its engine does not support a recipe's reducer
    write_files(tree, family, parts, progress) -> bytes      writes files other than safetensors with the source's names;
                                    `tree` already has the source's other files, `parts` is a `Parts`
    token_ids(folder, config, texts) -> [[int]] | None       with it, for engines with their own tokenizer: its tokens of
                                    texts, from the files in the folder or as they would be written; None: not installed
    TITLE                           with it: a literal, the engine's display name

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
    from vlmcompress.utils.tensor_headers import Entry, Spec


class ExportFormat(Protocol):
    """The members of every format.

    Attributes:
        FORMAT: `quant_method` in config.json.
        KV_SCALES: names, below an attention module, of an FP8 KV cache's scales; None: unsupported.
    """

    FORMAT: str
    KV_SCALES: tuple[str, str] | None

    def specs(self, scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
        """Local names, types and shapes of the tensors stored for a layer of `rows` outputs and `columns` inputs.

        Args:
            dtype: safetensors' name of the type of scales, if the format leaves a choice.

        Raises:
            ValueError: the scheme cannot have a layer of this shape.
            UserError: the format cannot hold the scheme.
        """
        ...


@runtime_checkable
class Writer(ExportFormat, Protocol):
    """A format that can be written."""

    def storage(self, scheme: Scheme) -> str:
        """The format's name for its storage of a scheme. Raises `UserError` for an unsupported scheme."""
        ...

    def tensors(self, qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors stored for one linear layer, as in `specs`, with scales in the type of `qt`.

        Args:
            qt: codes [out, in], scales [out, groups] ([out, 1], [1]) and, when asymmetric, zero points [out, groups].
            input_scale: the scale of static activations, one value; for NVFP4 activations their global scale.
        """
        ...

    def configs(self, layers: Layers) -> dict[str, dict]:
        """File name -> its content about the layers; for `config.json` the `quantization_config` block, if any."""
        ...


@runtime_checkable
class Reader(ExportFormat, Protocol):
    """A format that can be read."""

    def require_supported(self, config: Mapping[str, Any]) -> None:
        """Raise `UserError` for unsupported settings in a checkpoint's block that may change the meaning of the weights."""
        ...

    def scheme_in(
        self, config: Mapping[str, Any], names: Names, stored: Mapping[str, Spec], shape: tuple[int, int]
    ) -> Scheme | None:
        """The scheme of a linear layer `[out, in]` with these tensors, from the checkpoint's block; None: not quantized.

        Args:
            names: the layer's names in memory, on disk and in vLLM.

        Raises:
            UserError: the block is invalid or unsupported.
        """
        ...

    def quantizes(self, config: Mapping[str, Any], name: str) -> bool | None:
        """Whether an engine takes the linear layer `name` for quantized, by the block; None: its tensors decide."""
        ...

    def read(
        self, stored: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]
    ) -> tuple[QTensor, Tensor | None]:
        """A layer's codes, scales and zero points, and its static input scale or None: the inverse of `tensors`.

        Raises:
            UserError: the tensors contradict their scheme.
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
        mmproj: GGUF's type of the tower's matrices; None: the format's choice.
    """

    specs: Mapping[str, Spec]
    read: Callable[[str], Tensor]
    entries: Mapping[str, Entry]
    layers: Mapping[str, tuple[Scheme, tuple[int, ...]]]
    quantized: Mapping[str, tuple[QTensor, Scheme, Tensor | None]]
    config: Mapping[str, Any]
    image: Mapping[str, Any]
    title: str
    mmproj: str | None = None

    @property
    def names(self) -> list[str]:
        """The memory names of all parameters."""
        return [*self.specs, *(f"{layer}.weight" for layer in self.quantized)]


def files_problems(
    exporter: Any, folder: Path, family: str, config: Mapping[str, Any], reducer: Mapping | None, mmproj: str | None
) -> list[str]:
    """Reasons why a format of one engine cannot hold a model; for other formats only that of a wrong `mmproj`.

    Args:
        folder: the source's folder.
        config: transformers' configuration with all defaults.
        reducer: the checkpoint's reducer as in recipes, or None; mmproj: the recipe's.
    """
    if mmproj and exporter.FORMAT != "gguf":
        return [f"mmproj is the type of GGUF's tower, and the format is {exporter.FORMAT}; leave it out"]
    if not hasattr(exporter, "source_problems"):
        return []
    reasons = list(exporter.source_problems(folder, family, config))
    if reducer and not reasons and (reason := exporter.reducer_problem(family, reducer)):
        reasons.append(reason)
    return reasons


def format_problems(exporter: Any, layers: Layers) -> list[str]:
    """Reasons why a format cannot hold these layers: it is read-only, lacks a scheme, or cannot combine them."""
    if not isinstance(exporter, Writer):
        return [f"files of quant_method {exporter.FORMAT} can only be read; write compressed-tensors or modelopt"]
    reasons = []
    for scheme in layers.schemes:
        try:
            exporter.storage(scheme)
        except UserError as error:
            reasons.append(str(error))
    if layers.vocabulary and not getattr(exporter, "VOCABULARY", False):
        reasons.append(
            f"{exporter.FORMAT} files cannot hold a quantized {' and '.join(layers.vocabulary)}; leave head and embeddings in "
            "bf16, or write compressed-tensors"
        )
    return reasons + (exporter.problems(layers) if hasattr(exporter, "problems") else [])
