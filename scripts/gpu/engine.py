"""What vLLM shows on a GPU: the parts of the tier `engine`. All of it runs with vLLM's CPU build and tiny shapes, too.

    kernels    every scheme loads, in the kernels that `recipe.targets` names      narrow    2 and 3 bits, against transformers
    kv_cache   an FP8 cache, against one in BF16                                    parity    a reduced model (`doctor`)
    serve      what fewer visual tokens win

First tokens are compared by the mean absolute difference of log-probabilities (nats) over the tokens that vLLM finds most
likely. Of random models they are a nat apart where something is wrong, and hundredths where only the arithmetic differs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from gpu.bare import QUESTION, calibration, device, finished, model, recipe_for
from gpu.check import SCHEMES, SHAPES, Failed, Place, last_lines, target_here

QWEN, QWEN3 = SHAPES  # of the second the keys are normed; FP8 keys of Qwen2.5 lose more


# --- Checkpoints: an unquantized one with what is made of it next to it ---


def quantized(
    place: Place, name: str, kind: str, scheme: str, options: Mapping[str, Any], label: str, **keys: Any
) -> Path:
    """The folder of a quantized checkpoint, which is created if missing."""
    source = model(place, name, kind)
    folder = source.with_name(label)
    if not (folder / "config.json").is_file():
        import vlmcompress

        vlmcompress.quantize(recipe_for(place, source, folder, scheme, options, **keys), overwrite=True)
    return folder


def with_reducer(full: Path, reduce: str) -> Path:
    """The folder of `full` with a reducer, the weights linked instead of copied."""
    from vlmcompress.reduction import block as reducer_block
    from vlmcompress.reduction.choice import parse_reducer

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        for file in full.iterdir():
            if file.is_file() and file.name != "config.json":
                os.link(file, folder / file.name)
        config = json.loads((full / "config.json").read_text())
        config = reducer_block.config_with_reducer(config, parse_reducer(reduce))
        (folder / "config.json").write_text(json.dumps(config, indent=2))

    return finished(full.with_name(f"{full.name}-{reduce.replace(':', '-').replace('/', '-')}"), make)


def pictures(place: Place) -> list[Path]:
    """Pictures to ask about: those of the calibration data."""
    return sorted(calibration(place).parent.glob("*.png"))[:4]


# --- One checkpoint in vLLM, in a process of its own that has the engine in it, so that the model can be looked at: what the
# log says, the kernel of each layer, the first tokens. vLLM names a kernel once a process ("Using MarlinLinearKernel for
# CompressedTensorsWNA16", "Selected CutlassFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8": vLLM 0.32,
# `model_executor/kernels/linear/__init__.py` and `layers/quantization/compressed_tensors/schemes`), hence a process for each
# checkpoint. The layers are asked themselves, too: a scheme keeps its kernel in an attribute (`kernel`, `fp8_linear`, ...). ---

LOGPROBS = 20
TOKENS = 16  # most of an answer that is not cut off
_ERROR = re.compile(r"(\(.*?\) )?(ERROR .*\] )?\s*[\w.]*(Error|Exception)\b: ")


def start(
    place: Place,
    name: str,
    folder: Path,
    images: Sequence[Path],
    share: float,
    *,
    questions: Sequence[str] = (),
    patience: float = 420,
    **options: Any,
) -> Callable[[], Any]:
    """Start vLLM with a checkpoint and ask about images.

    Args:
        name: of the log.
        share: of the GPU that it may take; it has 1 GiB of KV.
        questions: one about each image, answered to the end; none: `QUESTION` about each, and four tokens of an answer.
        patience: seconds after which it is ended.
        options: further ones of `vllm.LLM`.

    Returns:
        A function that waits for the process and returns what it found and what its log names, or `{"error": lines}`.
    """
    if torch.cuda.is_available():
        options |= {"gpu_memory_utilization": share, "kv_cache_memory_bytes": 2**30}
    log = place.work / "logs" / f"probe-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    out = log.with_suffix(".json")
    out.unlink(missing_ok=True)
    pairs = [
        (str(image), question) for image, question in zip(images, questions or [QUESTION] * len(images), strict=True)
    ]
    job = {"model": str(folder), "asked": pairs, "whole": bool(questions), "options": options}
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **os.environ,
        "VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", "from gpu.engine import inside; inside()", json.dumps(job), str(out)]
    with log.open("wb") as sink:
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)

    def finish() -> dict[str, Any]:
        try:
            child.wait(patience)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        text = log.read_text(encoding="utf-8", errors="replace")
        if child.returncode or not out.is_file():
            return {"error": errors(text), **named(text)}
        return {**json.loads(out.read_text(encoding="utf-8")), **named(text)}

    return finish


def errors(log: str) -> list[str]:
    """The last errors in a log, or else its last lines."""
    lines = [line for line in log.splitlines() if _ERROR.match(line)]
    return last_lines("\n".join(lines), 3) or last_lines(log, 5)


def named(log: str) -> dict[str, Any]:
    """Parse vLLM's log: kernel -> the schemes that it was chosen for, and attention backends."""
    kernel_names: dict[str, list[str]] = {}
    for kernel, scheme in re.findall(r"(?:Using|Selected) (\w*Kernel\w*) for (\w[\w -]*\w)", log):
        if scheme not in kernel_names.setdefault(kernel, []):
            kernel_names[kernel].append(scheme)
    backends = re.findall(r"Using ([A-Z][A-Z0-9_]+) (?:attention )?backend\b", log)
    return {"logged": kernel_names, "backends": list(dict.fromkeys(backends))}


