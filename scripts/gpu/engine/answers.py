"""Compare answers of checkpoints in vLLM with transformers, or with the same checkpoint in 16 bits.

First tokens are compared by the mean absolute difference of log-probabilities (nats) over the tokens that vLLM finds most
likely; transformers computes with the dequantized weights. Of random models they are a nat apart where something is wrong, and
hundredths where only the arithmetic differs. `parity` runs the checks of `vlmcompress doctor --engine vllm`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu import shapes
from gpu.engine import kernels, probe
from gpu.machine import target_here
from gpu.part import Failed, Place, last_lines

SHAPE = "qwen3-vl-8b"  # its keys are normed; FP8 keys of Qwen2.5 lose more
NARROW_APART, KV_APART = 0.15, 0.3  # nats
REDUCE = "dart:0.5"
PROMPTS = 8


def narrow(place: Place, bits: int) -> dict[str, Any]:
    """Quantize a shallow model by GPTQ, ask it in vLLM and in transformers, compare."""
    width = 4 if target_here() == "cpu" else bits  # the CPU build has no kernel for fewer; 4 go the same way
    folder = shapes.quantized(place, SHAPE, "shallow", "gptq", {"bits": width}, f"narrow-{width}")
    images, log = kernels.pictures(place), place.work / "logs" / f"probe-narrow-{bits}.log"
    probed = probe.finish(probe.start(folder, log, images, shapes.QUESTION, **probe.options_for(0.3)), log)
    if "error" in probed:
        raise Failed("\n".join([f"vLLM does not load {width} bits", *probed["error"]]))
    used = sorted({kernel for layer_kernels in probed["layers"].values() for kernel in layer_kernels})
    gap = apart(probed["first"], reference(folder, images, shapes.QUESTION))
    result = {"bits": width, "kernels": used, "apart_nats": round(gap, 4), "pictures": len(images)}
    expected = "CPUWNA16" if target_here() == "cpu" else "Humming"
    if not used or not all(kernels.fits(expected, kernel) for kernel in used):
        raise Failed(f"{width} bits run in {', '.join(used) or 'no kernel'}, not in {expected}", result)
    if not gap <= NARROW_APART:
        raise Failed(f"first tokens are {gap:.3f} nats from transformers', more than {NARROW_APART}", result)
    return result


def kv_cache(place: Place) -> dict[str, Any]:
    """Store scales in a shallow model, ask it with and without the FP8 cache, compare."""
    from vlmcompress.recipe import targets

    folder, images = _with_scales(place), kernels.pictures(place)
    probed: dict[str, dict[str, Any]] = {}
    for name, kind in (("bf16", "bfloat16"), ("fp8", "fp8")):
        log = place.work / "logs" / f"probe-kv-{name}.log"
        options = probe.options_for(0.3)
        child = probe.start(folder, log, images, shapes.QUESTION, kv_cache_dtype=kind, **options)
        probed[name] = probe.finish(child, log)
        if "error" in probed[name]:
            raise Failed("\n".join([f"vLLM does not start with a KV cache of {kind}", *probed[name]["error"]]))
    scales = [value for pair in probed["fp8"]["kv_scales"] for value in pair]
    gap = between(probed["fp8"]["first"], probed["bf16"]["first"])
    result = {
        "apart_nats": round(gap, 4),
        "tokens": {name: figures["kv_tokens"] for name, figures in probed.items()},
        "backends": {name: figures["decoder_backends"] for name, figures in probed.items()},
        "scales": [round(value, 5) for value in scales],
        "targets_say": targets.get_target(target_here()).kv_fp8,
    }
    if not scales or all(value == 1.0 for value in scales):
        raise Failed("the engine has no scales of keys and values from the checkpoint", result)
    if not gap <= KV_APART:
        raise Failed(f"first tokens with FP8 are {gap:.3f} nats from those with BF16, more than {KV_APART}", result)
    if not 1.9 <= probed["fp8"]["kv_tokens"] / probed["bf16"]["kv_tokens"] <= 2.1:
        raise Failed("the FP8 cache does not hold twice as many tokens", result)
    return result


def _with_scales(place: Place) -> Path:
    """The shallow checkpoint with scales of keys and values: FP8 weights, the usual companion."""
    import vlmcompress

    source = shapes.model(place, SHAPE, "shallow")
    folder = source.with_name("kv-fp8")
    if not (folder / "config.json").is_file():
        vlmcompress.quantize(shapes.recipe(place, source, folder, "fp8", {}, kv_cache="fp8"), overwrite=True)
    if not json.loads((folder / "config.json").read_text())["quantization_config"].get("kv_cache_scheme"):
        raise Failed("the checkpoint has no kv_cache_scheme")
    return folder


def parity(place: Place, shape: str) -> dict[str, Any]:
    """Ask a reduced model of full width in vLLM and in transformers. Failed where a check of `doctor` does."""
    folder = shapes.reduced(shapes.model(place, shape, "shallow"), REDUCE)
    command = [sys.executable, "-m", "vlmcompress", "doctor", str(folder), "--engine", "vllm", "--json"]
    done = subprocess.run([*command, "--prompts", str(PROMPTS)], capture_output=True, text=True, check=False)
    print(done.stderr)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        raise Failed("\n".join(["doctor gave no answer", *last_lines(done.stderr, 4)])) from None
    if "checks" not in report:
        raise Failed(str(report.get("error") or report))
    checks = {check["name"]: {"ok": check["ok"], "detail": check["detail"]} for check in report["checks"]}
    result = {"reduce": REDUCE, "prompts": PROMPTS, "checks": checks}
    wrong = [f"{name}: {check['detail']}" for name, check in checks.items() if not check["ok"]]
    if wrong:
        raise Failed("\n".join(wrong), result)
    return result


def reference(folder: Path, images: Sequence[Path], question: str) -> list[Any]:
    """Log-probabilities `[vocabulary]` of the first answer token for each picture, by transformers."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from vlmcompress import models

    device, logprobs = "cuda" if torch.cuda.is_available() else "cpu", []
    with models.quiet_transformers():
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").eval().to(device)
        processor = AutoProcessor.from_pretrained(folder)
    for path in images:
        with Image.open(path) as image:
            content = [{"type": "image", "image": image.convert("RGB")}, {"type": "text", "text": question}]
            inputs = processor.apply_chat_template(
                [[{"role": "user", "content": content}]],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            ).to(device, dtype=model.dtype)
        with torch.inference_mode():
            logprobs.append(model(**inputs).logits[0, -1].float().log_softmax(-1).cpu())
    return logprobs


def apart(first: Sequence[dict[str, float]], expected: Sequence[Any]) -> float:
    """Mean absolute difference in nats of vLLM's most likely first tokens, `{token id: log-probability}` for each picture."""
    gaps = [
        abs(logprob - float(whole[int(token)]))
        for top, whole in zip(first, expected, strict=True)
        for token, logprob in top.items()
    ]
    return sum(gaps) / len(gaps)


def between(first: Sequence[dict[str, float]], other: Sequence[dict[str, float]]) -> float:
    """Mean absolute difference in nats of the tokens that two runs of vLLM both report, for the same pictures."""
    gaps = [
        abs(logprob - there[token])
        for here, there in zip(first, other, strict=True)
        for token, logprob in here.items()
        if token in there
    ]
    return sum(gaps) / len(gaps) if gaps else float("inf")
