"""What is computed piece by piece equals what is computed at once, for sizes around those at which pieces are full.

Pieces are made small where the code reads their size at call time. Elsewhere in `tests/`: what runs samples in batches
(`quantization/calibration/test_block_inputs.py`), divides requests (`engines/test_data_parallel.py`) or images
(`reduction/hooks/test_thresholds.py`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kit.quant_data import inputs, statistics, weight
from vlmcompress.evaluation.accuracy import paired
from vlmcompress.models import Group
from vlmcompress.numerics import NVFP4, Format, _fp4, _rounding, rotation, round_to_nearest
from vlmcompress.numerics.statistics import collect
from vlmcompress.numerics.statistics import inputs as gram_matrices
from vlmcompress.numerics.statistics.collect import Collector
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.numerics.statistics.tokens import Reservoir
from vlmcompress.quantization.calibration.solve import BlockResult, QuantMethod, solve_block
from vlmcompress.quantization.schemes import REGISTRY, _columns, _ranges, awq, gptq, gptq_plus
from vlmcompress.utils import json_files, tensor_files
from vlmcompress.utils.tensor_headers import Spec, read_entries

PIECE, WIDTH = 8, 16
SIZES = (0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 1)
FORMATS = [
    Format("int", 4, 4),
    Format("int", 3, 8, symmetric=False),
    Format("int", 8, -1),
    Format("int", 8, 0),
    Format("float", 8, -1),
    NVFP4,
]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """`row_chunks` makes parts larger for more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def in_pieces(compute: Callable[[], Any], **pieces: tuple[Any, ...]) -> tuple[Any, Any]:
    """What `compute` returns at once and in pieces; `pieces`: name of a constant -> its modules, and its small value there."""
    whole = compute()
    with pytest.MonkeyPatch.context() as patch:
        for name, (*modules, value) in pieces.items():
            for module in modules:
                patch.setattr(module, name, value)
        return whole, compute()


@pytest.mark.parametrize("later", [0, 1, PIECE])
@pytest.mark.parametrize("first", SIZES)
def test_rows_that_are_multiplied_at_once(first, later, generator, monkeypatch):
    """Batches of which a modality fills the waiting rows exactly, or takes no part, leave nothing to wait and lose nothing."""
    monkeypatch.setattr(collect, "ROWS", PIECE)
    collector = Collector(5, ["gram", "absmax", "absmean"])
    text, vision = torch.randn(3, 5, generator=generator), torch.randn(first + later + 1, 5, generator=generator)
    batches = [(text, 1), (vision[:first], 2), (vision[first : first + later], 2), (vision[:0], 3)]
    for x, code in batches:
        collector.add(x, torch.full((len(x),), code))
    stats = collector.finish()
    x = vision[: first + later].double()
    assert stats.count == {"text": 3, "vision": len(x), "answer": 0}
    if len(x):
        torch.testing.assert_close(stats.gram({"vision": 1.0}).double(), x.T @ x, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(stats._absmax["vision"].double(), x.abs().amax(0))
        torch.testing.assert_close(stats._abssum["vision"].double(), x.abs().sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 33])
def test_rows_that_are_in_cache(tokens, dtype, generator):
    """The collector visits 16 rows at a time at least."""
    x = torch.randn(tokens, WIDTH, generator=generator).to(dtype)

    def sums() -> list[Tensor]:
        collector = Collector(WIDTH, ["gram", "absmax", "absmean"])
        collector.add(x)
        stats = collector.finish()
        return [stats.gram(), stats.absmax(), stats.absmean()]

    whole, parts = in_pieces(sums, _CACHE=(collect, 1))
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("width", SIZES[1:])
def test_blocks_of_a_gram_matrix(width, generator, one_thread):
    """Products and errors; `row_chunks` cuts the products of an error."""
    x, w = torch.randn(30, width, generator=generator), torch.randn(3, width, generator=generator)

    def used() -> list[Tensor]:
        collector = Collector(width, ["gram"])
        collector.add(x)
        stats = collector.finish()
        errors = [stats.error(w.round(), w)["text"]]
        return [stats.gram(), gram_matrices.quadratic(w, stats.gram()), torch.tensor(errors)]

    whole, parts = in_pieces(used, _BLOCK=(gram_matrices, PIECE), _CACHED=(_rounding, 3 * PIECE))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", SIZES[1:])
