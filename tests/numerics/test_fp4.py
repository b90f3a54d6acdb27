"""NVFP4 against compressed-tensors' own functions, bit for bit, and against its definition."""

from __future__ import annotations

import pytest
import torch

from vlmcompress.numerics import (
    NVFP4,
    ActFormat,
    QTensor,
    fake_quantize,
    find_global_scale,
    find_params,
    pack_fp4,
    quantize_with,
    residual,
    round_activations,
    round_to_nearest,
    unpack_fp4,
    weight_codes,
)

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def weights(rows: int = 48, columns: int = 128, seed: int = 0) -> torch.Tensor:
    """Rows of different size, one all zero, one so small that its scales underflow, and one with an outlier."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)
    w[3] = 0
    w[4] *= 1e-7
    w[5, 7] = 40.0
    return w


@pytest.fixture(scope="module")
def preset():
    """The weights' and activations' arguments of compressed-tensors' own preset."""
    quant_scheme = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    return quant_scheme.preset_name_to_scheme("NVFP4", ["Linear"])


def theirs(w: torch.Tensor, args):
    """compressed-tensors' global scale, float8 scales (as float32) and codes."""
    from compressed_tensors.quantization.lifecycle import forward
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    shared, blocks = generate_gparam(w.amin(), w.amax()), w.unflatten(1, (-1, 16))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=shared)
    return shared, scale, forward.quantize(w, scale, None, args, global_scale=shared)


def test_the_same_bits_as_compressed_tensors(preset):
    """Oracle: its global scale, scales, codes (signs of zeros included), bytes and values, for scales from the maximum."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization.lifecycle import forward

    w = weights()
    shared, scale, codes = theirs(w, preset.weights)
    qt = round_to_nearest(w, NVFP4, max_code=6.0)
    assert qt.q.dtype is qt.scale.dtype is torch.float8_e4m3fn and qt.scale.shape == (48, 8)
    assert qt.global_scale.dtype is torch.float32 and torch.equal(qt.global_scale, shared)
    assert torch.equal(qt.scale.float(), scale.float())
    assert torch.equal(qt.q.float(), codes) and torch.equal(qt.q.float().signbit(), codes.signbit())
    assert torch.equal(pack_fp4(qt.q), pack_fp4_to_uint8(codes))
    back = forward.dequantize(codes, scale.float(), args=preset.weights, global_scale=shared)
    assert torch.equal(qt.dequantize(torch.float32), back)


def test_codes_are_nearest_and_ties_go_to_the_even_one():
    """By definition: of the eight magnitudes the nearest, of two equally near ones that of even index."""
    x = torch.cat([torch.linspace(-8, 8, 4097), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])])
    codes = weight_codes(x[None, :4096], torch.ones(1, 256), None, NVFP4)[0].float().tolist()
    codes += weight_codes(x[None, -16:], torch.ones(1, 1), None, NVFP4)[0].float().tolist()
    for value, code in zip(x[:4096].tolist() + x[-16:].tolist(), codes, strict=True):
        order = sorted(range(8), key=lambda i: (abs(abs(value) - MAGNITUDES[i]), i % 2))
        assert abs(code) == MAGNITUDES[order[0]] and code * value >= 0, value


def test_four_over_six_takes_for_each_block_the_better_of_two():
    """Oracle: both scales of every block, block by block, in a loop."""
    w = weights()
    shared = find_global_scale([w])
    scales, _ = find_params(w, NVFP4, global_scale=shared)
    taken = {6.0: 0, 4.0: 0}
    for row in range(len(w)):
        for block in range(8):
            piece = w[row, 16 * block : 16 * block + 16]
            tried = []
            for edge in taken:
                stored = (piece.abs().max() / edge * shared).clamp(max=448).to(torch.float8_e4m3fn).float()
                step = torch.where(stored == 0, 0.125, stored) / shared
                codes = [min(MAGNITUDES, key=lambda m: abs(m - abs(v))) * (1 if v >= 0 else -1) for v in piece / step]
                tried.append((float((torch.tensor(codes) * step - piece).square().sum()), float(step), edge))
            (least, step, edge), (other, _, _) = sorted(tried)
            if other > 1.0001 * least:
                assert float(scales[row, block]) == step
                taken[edge] += 1
    assert min(taken.values()) > 60
    plain, both = (
        residual(w, find_params(w, NVFP4, max_code=e, global_scale=shared)[0], None, NVFP4) for e in (6.0, None)
    )
    assert both.square().sum() < 0.95 * plain.square().sum()


def test_packing_and_unpacking_are_inverse():
    """All 16 codes, in their order: the first of two in the lower half of a byte."""
    values = torch.tensor([MAGNITUDES + [-m for m in MAGNITUDES]])
    q = values.to(torch.float8_e4m3fn)
    packed = pack_fp4(q)
    assert packed.dtype is torch.uint8 and packed.tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    assert torch.equal(unpack_fp4(packed).view(torch.uint8), q.view(torch.uint8))
    codes = round_to_nearest(weights(), NVFP4).q
    assert torch.equal(unpack_fp4(pack_fp4(codes)).view(torch.uint8), codes.view(torch.uint8))
    with pytest.raises(ValueError, match="odd"):
        pack_fp4(codes[:, :15])


def test_every_pair_of_codes_has_its_byte():
    """Oracle: compressed-tensors' packing of all 256 pairs, signs of zeros included."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    values = torch.tensor(MAGNITUDES + [-m for m in MAGNITUDES])
    pairs = torch.cartesian_prod(values, values)
    packed = pack_fp4(pairs.to(torch.float8_e4m3fn))
    assert torch.equal(packed, pack_fp4_to_uint8(pairs)) and packed.unique().numel() == 256


