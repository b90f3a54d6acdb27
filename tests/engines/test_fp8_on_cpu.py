"""FP8 on processors with AMX, where vLLM's CPU build takes a reference kernel: the plugin's against the formula."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.kit import forks

pytestmark = pytest.mark.engine

# What vLLM picks for a layer, and the plugin's result: scales for each output or for all, inputs scaled by token or at all.
LOOK = """
import json, os, sys
import torch
import torch._dynamo
torch._dynamo.config.disable = True  # vLLM compiles how inputs are rounded
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
from vllm.model_executor.layers.quantization.utils import quant_utils as keys
from vlmcompress.engines.vllm.plugin import _cpu, register

register(), register()
said = {"reference": _cpu.takes_reference(), "disabled": os.environ.get(_cpu.DISABLED, "")}
torch.manual_seed(0)
with set_current_vllm_config(VllmConfig()):
    for name, weight_key, input_key, dtype in (
        ("channels", keys.kFp8StaticChannelSym, keys.kFp8DynamicTokenSym, torch.float32),
        ("channels, bfloat16", keys.kFp8StaticChannelSym, keys.kFp8DynamicTokenSym, torch.bfloat16),
        ("all", keys.kFp8StaticTensorSym, keys.kFp8StaticTensorSym, torch.float32),
    ):
        # 40 outputs: vLLM's own kernels for AMX take multiples of 32
        each, token = (40, 1) if "channels" in name else (1, 1), input_key is keys.kFp8DynamicTokenSym
        picked = init_fp8_linear_kernel(input_key, weight_key, dtype, dtype, (40, 64))
        layer = torch.nn.Module()
        codes = torch.randn(40, 64).to(torch.float8_e4m3fn)
        for part, value in (("weight", codes.t()), ("weight_scale", torch.rand(each) + 0.5)):
            layer.register_parameter(part, torch.nn.Parameter(value, requires_grad=False))
        layer.input_scale = None if token else torch.tensor(0.25)
        layer.input_scale_ub = None
        x, bias = torch.randn(2, 3, 64, dtype=dtype), torch.randn(40, dtype=dtype)
        types = {"input_dtype": dtype, "out_dtype": dtype, "weight_shape": (40, 64)}
        config = FP8ScaledMMLinearLayerConfig(weight_quant_key=weight_key, activation_quant_key=input_key, **types)
        kernel = _cpu.fp8_kernel()(config, ("weight", "weight_scale", "input_scale", "input_scale_ub"))
        expected = codes.double() * layer.weight_scale.double()
        kernel.process_weights_after_loading(layer)
        out = kernel.apply_weights(layer, x, bias)
        scale = (x.float().abs().amax(-1, keepdim=True) / 448) if token else torch.tensor(0.25)
        rounded = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()
        exact = rounded @ expected.t() + bias.double()
        said[name] = [type(picked).__name__, str(out.dtype), list(out.shape), ((out - exact).norm() / exact.norm()).item()]
print(json.dumps(said))
"""


def test_the_plugins_kernel_replaces_the_reference() -> None:
    """Oracle: the formula in float64. `torch._scaled_mm` would take seconds for a layer of real size."""
    done = subprocess.run([forks.python(*forks.VLLM), "-c", LOOK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.loads(done.stdout.splitlines()[-1])
    for name, most in (("channels", 1e-6), ("channels, bfloat16", 0.006), ("all", 1e-6)):
        picked, dtype, shape, error = printed[name]
        assert (picked == "Fp8In16BitsLinearKernel") is printed["reference"], printed
        assert dtype == ("torch.bfloat16" if "bfloat16" in name else "torch.float32") and shape == [2, 3, 40]
        assert error < most, printed
    assert ("ChannelWiseTorchFP8ScaledMMLinearKernel" in printed["disabled"]) is printed["reference"]