def test_products_of_several_blocks_as_on_an_accelerator(width, generator, monkeypatch):
    monkeypatch.setattr(gram_matrices, "_BLOCK", PIECE // 2)
    monkeypatch.setattr(gram_matrices, "_multiplied", lambda _device: PIECE)
    x = torch.randn(30, width, generator=generator)
    collector = Collector(width, ["gram"])
    collector.add(x)
    stats = collector.finish()
    torch.testing.assert_close(stats.gram(), x.T @ x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offered", SIZES)
def test_batches_that_rows_are_drawn_from(offered):
    """The sample is the same one in whatever batches rows come."""
    x = torch.arange(2.0 * PIECE * 2 + 2).view(-1, 1)[: 2 * offered]
    whole, parts = Reservoir(PIECE, 5), Reservoir(PIECE, 5)
    whole.update(x)
    for batch in (x[:offered], x[:0], x[offered:]):
        parts.update(batch)
    assert sorted(parts.rows().flatten().tolist()) == sorted(whole.rows().flatten().tolist())
    assert len(whole.rows()) == min(len(x), PIECE)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("rows", SIZES[1:])
def test_rows_of_a_weight(rows, fmt, one_thread):
    """Ranges, codes and their errors, with weights of columns that are 0 in places, and of single elements."""
    w, counts = weight(rows, WIDTH), weight(rows, WIDTH, 1).square()
    counts[:, 3] = 0
    shared = _fp4.find_global_scale([w]) if fmt.nvfp4 else None

    def used() -> list[Tensor]:
        results = []
        for importance in (None, counts[0], counts):
            kwargs = {"importance": importance, "global_scale": shared}
            scale, zero = _rounding.find_params(w, fmt, scale_dtype=torch.bfloat16, **kwargs)
            codes = _rounding.weight_codes(w, scale, zero, fmt)
            results += [scale, *([] if zero is None else [zero]), codes.float()]
            results += [function(w, scale, zero, fmt) for function in (_rounding.fake_quantize, _rounding.residual)]
            results.append(_rounding.dequantize(codes, scale, zero, fmt))
            assert torch.equal(results[-1], results[-3])
        quantized = round_to_nearest(w, fmt, global_scale=shared)
        if fmt.group:
            results += [
                part
                for part in _ranges.ranges_of_least_error(w, counts[0], fmt, 5, global_scale=shared)
                if part is not None
            ]
        return [*results, quantized.q.float(), quantized.scale]

    whole, parts = in_pieces(used, _CACHED=(_rounding, PIECE * WIDTH))
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


SCHEMES = [name for name in REGISTRY.names() if (module := REGISTRY.get(name)).scheme(module.OPTIONS()) is not None]
DATA_FREE = [name for name in SCHEMES if not (module := REGISTRY.get(name)).needs(module.OPTIONS()).statistics]
WIDE = [pytest.param(name, marks=[] if name in [*DATA_FREE, "gptq-plus"] else pytest.mark.slow) for name in SCHEMES]


@functools.cache
def observed(width: int) -> GroupStats:
    """Statistics of inputs of a width."""
    return statistics(inputs(width, tokens=200))


def solved(scheme: str, rows: tuple[int, int], width: int) -> BlockResult:
    """Two layers that read the same input, as a run solves them: ranges, codes, and the errors that are reported."""
    module = REGISTRY.get(scheme)
    method = QuantMethod(module, module.OPTIONS())
    weights = {name: weight(size, width, size) for name, size in zip(("gate", "up"), rows, strict=True)}
    needed = method.needs.statistics
    stats = {"gate_up": copy.deepcopy(observed(width))} if needed else {}
    return solve_block([Group(0, "gate_up", ("gate", "up"), None, "norm")], weights, stats, method, torch.bfloat16)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_layers_that_any_scheme_rounds(scheme, one_thread):
    """Blocks of several rows are cut by pieces, too. Where a value lies between two codes the order of sums decides."""
    small = {"_CACHED": (_rounding, 3 * 256), "_ROWS": (awq, _columns, PIECE), "_CHUNK": (_fp4, PIECE * 256)}
    whole, parts = in_pieces(lambda: solved(scheme, (128, 44), 256), **small)
    for name, quantized in whole.weights.items():
        assert (quantized.q != parts.weights[name].q).any(1).sum() <= 1
        torch.testing.assert_close(parts.weights[name].scale.float(), quantized.scale.float())
        for modality, error in whole.errors[name].items():
            assert parts.errors[name][modality] == pytest.approx(error, rel=1e-3)
            assert 0 < error < 0.1


@pytest.mark.parametrize("scheme", WIDE)
def test_a_layer_as_wide_as_those_of_7_billion_parameters(scheme):
    """Of few rows, which are several pieces all the same. Oracle: what is left of the weights once they are read back."""
    rows, width = (256, 64), 3584
    result = solved(scheme, rows, width)
    for name, size in zip(("gate", "up"), rows, strict=True):
        original, rounded = weight(size, width, size), result.weights[name].dequantize(torch.float32)
        assert rounded.shape == original.shape
        assert 0 < (rounded - original).square().sum() < 0.2 * original.square().sum()


@pytest.mark.parametrize("rows", SIZES)
def test_rows_that_are_packed(rows, generator):
    """Two 4-bit floats in a byte."""
    values = torch.tensor(_fp4.VALUES)[torch.randint(0, 8, (rows, WIDTH), generator=generator)].to(_fp4.FLOAT8)
    whole, parts = in_pieces(lambda: _fp4.pack_fp4(values), _CHUNK=(_fp4, PIECE * WIDTH))
    assert torch.equal(whole, parts)
    whole, parts = in_pieces(lambda: _fp4.unpack_fp4(parts), _CHUNK=(_fp4, PIECE * WIDTH // 2))
    assert torch.equal(whole.float(), parts.float()) and torch.equal(parts.float(), values.float())


@pytest.mark.parametrize("fmt", [FORMATS[0], FORMATS[1]], ids=str)
@pytest.mark.parametrize("rows", SIZES[1:])
def test_rows_whose_ranges_are_searched(rows, fmt, one_thread, monkeypatch):
    """Clipping by AWQ."""
    w, gram = weight(rows, WIDTH), statistics(inputs(WIDTH, tokens=100)).gram()
    options = awq.Options(bits=fmt.bits, group_size=fmt.group, symmetric=fmt.symmetric)

    def used() -> list[Tensor]:
        params = awq.clipped(w, gram, fmt)
        candidates = torch.stack(awq.candidates([w], statistics(inputs(WIDTH, tokens=100)), options))
        results = [*params, awq._losses(w, candidates, gram, fmt, torch.bfloat16)]
        return [*(part.float() for part in results if part is not None), awq._relative_magnitude([w, w], fmt)]

    small = {"_ROWS": (awq, PIECE), "_CACHED": (_rounding, 3 * WIDTH), "_SAMPLE": (awq, 3 * rows)}
    whole, parts = in_pieces(used, **small)
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("block", [1, PIECE - 1, PIECE, 3 * PIECE])
@pytest.mark.parametrize("width", SIZES[1:])
def test_columns_of_feedback(width, block, generator):
    """GPTQ's factor and its visit, in float64, where rounding of sums decides no code."""
    w, x = torch.randn(2, 5 * width, width, dtype=torch.float64, generator=generator)
    w, h = w[:5], x.T @ x + torch.eye(width, dtype=torch.float64)
    order = h.diagonal().argsort(descending=True)
    scales, fmt = w.abs().amax(1)[None] / 7, Format("int", 4, -1)

    def factor() -> Tensor:
        triangle = gptq.reordered(h, order)
        assert gptq.factorize(triangle)
        return triangle.tril()

    whole, parts = in_pieces(factor, _FACTORED=(gptq, PIECE))
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(whole.T @ whole, h[order][:, order])
    pivots = whole.diagonal().clone()
    feedback = _columns.Feedback(order, whole / pivots[:, None], pivots.square(), pivots)
    slow = slow_visit(w, feedback, scales[0])
    for far in (1, PIECE):
        small = {"_FAR": (_columns, far), "_STRIP": (_columns, 3)}
        whole, parts = in_pieces(lambda: _columns._quantize_columns([w], feedback, scales, None, fmt, block), **small)
        assert torch.equal(whole, parts) and torch.equal(whole.double(), slow)


def slow_visit(w: Tensor, feedback: _columns.Feedback, scale: Tensor) -> Tensor:
    """Column by column, with the formula of GPTQ's module."""
    codes, errors = torch.zeros_like(w), torch.zeros_like(w)
    for i, column in enumerate(feedback.order.tolist()):
        target = w[:, column] + errors[:, feedback.order[:i]] @ feedback.matrix[i, :i]
        codes[:, column] = (target / scale).round().clamp(-8, 7)
        errors[:, column] = w[:, column] - codes[:, column] * scale
    return codes


@pytest.mark.parametrize("rows", SIZES[1:])
def test_rows_that_are_rounded(rows, one_thread):
    """Of weights one below the other, with local search. Where a value lies between two codes the order of sums decides."""
    w, stats = [weight(5, WIDTH), weight(rows, WIDTH, 1)], statistics(inputs(WIDTH, tokens=100))
    options = gptq_plus.Options(bits=3, group_size=8)

    def codes() -> Tensor:
        quantized = gptq_plus.SCHEME.quantize_group(w, stats, options, torch.bfloat16)
        assert [len(q.q) for q in quantized] == [5, rows]
        return torch.cat([q.q for q in quantized])

    whole, parts = in_pieces(codes, _ROWS=(_columns, PIECE), _ALIGNED=(_columns, 3))
    assert (whole != parts).any(1).sum() <= 1


@pytest.mark.parametrize("kind", rotation.KINDS)
@pytest.mark.parametrize("rows", SIZES)
def test_rows_that_are_rotated(rows, kind, generator):
    """Also of no rows: an embedding may be cut into any number of parts."""
    x = torch.randn(rows, 12, dtype=torch.float64, generator=generator)
    whole, parts = in_pieces(lambda: rotation.Rotation(kind, 12, seed=1).rows(x), _ROWS=(rotation, PIECE))
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("draws", [1, 999, 1000, 1001, 2000])
def test_signs_that_are_drawn(draws):
    """As many as are drawn: each of them is as extreme as a sum of 0."""
    assert paired.monte_carlo_p(np.resize([0.5, -0.5], 2000).tolist(), draws=draws) == 1


@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_a_tensor(size, tmp_path, generator, monkeypatch):
    """Written, and copied to another place of another file."""
    monkeypatch.setattr(tensor_files, "_WRITTEN", PIECE)
    monkeypatch.setattr(tensor_files, "_COPIED", 3)
    tensor = torch.randint(0, 256, (size,), generator=generator).to(torch.uint8)
    head, places = tensor_files.layout({"x": Spec.of(tensor)})
    for name in ("first", "second"):
        with (tmp_path / name).open("w+b") as file:
            tensor_files.write_at(file.fileno(), head, 0)
            if name == "first":
                tensor_files.write_at(file.fileno(), tensor_files.to_bytes(tensor), places["x"])
            else:
                (entry,) = read_entries(tmp_path / "first")
                tensor_files.copy_at(entry, file.fileno(), places["x"])
        (entry,) = read_entries(tmp_path / name)
        assert torch.equal(tensor_files.read_tensor(entry), tensor)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_of_shards(size):
    """A shard may be full to the byte, and no tensor is lost or written twice."""
    specs = [(str(i), Spec("U8", (length,))) for i, length in enumerate([size, 1, 0, size, PIECE])]
    shards = tensor_files.split_shards(specs, PIECE)
    assert [item for shard in shards for item in shard.items()] == specs
    assert all(len(shard) == 1 or sum(spec.nbytes for spec in shard.values()) <= PIECE for shard in shards)


def test_largest_file_that_is_read(tmp_path):
    """One of the largest size is read whole, and a larger one is not cut but refused."""
    for size in SIZES:
        (tmp_path / "file").write_bytes(b"x" * size)
        if size <= PIECE:
            assert json_files.read_bytes(tmp_path / "file", PIECE) == b"x" * size
        else:
            with pytest.raises(json_files.Unreadable, match="more than the 8"):
                json_files.read_bytes(tmp_path / "file", PIECE)