@pytest.mark.parametrize("rows", [16, 4096])
def test_a_device_packs_a_matrix_in_a_few_kernels(rows):
    """A kernel's start takes longer than its work on the part of a matrix that fits a CPU's cache."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Calls(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names = [*self.names, str(func)]
            return func(*args, **(kwargs or {}))

    with Calls() as calls:
        pack_fp4(torch.empty(rows, 14336, dtype=torch.float8_e4m3fn, device="meta"))
    assert 0 < len(calls.names) < 40


def test_layers_share_a_global_scale():
    w, other = weights(), 3 * weights(seed=1)
    shared = find_global_scale([w, other])
    assert torch.equal(shared, find_global_scale([torch.cat([w, other])]))
    single, both = round_to_nearest(w, NVFP4, global_scale=shared), round_to_nearest(torch.cat([w, other]), NVFP4)
    assert torch.equal(single.q.float(), both.q[:48].float()) and torch.equal(
        single.scale.float(), both.scale[:48].float()
    )
    assert torch.equal(find_global_scale([torch.zeros(2, 16)]), torch.ones(1))


def test_a_global_scale_belongs_to_its_scales():
    w = weights()
    scale, _ = find_params(w, NVFP4, global_scale=find_global_scale([w]))
    with pytest.raises(ValueError, match="needs the global scale"):
        quantize_with(w, scale, None, NVFP4)
    with pytest.raises(ValueError, match="another global scale"):
        quantize_with(w, scale, None, NVFP4, 1.07 * find_global_scale([w]))


def test_a_rounded_weight_is_a_fixed_point():
    qt = round_to_nearest(weights(), NVFP4)
    values = qt.dequantize(torch.float32)
    assert torch.equal(weight_codes(values, qt.step, None, NVFP4).float(), qt.q.float())
    assert torch.equal(fake_quantize(values, qt.step, None, NVFP4), values)
    again = QTensor.of(qt.q, qt.step, None, NVFP4, qt.global_scale)
    assert torch.equal(again.scale.float(), qt.scale.float())


def test_activations_are_rounded_as_compressed_tensors_does(preset):
    """Oracle: its dynamic scales of blocks relative to a fixed number, for tokens smaller and larger than calibration's."""
    from compressed_tensors.quantization import QuantizationStatus
    from compressed_tensors.quantization.lifecycle import forward

    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 1, 40)[:, None]
    shared = find_global_scale([x[:30]])
    module = torch.nn.Linear(1, 1)
    module.quantization_status, module.input_global_scale = QuantizationStatus.FROZEN, shared
    expected = forward.forward_quantize(module, x, "input", preset.input_activations)
    assert torch.equal(round_activations(x, ActFormat("float", 4, dynamic=True), shared), expected)
