"""4-bit weights that are unpacked when they are loaded, against the codes they came from and against vLLM's own kernel."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.kit import forks

pytestmark = pytest.mark.engine

# Both forms of vLLM's class `CPUWNA16LinearKernel` on one layer: its own, where the processor has it, and the plugin's.
LOOK = """
import json, os
os.environ["VLLM_CPU_INT4_W4A8"] = "0"  # with AMX vLLM would round activations, too
import torch
import vllm._custom_ops
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import pack_quantized_values_into_int32
from vllm.scalar_type import scalar_types
from vlmcompress.engines.vllm.plugin._cpu import KERNEL, replace

ROWS, COLUMNS, GROUP = 96, 64, 32  # inputs and outputs
torch.cpu._init_amx()  # as a worker of vLLM does
torch.manual_seed(0)
x = torch.randn(5, ROWS).bfloat16()
found = {"kernel": hasattr(torch.ops._C, KERNEL)}
for zeros in (False, True):
    kind = scalar_types.uint4 if zeros else scalar_types.uint4b8
    codes, offset = torch.randint(0, 16, (ROWS, COLUMNS)), torch.randint(0, 16, (ROWS // GROUP, COLUMNS))
    scales = torch.rand(ROWS // GROUP, COLUMNS).bfloat16()
    offsets = offset.repeat_interleave(GROUP, 0) if zeros else 8
    weight = (codes - offsets).float() * scales.float().repeat_interleave(GROUP, 0)
    given = MPLinearLayerConfig((ROWS, COLUMNS), (ROWS, COLUMNS), kind, torch.bfloat16, GROUP, zeros, False)
    assert CPUWNA16LinearKernel.can_implement(given)[0]

    def answer():
        layer = torch.nn.Module()
        def put(name, value, **marks):
            setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))
            for mark, dim in marks.items():
                setattr(getattr(layer, name), mark, dim)
        put("q", pack_quantized_values_into_int32(codes, kind, 0), input_dim=0, output_dim=1, packed_dim=0)
        put("s", scales, input_dim=0, output_dim=1)
        if zeros:
            put("z", pack_quantized_values_into_int32(offset, kind, 1), input_dim=0, output_dim=1, packed_dim=1)
        kernel = CPUWNA16LinearKernel(given, "q", "s", "z" if zeros else None)
        kernel.process_weights_after_loading(layer)
        return kernel.apply_weights(layer, x).float(), layer.q

    own = CPUWNA16LinearKernel.process_weights_after_loading, CPUWNA16LinearKernel.apply_weights
    theirs = answer()[0] if found["kernel"] else None
    replace(CPUWNA16LinearKernel)
    replace(CPUWNA16LinearKernel)  # to ask twice is to ask once
    ours, dense = answer()
    CPUWNA16LinearKernel.process_weights_after_loading, CPUWNA16LinearKernel.apply_weights = own
    exact = x.float() @ weight
    found[str(zeros)] = {
        "weights": (dense.t().float() - weight.bfloat16().float()).abs().max().item(),
        "exact": ((ours - exact).norm() / exact.norm()).item(),
        "theirs": 0.0 if theirs is None else ((ours - theirs).norm() / exact.norm()).item(),
    }
print(json.dumps(found))
"""


def test_unpacked_weights_are_those_of_the_codes_and_answer_as_vllms_kernel_does():
    done = subprocess.run([forks.python(*forks.VLLM), "-c", LOOK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = json.loads(done.stdout.splitlines()[-1])
    for zeros in ("False", "True"):
        assert (
            outputs[zeros]["weights"] == 0 and outputs[zeros]["exact"] < 0.004 and outputs[zeros]["theirs"] < 0.006
        ), outputs
