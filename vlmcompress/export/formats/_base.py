"""The contract of checkpoint formats, as classes with default methods, and what a format with files of its own gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from vlmcompress.utils.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vlmcompress.models.layer_names import Layers, Names
    from vlmcompress.numerics import QTensor, Scheme
    from vlmcompress.utils.tensor_headers import Entry, Spec


class ExportFormat(ABC):
    """What a format that is written and one that is read have in common.

    Attributes:
        METHOD: `quant_method` in config.json, a literal.
        ENGINE: the only engine (`engines.NAMES`) that reads its files, a literal; empty: others do too.
        GROUP_SIZE: default group size of schemes that have one, a literal; None: the scheme's.
        SCALES: the dtype of all its scales, for which quantizers then solve; None: that of the weights.
        KV_SCALES: names, below an attention module, of an FP8 KV cache's scales; None: unsupported.
        VOCABULARY: whether output head and token embedding may be quantized.
    """

    METHOD: ClassVar[str]
    ENGINE: ClassVar[str] = ""
    GROUP_SIZE: ClassVar[int | None] = None
    SCALES: ClassVar[torch.dtype | None] = None
    KV_SCALES: ClassVar[tuple[str, str] | None] = None
    VOCABULARY: ClassVar[bool] = False

    @abstractmethod
    def specs(self, scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
        """Local names, types and shapes of the tensors stored for a layer of `rows` outputs and `columns` inputs.

        A local name has no module path (`weight_packed`, `weight_scale`, ...).

        Args:
            dtype: safetensors' name of the type of scales, if the format leaves a choice.

        Raises:
            ValueError: the scheme cannot have a layer of this shape.
            UserError: the format cannot hold the scheme.
        """


class Writer(ExportFormat):
    """A format that can be written."""

    @abstractmethod
    def storage(self, scheme: Scheme) -> str:
        """The format's name for its storage of a scheme. Raises `UserError` for an unsupported scheme."""

    @abstractmethod
    def tensors(self, qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors stored for one linear layer, as in `specs`, with scales in the type of `qt`.

        Args:
            qt: codes [out, in], scales [out, groups] ([out, 1], [1]) and, when asymmetric, zero points [out, groups].
            input_scale: the scale of static activations, one value; for NVFP4 activations their global scale.
        """

    def configs(self, layers: Layers) -> dict[str, dict]:
        """File name -> its content about the layers; for `config.json` the `quantization_config` block, if any."""
        return {}

    def model_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """config.json with the names that its engine reads, from the one with the block."""
        return dict(config)

    def problems(self, layers: Layers) -> list[str]:
        """Reasons why it cannot hold these layers together in one checkpoint."""
        if not layers.kv_cache or self.KV_SCALES is not None:
            return []
        return [
            f"{self.METHOD} files hold no scales of an FP8 KV cache; leave out kv_cache or write compressed-tensors"
        ]

    def source_problems(self, folder: Path, family: str, config: Mapping[str, Any]) -> list[str]:
        """Reasons why it cannot hold a model.

        Args:
            folder: the source's folder.
            config: transformers' configuration with all defaults.
        """
        return []

    def reducer_problem(self, family: str, reducer: Mapping[str, Any]) -> str | None:
        """The reason why its engine does not support a reducer, as in recipes; None: it does."""
        return None


class Reader(ExportFormat):
    """A format that can be read. `OTHER_NAMES`: alternative tensor names in its files -> those in `specs`."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def require_supported(self, config: Mapping[str, Any]) -> None:
        """Raise `UserError` for unsupported settings in a checkpoint's block that may change the meaning of the weights."""

    @abstractmethod
    def scheme_in(
        self, config: Mapping[str, Any], names: Names, stored: Mapping[str, Spec], shape: tuple[int, int]
    ) -> Scheme | None:
        """The scheme of a linear layer `[out, in]` with these tensors, from the checkpoint's block; None: not quantized.

        Args:
            names: the layer's names in memory, on disk and in vLLM, of which other tools' entries may use any.

        Raises:
            UserError: the block is invalid or unsupported, or contradicts the tensors.
        """

    @abstractmethod
    def quantizes(self, config: Mapping[str, Any], name: str) -> bool | None:
        """Whether an engine takes the linear layer `name` for quantized, by the block; None: its tensors decide."""

    @abstractmethod
    def read(
        self, stored: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]
    ) -> tuple[QTensor, Tensor | None]:
        """A layer's codes, scales and zero points, and its static input scale or None: the inverse of `tensors`.

        Raises:
            UserError: the tensors contradict their scheme.
        """

    def renamed(self, entries: Sequence[Entry], state: Mapping[str, Tensor]) -> list[Entry]:
        """Tensors of a folder that the format's own tools wrote, with names and layouts of torch's.

        Args:
            state: memory name -> parameter.
        """
        return list(entries)


class EngineFiles(Writer):
    """A format whose files only its engine reads, other than safetensors with the source's names.

    Attributes:
        TITLE: the engine's display name.
        PACKAGES: what writes the files; `EXTRA`: the extra of vlmcompress that installs them.
        FAMILIES: the families that are written.
        FILES: those that have the weights, as config.json lists them.
    """

    TITLE: ClassVar[str]
    PACKAGES: ClassVar[tuple[str, ...]]
    EXTRA: ClassVar[str]
    FAMILIES: ClassVar[Registry]
    FILES: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def write_files(
        self, tree: Path, family: str, parts: Parts, progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Write the files to the folder `tree`, which has the source's other files; return bytes of weights.

        Args:
            family: name of the model's family, one without `source_problems`.
            progress: called with (bytes written, total bytes).

        Raises:
            UserError: there is no name for a tensor, or a layer cannot be held.
        """

    @abstractmethod
    def token_ids(self, folder: Path, config: Mapping[str, Any], texts: Sequence[str]) -> list[list[int]] | None:
        """The engine's tokens of each text, from the files in the folder or as they would be written; None: not installed.

        Raises:
            UserError: the engine refuses the tokenizer, or it cannot be written.
        """

    @abstractmethod
    def family_problems(self, folder: Path, family: str, config: Mapping[str, Any]) -> list[str]:
        """`source_problems` of a family that is among `FAMILIES`."""

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [package for package in self.PACKAGES if find_spec(package) is None]

    @override
    def source_problems(self, folder: Path, family: str, config: Mapping[str, Any]) -> list[str]:
        if self.missing:
            return [
                f"the package {self.missing[0]} is not installed; pip install '.[{self.EXTRA}]' in the checkout of vlmcompress"
            ]
        if family not in self.FAMILIES:
            names = ", ".join(self.FAMILIES.names())
            return [f"{self.TITLE} does not support the family {family}, only {names}; write another format"]
        return self.family_problems(folder, family, config)

    @override
    def configs(self, layers: Layers) -> dict[str, dict]:
        """The block of config.json, which marks the weights as stored elsewhere and has the number format of most layers."""
        block: dict[str, Any] = {"quant_method": self.METHOD} | ({"files": list(self.FILES)} if self.FILES else {})
        if layers.schemes:
            weights = layers.schemes[0].weights  # the most common one; the files themselves say what each layer has
            block |= {"bits": weights.bits, "group_size": weights.group, "type": self.storage(layers.schemes[0])}
            block["modules_to_not_convert"] = [kept.names[0] for kept in layers.kept]
        return {"config.json": block}


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