def inside() -> None:
    """Ask one checkpoint: the inside of such a process, with arguments `JOB OUT`."""
    from vllm import LLM, SamplingParams

    job, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    llm: Any = LLM(
        job["model"],
        max_model_len=2048,
        max_num_seqs=4,
        max_logprobs=LOGPROBS,
        limit_mm_per_prompt={"image": 1, "video": 0},
        allowed_local_media_path="/",
        enable_prefix_caching=False,
        **{"enforce_eager": True, **job["options"]},
    )
    whole = job["whole"]
    sampling = SamplingParams(max_tokens=TOKENS if whole else 4, temperature=0, ignore_eos=not whole, logprobs=LOGPROBS)
    firsts, lengths, texts = [], [], []
    reductions = recorded_reductions()
    for image, question in job["asked"]:
        (answer,) = llm.chat(conversation(image, question), sampling, use_tqdm=False)
        firsts.append({token: entry.logprob for token, entry in answer.outputs[0].logprobs[0].items()})
        lengths.append(len(answer.prompt_token_ids))
        texts.append(answer.outputs[0].text)
    (layers,) = llm.apply_model(look)
    cache = llm.llm_engine.vllm_config.cache_config
    tokens = (cache.num_gpu_blocks or 0) * cache.block_size
    layers |= {"first": firsts, "prompt_tokens": lengths, "cache_dtype": str(cache.cache_dtype), "kv_tokens": tokens}
    layers |= {"texts": texts, "kept": [reduced.anchor.tolist() for reduced in reductions]}
    out.write_text(json.dumps(layers), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # all is written; the engine's own shutdown only costs time


def conversation(image: Path | str, question: str) -> list[dict[str, Any]]:
    """A question about an image, in OpenAI's format."""
    part = {"type": "image_url", "image_url": {"url": f"file://{image}"}}
    return [{"role": "user", "content": [part, {"type": "text", "text": question}]}]


def recorded_reductions() -> list[Any]:
    """The reductions that the plugin decides from now on in this process, in order."""
    from vlmcompress.engines.vllm.plugin._served_reducer import ServedReducer

    decide, reductions = ServedReducer.reduce_all, []

    def reduce_all(reducer: ServedReducer, images: Sequence[Any]) -> list[Any]:
        decided = decide(reducer, images)
        reductions.extend(decided)
        return decided

    ServedReducer.reduce_all = reduce_all  # type: ignore[method-assign, assignment]
    return reductions


def look(served: Any) -> dict[str, Any]:
    """Kernels of linear layers by name without block numbers, attention backends, and whether KV scales were loaded."""
    by_layer: dict[str, list[str]] = {}
    scales, backends = [], []
    for name, module in served.named_modules():
        layer = re.sub(r"\.\d+\.", ".*.", name)
        # The scheme of a layer in compressed-tensors, or what AWQ's and GPTQ's files get, keeps it in an attribute.
        keepers = [getattr(module, what, None) for what in ("scheme", "quant_method")]
        for value in [value for keeper in keepers if keeper is not None for value in vars(keeper).values()]:
            kind = type(value).__name__
            if "Kernel" in kind and kind not in by_layer.setdefault(layer, []):
                by_layer[layer].append(kind)
        if name.endswith("self_attn.attn") and hasattr(module, "kv_cache_dtype"):  # not a tower's
            scales.append([getattr(module, f"_{which}_scale_float", None) for which in "kv"])
            backend = getattr(module, "attn_backend", None)
            backends.append(backend.get_name() if backend else None)
    return {"layers": by_layer, "kv_scales": scales, "decoder_backends": sorted({str(backend) for backend in backends})}


# --- The parts ---

# A word of a target's `kernels` -> its classes in vLLM 0.32, and our plugin's replacements (`_cpu`).
CLASSES = {
    "Marlin": r"Marlin\w*Kernel",
    "Machete": r"MacheteLinearKernel",
    "Humming": r"Humming\w*Kernel",
    "CUTLASS INT8": r"CutlassInt8ScaledMMLinearKernel",
    "CUTLASS FP8": r"CutlassFP8ScaledMMLinearKernel",
    "CUTLASS block FP8": r"CutlassFp8BlockScaledMMKernel",
    "DeepGEMM": r"DeepGemmFp8BlockScaledMMKernel",
    "FlashInfer FP8": r"FlashInferFP8ScaledMMLinearKernel",
    "FlashInfer CuteDSL": r"FlashInferCuteDslNvFp4\w*Kernel|FlashInferCutedslMxfp8LinearKernel",
    "FlashInfer CUTLASS": r"FlashInferCutlass(NvFp4|Mxfp8)LinearKernel",
    "FlashInfer MXFP4": r"FlashInferMxFp4LinearKernel",
    "CUTLASS W4A8": r"CutlassW4A8LinearKernel",
    "Triton": r"Triton\w*Kernel",
    "skinny GEMM": r"ROCmFP8ScaledMMLinearKernel",
    "emulation": r"Emulation(NvFp4|Mxfp8)LinearKernel",
    "Dynamic4bit": r"Dynamic4bitLinearKernel",
    "CPUWNA16": r"CPUWNA16LinearKernel",
    "oneDNN": r"CPUInt8ScaledMMLinearKernel",
    "torch._scaled_mm": r"\w*TorchFP8ScaledMMLinearKernel|Fp8In16BitsLinearKernel",
}


def kernels(place: Place, shape: str) -> dict[str, Any]:
    """Load every scheme of a shape: which kernel runs which layer, and whether `recipe.targets` says so.

    The checkpoints are shallow: a kernel is chosen by a layer's type and shape, not by the number of layers. Three engines run
    at a time, each a process of its own. What the target refuses is left out and named. Raises `Failed` if one does not load,
    or runs in a kernel that its target does not name.
    """
    from vlmcompress.evaluation.doctor.files import diagnose
    from vlmcompress.recipe import targets

    machine = targets.get_target(target_here())
    schemes: dict[str, Any] = {}
    expected: dict[str, str] = {}
    for name in SCHEMES:
        key = format_key(name)
        if problem := machine.format_problem(key):
            schemes[name] = {"format": key, "refused": problem}
        elif not (place.tiny and key in expected.values()):  # on a CPU one scheme of a format is enough
            expected[name] = key
    folders = {}
    for name in expected:
        folders[name] = quantized(place, shape, "shallow", *SCHEMES[name], label=name)
        checks = diagnose(folders[name], folders[name].with_name("bf16"))
        if problems := [f"{check.name}: {check.detail}" for check in checks if not check.ok]:
            raise Failed("\n".join([f"{name}: the files are not as they should be", *problems]))
    waiting = list(folders)
    while waiting:
        now, waiting = waiting[:3], waiting[3:]
        probes = {name: start(place, f"{shape}-{name}", folders[name], pictures(place)[:1], 0.1) for name in now}
        for name, finish in probes.items():
            schemes[name] = judged(expected[name], str(machine.kernel(expected[name])), finish())
    result = {"target": target_here(), "schemes": {name: schemes[name] for name in SCHEMES if name in schemes}}
    wrong = [f"{name}: {problem}" for name, scheme in schemes.items() for problem in scheme.get("wrong", ())]
    if wrong:
        raise Failed("\n".join(wrong), result)
    return result


def format_key(name: str) -> str:
    """The format of a scheme, as targets name it."""
    from vlmcompress.recipe import targets
    from vlmcompress.utils import registry

    scheme, options = SCHEMES[name]
    module = registry.SCHEMES.get(scheme)
    return targets.format_key(module.scheme(module.OPTIONS(**options)))


def judged(key: str, expected: str, loaded: dict[str, Any]) -> dict[str, Any]:
    """What was seen of one scheme, with what is wrong about it.

    Args:
        key: its format, as targets name it.
        expected: the target's words for the kernel.
    """
    about = {"format": key, "expected": expected, "logged": loaded["logged"]}
    if "error" in loaded:
        return {**about, "wrong": ["vLLM does not load it: " + " | ".join(loaded["error"])]}
    by_kernel: dict[str, list[str]] = {}
    for layer, layer_kernels in loaded["layers"].items():
        for kernel in layer_kernels:
            by_kernel.setdefault(kernel, []).append(layer)
    about, wrong = {**about, "kernels": by_kernel}, []
    if not by_kernel:
        wrong.append("no layer has a kernel; was it loaded quantized?")
    if strange := sorted(kernel for kernel in by_kernel.keys() | loaded["logged"].keys() if not fits(expected, kernel)):
        wrong.append(f"runs in {', '.join(strange)}, recipe.targets says {expected}")
    return {**about, **({"wrong": wrong} if wrong else {})}


def fits(expected: str, kernel: str) -> bool:
    """Whether a class of vLLM is among those of a target's words."""
    return any(re.fullmatch(pattern, kernel) for pattern in patterns(expected))


def patterns(expected: str) -> list[str]:
    """Patterns of the classes of a target's words."""
    return [pattern for word, pattern in CLASSES.items() if word in expected]


def narrow(place: Place, bits: int) -> dict[str, Any]:
    """Quantize a shallow model by GPTQ, ask it in vLLM and, with the dequantized weights, in transformers; compare."""
    on_cpu = target_here() == "cpu"
    width = 4 if on_cpu else bits  # the CPU build has no kernel for fewer; 4 go the same way
    folder, images = quantized(place, QWEN3, "shallow", "gptq", {"bits": width}, f"narrow-{width}"), pictures(place)
    probed = start(place, f"narrow-{bits}", folder, images, 0.3)()
    if "error" in probed:
        raise Failed("\n".join([f"vLLM does not load {width} bits", *probed["error"]]))
    used = sorted({kernel for layer_kernels in probed["layers"].values() for kernel in layer_kernels})
    logprobs = reference(folder, images)
    gap = mean(
        abs(logprob - float(first[int(token)]))
        for top, first in zip(probed["first"], logprobs, strict=True)
        for token, logprob in top.items()
    )
    result = {"bits": width, "kernels": used, "apart_nats": round(gap, 4), "pictures": len(images)}
    expected = "CPUWNA16" if on_cpu else "Humming"
    if not used or not all(fits(expected, kernel) for kernel in used):
        raise Failed(f"{width} bits run in {', '.join(used) or 'no kernel'}, not in {expected}", result)
    if not gap <= 0.15:
        raise Failed(f"first tokens are {gap:.3f} nats from transformers', more than 0.15", result)
    return result


def reference(folder: Path, images: Sequence[Path]) -> list[torch.Tensor]:
    """Log-probabilities `[vocabulary]` of the first answer token for each picture, by transformers."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from vlmcompress import models

    logprobs = []
    with models.quiet_transformers():
        loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").eval().to(device())
        processor = AutoProcessor.from_pretrained(folder)
    for path in images:
        with Image.open(path) as image:
            content = [{"type": "image", "image": image.convert("RGB")}, {"type": "text", "text": QUESTION}]
            inputs = processor.apply_chat_template(
                [[{"role": "user", "content": content}]],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            ).to(device(), dtype=loaded.dtype)
        with torch.inference_mode():
            logprobs.append(loaded(**inputs).logits[0, -1].float().log_softmax(-1).cpu())
    return logprobs


def kv_cache(place: Place) -> dict[str, Any]:
    """Store scales of keys and values in a shallow model in FP8, ask it with and without the FP8 cache, compare."""
    from vlmcompress.recipe import targets

    folder = quantized(place, QWEN3, "shallow", "fp8", {}, "kv-fp8", kv_cache="fp8")
    if not json.loads((folder / "config.json").read_text())["quantization_config"].get("kv_cache_scheme"):
        raise Failed("the checkpoint has no kv_cache_scheme")
    probed: dict[str, dict[str, Any]] = {}
    for name, kind in (("bf16", "bfloat16"), ("fp8", "fp8")):
        probed[name] = start(place, f"kv-{name}", folder, pictures(place), 0.3, kv_cache_dtype=kind)()
        if "error" in probed[name]:
            raise Failed("\n".join([f"vLLM does not start with a KV cache of {kind}", *probed[name]["error"]]))
    scales = [value for pair in probed["fp8"]["kv_scales"] for value in pair]
    gaps = [
        abs(logprob - bf16[token])
        for fp8, bf16 in zip(probed["fp8"]["first"], probed["bf16"]["first"], strict=True)
        for token, logprob in fp8.items()
        if token in bf16
    ]
    gap = mean(gaps) if gaps else float("inf")
    result = {
        "apart_nats": round(gap, 4),
        "tokens": {name: figures["kv_tokens"] for name, figures in probed.items()},
        "backends": {name: figures["decoder_backends"] for name, figures in probed.items()},
        "scales": [round(value, 5) for value in scales],
        "targets_say": targets.get_target(target_here()).kv_fp8,
    }
    if not scales or all(value == 1.0 for value in scales):
        raise Failed("the engine has no scales of keys and values from the checkpoint", result)
    if not gap <= 0.3:
        raise Failed(f"first tokens with FP8 are {gap:.3f} nats from those with BF16, more than 0.3", result)
    if not 1.9 <= probed["fp8"]["kv_tokens"] / probed["bf16"]["kv_tokens"] <= 2.1:
        raise Failed("the FP8 cache does not hold twice as many tokens", result)
    return result


def parity(place: Place, shape: str) -> dict[str, Any]:
    """Ask a reduced model of full width in vLLM and in transformers. Failed where a check of `doctor` does."""
    folder = with_reducer(model(place, shape, "shallow"), "dart:0.5")
    command = [
        sys.executable,
        "-m",
        "vlmcompress",
        "doctor",
        str(folder),
        "--engine",
        "vllm",
        "--json",
        "--prompts",
        "8",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stderr)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        raise Failed("\n".join(["doctor gave no answer", *last_lines(done.stderr, 4)])) from None
    if "checks" not in report:
        raise Failed(str(report.get("error") or report))
    checks = {check["name"]: {"ok": check["ok"], "detail": check["detail"]} for check in report["checks"]}
    if wrong := [f"{name}: {check['detail']}" for name, check in checks.items() if not check["ok"]]:
        raise Failed("\n".join(wrong), checks)
    return checks


KEPT = {"full": 1.0, "half": 0.5, "quarter": 0.25}
LOADS = {"latency": (1, 8, 4), "load": (32, 96, 64)}  # clients, requests, tokens of an answer
TINY_LOADS = {"latency": (1, 2, 2), "load": (2, 4, 4)}


def serve(place: Place, scheme: str) -> dict[str, Any]:
    """Serve a scheme with all, half and a quarter of its visual tokens, and measure each by the parts of `vlmcompress bench`.

    `bench` compares two checkpoints and starts a server for each turn. Twelve variants would take an hour of starts, so the
    three of a scheme are up together here and asked one at a time, in an order that is reversed in the second turn. All have a
    KV cache of the same bytes. Caches are off, which the servers' own counters must confirm.
    """
    from vlmcompress.evaluation.speed.prompts import open_prompts

    full = model(place, QWEN, "full")
    if scheme != "bf16":
        full = quantized(place, QWEN, "full", *SCHEMES[scheme], label=scheme)
    shares = {name: share for name, share in KEPT.items() if share != 0.5 or not place.tiny or scheme == "bf16"}
    folders = {name: with_reducer(full, f"dart:{share}") if share < 1 else full for name, share in shares.items()}
    loads = TINY_LOADS if place.tiny else LOADS
    size = (112, 112) if place.tiny else (896, 896)  # 16 and 1,024 visual tokens
    most = max(requests for _, requests, _ in loads.values())
    conversations = open_prompts(calibration(place), full, full, most, 0, size).conversations
    bursts = {load: conversations[:requests] for load, (_, requests, _) in loads.items()}
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {name: {load: [] for load in loads} for name in folders}
    with servers(place, folders) as up:
        for running in up.values():
            burst(running, bursts["load"][:8], 4, loads["load"][2])  # not measured
        for turn in range(1 if place.tiny else 2):
            for load, (clients, _, tokens) in loads.items():
                for name in list(up)[:: 1 if turn % 2 == 0 else -1]:
                    rows[name][load].append(burst(up[name], bursts[load], clients, tokens))
        result = {name: described(up[name], rows[name]) for name in up}
    visual = {name: figures["visual_tokens"] for name, figures in result.items()}
    if any(abs(count / visual["full"] - shares[name]) > 0.02 for name, count in visual.items()):
        raise Failed(f"images have {visual} tokens, which are not the shares {shares}", result)
    return {"shape": QWEN, "scheme": scheme, "loads": {k: list(v) for k, v in loads.items()}, "kept": result}


@contextlib.contextmanager
def servers(place: Place, folders: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """All servers, up: three at a time on a GPU, as each takes only its share; two on a CPU."""
    from vlmcompress.engines.vllm.serve import vllm_server
    from vlmcompress.evaluation.speed.serving import FLAGS

    limits = ["--max-model-len", "1024" if place.tiny else "4096"]
    if torch.cuda.is_available():
        limits += ["--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(4 * 2**30)]
    limits += json.loads(os.environ.get("GPU_CHECK_FLAGS", "[]"))
    flags, logs = [*FLAGS, *limits], place.work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:

        def up(name: str) -> Any:
            log = logs / f"server-{folders[name].parent.name}-{folders[name].name}.log"
            return stack.enter_context(vllm_server(folders[name], flags=flags, images=1, timeout=480, log=log))

        with ThreadPoolExecutor(3 if torch.cuda.is_available() else 2) as starters:
            running = dict(zip(folders, starters.map(up, folders), strict=True))
        yield running


def burst(running: Any, conversations: Sequence[Any], clients: int, tokens: int) -> dict[str, Any]:
    """Send conversations and check that all were answered in full, from no cache; returns the figures."""
    from vlmcompress.evaluation.speed import client, counters, measure

    before = counters.counters(running)
    bodies = [client.encode_request(running.name, messages, tokens) for messages in conversations]
    outcomes, seconds = client.send(running.url, bodies, client.Load("closed", clients))
    counted = counters.counters(running).since(before)
    if bad := [outcome for outcome in outcomes if outcome.error or outcome.output_tokens != tokens]:
        first = bad[0].error or f"{bad[0].output_tokens} of {tokens} tokens"
        raise Failed(f"{running.name}: {len(bad)} of {len(outcomes)} requests failed, the first: {first}")
    if hits := counted.prefix_hits + counted.media_hits:
        raise Failed(f"{running.name} took {hits:g} tokens or images from a cache that should be off")
    record = measure.burst_record(outcomes, seconds, side="candidate", repeat=0, slo={}, counters=counted)
    longest = max(outcomes, key=lambda outcome: outcome.prompt_tokens)
    length = longest.prompt_tokens + longest.output_tokens
    return {**measure.figures(record), "visual": longest.visual_tokens, "tokens": length}


def described(running: Any, rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The figures of a server: medians over its turns, and the requests that its KV cache holds at once."""
    from vlmcompress.evaluation.speed import counters, measure

    longest, cache = max(row["tokens"] for row in rows["load"]), counters.cache_config(running)

    def figure(load: str, name: str) -> float:
        return round(median(row[name] for row in rows[load]), 3)

    return {
        "visual_tokens": rows["load"][0]["visual"],
        "start_seconds": running.start_seconds,
        "ttft_ms": figure("latency", "ttft_p50_ms"),
        "requests_per_second": figure("load", "request_throughput"),
        "load_ttft_p50_ms": figure("load", "ttft_p50_ms"),
        "load_ttft_p99_ms": figure("load", "ttft_p99_ms"),
        "tpot_ms": figure("load", "tpot_p50_ms"),
        "tokens_per_second_alone": round(1000 / figure("latency", "tpot_p50_ms"), 1),
        "tokens_per_second": figure("load", "output_throughput"),
        "fits": measure.requests_at_once(longest, cache),
        "kv_tokens": int(cache["kv_cache_size_tokens"]),
    }
