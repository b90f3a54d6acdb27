"""A checkpoint as config.json and the headers of its weight files show it: no weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from vlmcompress.common.tensor_files import Entry, Spec
from vlmcompress.models._draft import asked_draft
from vlmcompress.models._load import VLM, skeleton, spec_for
from vlmcompress.models._names import disk_names, tied_names, unfound, written_names
from vlmcompress.models._read import read_config, stored_tensors, tensor_headers
from vlmcompress.models._resolve import decoder_blocks
from vlmcompress.models._spec import Group, ModelSpec


@dataclass(frozen=True)
class Source:
    """A checkpoint before a weight is read. Make one with `Source.of`, once, and hand it on.

    Attributes:
        path: the checkpoint's folder.
        config: the content of config.json.
        spec: the model's family.
        skeleton: the model on the meta device, shapes only.
        stored: tensor name on disk -> type and shape.
        names: memory name of a parameter -> its name on disk.
        headers: whether there are weight files; without, `stored` is what config.json asks for.
    """

    path: Path
    config: dict[str, Any]
    spec: ModelSpec
    skeleton: PreTrainedModel
    stored: dict[str, Spec]
    names: dict[str, str]
    headers: bool = True

    @staticmethod
    def of(path: Path) -> Source:
        """Open the checkpoint in a folder. Raises `UserError` for one that is unusable, damaged or of an unknown family."""
        config = read_config(path)
        spec = spec_for(config)
        model, headers = skeleton(path), tensor_headers(path)
        stored = {name: Spec(header["dtype"], tuple(header["shape"])) for name, header in headers.items()}
        return Source(path, config, spec, model, stored, disk_names(model, headers))

    @staticmethod
    def outline(path: Path) -> Source:
        """A checkpoint of which only config.json is there: every tensor of the model, in the config's type, by memory name."""
        config = read_config(path, weights=False)
        spec = spec_for(config)
        model = skeleton(path, weights=False)
        tied = tied_names(model)
        stored = {name: Spec.of(tensor) for name, tensor in model.state_dict().items() if name not in tied}
        names = {name: name for name in stored}
        return Source(path, config, spec, model, stored | asked_draft(spec, config, model), names, headers=False)

    @cached_property
    def blocks(self) -> list[list[Group]]:
        """The groups of linear layers of each decoder block."""
        return decoder_blocks(self.skeleton, self.spec)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Tensor name on disk -> where its bytes are."""
        return stored_tensors(self.path)

    @cached_property
    def written(self) -> dict[str, str]:
        """Memory name of a parameter -> its name in a checkpoint that is made of this one, where every engine finds it."""
        return written_names(self.names, self.spec)

    @cached_property
    def unfound(self) -> dict[str, str | None]:
        """Tensor on disk whose place vLLM does not find -> the name that it gets, None: it is left out."""
        return unfound(self.names, self.spec, self.stored)

    @property
    def vlm(self) -> VLM:
        """The model as a `VLM` without weights and processor, for code that needs modules and shapes alone."""
        return VLM(self.skeleton, None, self.spec, self.path)

    def shapes(self, group: Group) -> list[tuple[int, int]]:
        """`(out, in)` of each linear layer of a group."""
        weights = [self.skeleton.get_parameter(f"{name}.weight") for name in group.linears]
        return [(weight.shape[0], weight.shape[1]) for weight in weights]

    def weights(self, group: Group) -> list[Spec]:
        """Type and shape on disk of each weight of a group."""
        return [self.stored[self.names[f"{name}.weight"]] for name in group.linears]
