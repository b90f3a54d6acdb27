"""Trace transformers' modules to OpenVINO's graphs, without float matrices in memory.

The model is built without weights. Linear layers and embedding tables are not traced: each is one operation, which becomes a
constant in its stored type (`constant`). Other parameters are small. Only one graph at a time is in
memory. `openvino.convert_model` would do the same, but sends usage statistics, so its frontend is called directly.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch
from accelerate import init_empty_weights
from openvino import opset13 as ops
from openvino._offline_transformations import apply_make_stateful_transformation
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch import ConversionExtension, ModuleExtension
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from vlmcompress.export.openvino.spec import BATCH, NEW, Decoder, Graph, OpenvinoFamily, Packed, ParameterSource, Port
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import error_text

LEAVES = (nn.Linear, nn.Embedding)
_COUNTED = re.compile(r"[A-Z]\w*_\d+(\.\d+)?")  # OpenVINO's names of unnamed nodes and tensors


def write_graphs(tree: Path, family: OpenvinoFamily, source: ParameterSource) -> None:
    """Write the graphs and the tokenizer of a checkpoint into its folder `tree`, which has its config and tokenizer."""
    config = AutoConfig.from_pretrained(tree, local_files_only=True, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    names = {module: name for name, module in model.named_modules()}
    decoder = family.decoder(model, family.axes)
    for name, graph in family.graphs(model).items():
        _save(_trace(graph, names, source), tree / f"openvino_{name}.xml")
    words = Graph(model.get_input_embeddings(), (Port("input", (BATCH, NEW), (0, 1), torch.int64),), ("inputs_embeds",))
    _save(_trace(words, names, source), tree / "openvino_text_embeddings_model.xml")
    states = [f"present.{name}" for name in decoder.states]
    language = _trace(Graph(decoder, decoder.ports, ("logits", *states)), names, source)
    _make_stateful(language, decoder)
    _save(language, tree / "openvino_language_model.xml")
    for name, words_graph in zip(("tokenizer", "detokenizer"), _tokenizers(tree), strict=True):
        _save(words_graph, tree / f"openvino_{name}.xml")


def _trace(graph: Graph, names: Mapping[nn.Module, str], source: ParameterSource) -> openvino.Model:
    """The OpenVINO model of a graph, with named inputs and outputs. `names`: memory name of each of the model's modules."""
    leaves = {part: f"vlmcompress::{names[part]}" for part in graph.module.modules() if isinstance(part, LEAVES)}
    for part in graph.module.modules():
        if part in leaves:
            continue
        # Norms and similar in float32, and stored buffers; other buffers were created with the module.
        prefix = names.get(part, "")
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(part, name, nn.Parameter(source.read(f"{prefix}.{name}").float(), requires_grad=False))
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                buffer.copy_(source.read(f"{prefix}.{name}"))
    frontend, refused = FrontEndManager().load_by_framework("pytorch"), list[UserError]()
    for part, operation in leaves.items():
        frontend.add_extension(ConversionExtension(operation, _leaf(names[part], part, source, refused)))

    def alone(_part: nn.Module, operation: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """A leaf as one operation of the trace, which a `ConversionExtension` of that name converts to nodes."""
        return operation(inputs)

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        decoder = TorchScriptPythonDecoder(
            graph.module,
            example_input=tuple(torch.zeros(port.shape, dtype=port.dtype) for port in graph.inputs),
            module_extensions={part: ModuleExtension(part, name, _zeros, alone) for part, name in leaves.items()},
            trace_kwargs={"check_trace": False},
        )
        try:
            model = frontend.convert(frontend.load(decoder))
        except Exception:  # OpenVINO's exception hides the one of its callback
            if refused:
                raise refused[0] from None
            raise
    for port, traced in zip(graph.inputs, model.inputs, strict=True):
        traced.get_node().set_partial_shape(openvino.PartialShape(port.dims))
        _name(traced, port.name)
    for name, traced in zip(graph.outputs, model.outputs, strict=True):
        traced.get_tensor().set_names({name})
    model.validate_nodes_and_infer_types()
    return model


def _zeros(part: Any, inputs: Tensor) -> Tensor:
    """Zeros in the shape of a leaf's output, for tracing."""
    if isinstance(part, nn.Embedding):
        return torch.zeros(*inputs.shape, part.embedding_dim)
    return torch.zeros(*inputs.shape[:-1], part.out_features)


def _leaf(name: str, part: nn.Module, source: ParameterSource, refused: list[UserError]) -> Callable[[Any], list]:
    """A function that creates OpenVINO's nodes of a linear layer, or of an embedding table with its factor, if any.

    The reason why a weight cannot be written is appended to `refused`.
    """

    def make(node: Any) -> list:
        try:
            inputs, weight = node.get_input(0), constant(f"{name}.weight", source)
        except UserError as error:
            refused.append(error)
            raise
        if isinstance(part, nn.Embedding):
            rows = ops.gather(weight, inputs, np.int64(0))
            factor = getattr(part, "embed_scale", None)
            return (rows if factor is None else ops.multiply(rows, np.float32(float(factor)))).outputs()
        product = ops.matmul(inputs, weight, False, True)
        return (product if part.bias is None else ops.add(product, constant(f"{name}.bias", source))).outputs()

    return make


def _make_stateful(model: openvino.Model, decoder: Decoder) -> None:
    """Make keys and values states of the model, reordered by its new input `beam_idx`."""
    beams = ops.parameter([-1], np.int32)
    _name(beams.output(0), "beam_idx")
    model.add_parameters([beams])
    pairs = {f"past_key_values.{name}": f"present.{name}" for name in decoder.states}
    for name in pairs:
        past = model.input(name)
        users = past.get_target_inputs()
        reordered = ops.gather(past, beams, np.int64(0))
        for user in users:
            user.replace_source_output(reordered.output(0))
    model.validate_nodes_and_infer_types()
    # Pairs of an input and an output become a variable that the model keeps: a `ReadValue` and an `Assign`.
    apply_make_stateful_transformation(model, pairs)
    embeds = ops.shape_of(model.input("inputs_embeds"), output_type="i64")
    batch = ops.gather(embeds, np.array([0]), np.int64(0))
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":  # an empty state for the batch's sequences
            _, heads, _, size = node.get_output_partial_shape(0)
            shape = ops.concat([batch, np.array([heads.get_length(), 0, size.get_length()])], 0)
            node.set_arguments([ops.broadcast(np.float32(0), shape)])
    model.validate_nodes_and_infer_types()


def _name(port: Any, name: str) -> None:
    port.get_tensor().set_names({name})
    port.get_node().set_friendly_name(name)


def _save(model: openvino.Model, path: Path) -> None:
    """Write a model with names that have no process-wide counters, so that equal models give equal files."""
    model.set_friendly_name(path.stem)
    for number, node in enumerate(model.get_ordered_ops()):
        if _COUNTED.fullmatch(node.get_friendly_name()):
            node.set_friendly_name(f"{node.get_type_name()}.{number}")
        for port in node.outputs():
            names = {name for name in port.get_names() if not _COUNTED.fullmatch(name)}
            if names != port.get_names():
                port.get_tensor().set_names(names)
    openvino.save_model(model, path, compress_to_fp16=False)


def _tokenizers(folder: Path) -> tuple[openvino.Model, openvino.Model]:
    """The graphs of a folder's tokenizer, to tokens and back."""
    from openvino_tokenizers import convert_tokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    try:
        return convert_tokenizer(tokenizer, with_detokenizer=True)
    except Exception as error:  # many kinds, for unsupported tokenizers
        raise UserError(f"OpenVINO has no such tokenizer ({error_text(error)}); write another format") from error


def graph_token_ids(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """OpenVINO's tokens of each text, by the graph in a folder or by one converted from its tokenizer."""
    import openvino_tokenizers  # noqa: F401  # makes OpenVINO know its operations

    path = folder / "openvino_tokenizer.xml"
    graph = openvino.Core().read_model(path) if path.is_file() else _tokenizers(folder)[0]
    compiled = openvino.Core().compile_model(graph, "CPU")
    return [compiled([text])["input_ids"][0].tolist() for text in texts]


_TYPES = {torch.bfloat16: openvino.Type.bf16, torch.float16: openvino.Type.f16, torch.float32: openvino.Type.f32}


# A layer of 4 or 8 bits has the form that NNCF writes (`nncf/quantization/algorithms/weight_compression`), which OpenVINO's
# plugins compute with directly:
#
#     codes i4 | u4 | i8 | u8 [out, groups, size] -> f16 -> minus zero points -> times scales f16 -> [out, in] -> f32


def constant(name: str, source: ParameterSource) -> Any:
    """The node of a parameter as float32; its constant is named by the memory name."""
    if layer := source.packed(name):
        return _quantized(layer, name)
    value = source.read(name)
    raw = value.contiguous().view(torch.uint8)
    return ops.convert(_constant(raw, value.shape, _TYPES[value.dtype], name), openvino.Type.f32)


def _quantized(layer: Packed, name: str) -> Any:
    """The node of a matrix of integers. Names of scales and zero points end in `_scale` and `_zero_point`."""
    fmt, (rows, columns) = layer.format, layer.shape
    groups = fmt.n_groups(columns)
    kind = getattr(openvino.Type, f"{'i' if fmt.symmetric else 'u'}{fmt.bits}")
    half, each = openvino.Type.f16, (1, 1, 1) if fmt.group == 0 else (rows, groups, 1)
    # Convert, subtract, multiply, reshape, in float16 and in this order: what NNCF writes, and plugins fold into their kernels.
    node = ops.convert(_constant(layer.tensors["weight"], (rows, groups, columns // groups), kind, name), half)
    if not fmt.symmetric:
        zero = _constant(layer.tensors["weight_zero_point"], each, kind, f"{name}_zero_point")
        node = ops.subtract(node, ops.convert(zero, half))
    scale = layer.tensors["weight_scale"].contiguous().view(torch.uint8)
    node = ops.multiply(node, _constant(scale, each, half, f"{name}_scale"))
    return ops.convert(ops.reshape(node, np.array(layer.shape), False), openvino.Type.f32)


def _constant(raw: Tensor, shape: Any, kind: openvino.Type, name: str) -> Any:
    """A constant of the bytes `raw`, which are copied."""
    data = raw.flatten().numpy()  # the constant does not keep it alive
    node = ops.constant(openvino.Tensor(data, openvino.Shape(list(shape)), kind), shared_memory=False)
    node.set_friendly_name(name)
    return node
