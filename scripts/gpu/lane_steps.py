"""The steps of the lane: what vLLM's real kernels show on a machine that has none of vLLM's packages (`lane` brings them).

    imports     what serving a VLM imports, the operators, the plugin and its contract       answers   BF16 as on a CPU
    built       every format's layers and the kernels that vLLM picks, without weights       reduced   reducers in the plugin
    formats     every scheme and file format of the demo: its kernel, its answers            drafts    speculative decoding
    compiled    CUDA graphs and torch.compile             served      speed on the shapes of a model of 7 B, by `engine.serve`

`prepare` makes what they read where there is a package index and no GPU: questions, quantized demos, and the CPU's answers to
compare with. Steps get them in `GPU_VLLM_DATA`. Each engine is a process of its own (`engine.start`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from gpu.check import ROOT, Failed, Place, target_here
from gpu.engine import TOKENS, conversation

DATA = "GPU_VLLM_DATA"
QUESTIONS = {"llava": 50, "qwen": 24}
FEW = 24  # questions where not all are asked
AT_ONCE = 9  # engines of the demos on one GPU; each takes some 40 s to start, and 1 GiB of KV
PATIENCE = 90.0  # seconds after which one is ended, so that it does not hold up the others of its part
APART = 0.1  # nats: the most that first tokens' distributions may differ from the CPU's on average (KL divergence)
ALIKE = 0.9  # the least share of answers, and of kept tokens, that are the CPU's
IMPORTS = re.findall(
    r"\S+",
    """
    v1.worker.gpu_worker v1.worker.gpu_model_runner v1.engine.core v1.engine.llm_engine v1.engine.async_llm
    entrypoints.openai.api_server entrypoints.cli.main v1.attention.backends.flash_attn v1.attention.backends.triton_attn
    _custom_ops model_executor.models.llava model_executor.models.qwen2_5_vl model_executor.models.qwen3_vl
    model_executor.layers.quantization.compressed_tensors.compressed_tensors model_executor.layers.quantization.auto_awq
    model_executor.layers.quantization.fp8 model_executor.layers.quantization.modelopt model_executor.kernels.linear
    compilation.backends compilation.decorators compilation.piecewise_backend compilation.cuda_graph
    compilation.passes.pass_manager v1.sample.ops.topk_topp_sampler v1.sample.rejection_sampler v1.spec_decode.eagle
    v1.spec_decode.ngram_proposer v1.structured_output multimodal.processing distributed.device_communicators.cuda_communicator
""",
)
OPERATORS = (
    "cutlass_scaled_mm",
    "dynamic_scaled_int8_quant",
    "marlin_gemm",
    "machete_mm",
    "cutlass_w4a8_mm",
    "rms_norm",
)

MARLIN = "-marlin"  # the checkpoint without this word, in Marlin where vLLM would take Machete
ASYMMETRIC = {"scheme": "gptq", "options": {"symmetric": False}}
SYMMETRIC = {"scheme": "gptq", "options": {"symmetric": True}}
# name -> keys of a recipe of demo-llava
FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"scheme": "fp8"},
    "int8": {"scheme": "int8"},
    "w4a16": SYMMETRIC,
    "w4a16-marlin": SYMMETRIC,
    "w4a16-zero-points": ASYMMETRIC,
    "w4a16-zero-points-marlin": ASYMMETRIC,
    "awq-format": ASYMMETRIC,
    "gptq-format": SYMMETRIC,
    "w8a16": {"scheme": "w8a16"},
    "fp8-block": {"scheme": "fp8-block"},
    "fp8-static": {"scheme": "fp8-static"},
    "nvfp4": {"scheme": "nvfp4"},
    "w4a8-fp8": {"scheme": "w4a8-fp8"},
    "fp8-kv": {"scheme": "fp8", "kv_cache": "fp8"},
    "fp8-tower": {"scheme": "fp8", "vision": "fp8"},
    "int8-tower": {"scheme": "int8", "vision": "int8"},
}
SAME = {
    "w4a16-marlin": "w4a16",
    "w4a16-zero-points-marlin": "w4a16-zero-points",
    "awq-format": "w4a16-zero-points",
    "gptq-format": "w4a16",
    "fp8-kv": "fp8",
}
"""Formats with the weights of another one, and so its answers."""
REDUCERS = {"llava": ("coverage:0.5", "pool:window=1x2", "divprune:0.5", "uniform:0.5", "visionzip:0.5"),
            "qwen": ("coverage:0.5", "pool:window=1x2", "divprune:0.5", "uniform:0.5")}  # fmt: skip
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # recorded in seconds; torch.compile would take minutes
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


# --- Where there is no GPU: what the steps read ---


def prepare(data: Path, few: bool = False) -> None:
    """Make what is missing of questions, checkpoints and the CPU's answers. `few`: of all only the first.

    The CPU's answers are transformers', of the same codes dequantized, in float32: what 16 bits and a scheme's rounding of
    activations change counts as a difference. Of 41 tokens that `coverage` keeps of four images, it shares 41, 41, 38 and 41
    with vLLM in bfloat16 on a CPU, where transformers in bfloat16 shares 38, 39, 38 and 36 with that.
    """
    import vlmcompress
    from vlmcompress.export.convert import convert

    os.environ[DATA] = str(data)
    checkpoints, dequantized = data / "checkpoints", data.parent / "dequantized"
    for demo in _some(QUESTIONS, few):
        most = QUESTIONS[demo]
        if not (data / demo / "questions.json").exists():
            _write_questions(data / demo, demo, 4 if few else most)
    calibration = {"data": str(ROOT / "eval/demo/data/llava/calibration.parquet"), "samples": 32}
    schemes = [name for name in _some(FORMATS, few) if name not in SAME or name == "fp8-kv"]
    for name in schemes:
        if not (checkpoints / name).exists():
            keys = {"calibrate": calibration, **FORMATS[name]}
            recipe = vlmcompress.Recipe.of(str(_demo("llava")), str(checkpoints / name), **keys)
            vlmcompress.quantize(recipe, restart=True)
    for name, form in (("awq-format", "awq"), ("gptq-format", "gptq")):
        if SAME[name] in schemes and not (checkpoints / name).exists():
            convert(checkpoints / SAME[name], checkpoints / name, form)
    for name in (*_some(QUESTIONS, few), *(name for name in schemes if name not in SAME)):
        if name not in QUESTIONS and not (dequantized / name).exists():
            dequantized.mkdir(exist_ok=True)
            convert(checkpoints / name, dequantized / name, "bf16")
        _keep(data, name, _demo(name) if name in QUESTIONS else dequantized / name, None)
    for demo in _some(REDUCERS, few):
        for spec in _some(REDUCERS[demo], few):
            _keep(data, f"{demo} {spec}", _demo(demo), spec)


def _demo(name: str) -> Path:
    return ROOT / "eval/demo" / f"demo-{name}"


def _some(names: Any, few: bool) -> list[str]:
    return list(names)[: 1 if few else None]


def _write_questions(folder: Path, demo: str, count: int) -> None:
    """Questions of a demo's test split, spread over its families, and their images as files."""
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(ROOT / f"eval/demo/data/{demo}/test.parquet").to_pylist()
    folder.mkdir(parents=True)
    questions = []
    for number, row in enumerate(rows[:: len(rows) // count][:count]):
        (folder / f"{number}.png").write_bytes(row["image"][0])
        questions.append({"question": row["question"], "answer": row["answer"]})
    (folder / "questions.json").write_text(json.dumps(questions))


def _keep(data: Path, name: str, folder: Path, reduce: str | None) -> None:
    """Store a CPU's answers under a name, unless they are there: in the form that `engine.start` returns them in."""
    file = data / "cpu.json"
    stored = json.loads(file.read_text()) if file.exists() else {}
    if name in stored:
        return
    from vlmcompress.engines import EngineSettings, Request
    from vlmcompress.engines.hf import IN_FLIGHT, Engine

    began = time.monotonic()
    images, questions = _asked(demo_of(name), None if name in QUESTIONS else FEW)
    settings = asdict(EngineSettings(max_tokens=TOKENS, logprobs=20, dtype="float32"))
    job = {
        "model": str(folder),
        "media": str(images[0].parent),
        "settings": settings,
        "images_per_prompt": 1,
        "reduce": reduce,
    }
    engine = Engine(job)
    tokens = {engine.tokenizer.decode([token]): str(token) for token in reversed(range(len(engine.tokenizer)))}
    answers: dict[str, list[Any]] = {"texts": [], "first": [], "prompt_tokens": [], "kept": []}
    requests = [
        asdict(Request(str(image), conversation(image, question)))
        for image, question in zip(images, questions, strict=True)
    ]
    for at in range(0, len(requests), IN_FLIGHT):
        batch = requests[at : at + IN_FLIGHT]
        for _, fields in engine.generate(batch, engine.encode(batch), settings):
            answers["texts"].append(fields["text"])
            answers["first"].append({tokens[text]: value for text, value in fields["first"]})
            answers["prompt_tokens"].append(fields["prompt_tokens"])
        if engine.attached:
            units = sorted(engine.attached.reduced_units, key=lambda unit: unit.row)
            answers["kept"] += [unit.reduction.anchor.tolist() for unit in units]
    file.write_text(json.dumps({**stored, name: answers}))
    print(f"{name}: {len(questions)} answers, {time.monotonic() - began:.0f} s", flush=True)


# --- Asking and comparing ---


def _asked(demo: str, most: int | None = None) -> tuple[list[Path], list[str]]:
    """Images and questions of a demo."""
    folder = Path(os.environ[DATA]) / demo
    questions = [row["question"] for row in json.loads((folder / "questions.json").read_text())][:most]
    return [folder / f"{number}.png" for number in range(len(questions))], questions


def demo_of(name: str) -> str:
    """The demo of a checkpoint, or of a demo and a reducer."""
    demo = name.partition(" ")[0]
    return demo if demo in QUESTIONS else "llava"


def _started(
    place: Place, name: str, reduce: str | None = None, most: int | None = FEW, label: str = "", **options: Any
) -> Any:
    """Start an engine with a checkpoint, on its demo's questions; returns what `engine.start` does."""
    from gpu.engine import start, with_reducer

    folder = Path(os.environ[DATA]) / "checkpoints" / name.removesuffix(MARLIN)
    if reduce:
        folder = with_reducer(folder, reduce)
    images, questions = _asked(demo_of(name), None if name in QUESTIONS and not reduce else most)
    if name == "fp8-kv":
        options["kv_cache_dtype"] = "fp8"
    os.environ["VLLM_DISABLED_KERNELS"] = "MacheteLinearKernel" if name.endswith(MARLIN) else ""
    options["patience"] = 2400.0 if place.tiny else PATIENCE
    return start(place, f"{label}{folder.name}", folder, images, 0.08, questions=questions, **options)


def _reference(name: str) -> dict[str, Any]:
    answers = json.loads((Path(os.environ[DATA]) / "cpu.json").read_text()).get(SAME.get(name, name))
    if answers is None:
        raise Failed(f"the pack holds no answers of a CPU to {name}; it was made with --few")
    return answers


def _groups(names: Sequence[str], place: Place) -> list[Sequence[str]]:
    """Names of engines that are up at the same time."""
    size = 1 if place.tiny else AT_ONCE
    return [names[at : at + size] for at in range(0, len(names), size)]


def compared(answers: Mapping[str, Any], cpu: Mapping[str, Any]) -> dict[str, Any]:
    """How answers differ from a CPU's: share of equal ones, of equal first tokens, and KL divergence of these in nats.

    The divergence is over the tokens that the CPU finds most likely; one that the other side does not report has its lowest
    probability. `wrong` names what differs by too much, or what is not there to be compared.
    """
    if "error" in answers:
        return {"wrong": "vLLM does not load it: " + " | ".join(answers["error"]), "logged": answers.get("logged")}
    import math

    divergence, tops = [], []
    for ours, theirs in zip(answers["first"], cpu["first"], strict=True):
        least = min(ours.values())
        divergence.append(sum(math.exp(p) * (p - ours.get(token, least)) for token, p in theirs.items()))
        tops.append(max(ours, key=ours.get) == max(theirs, key=theirs.get))
    same = [text == other for text, other in zip(answers["texts"], cpu["texts"], strict=True)]
    result = {
        "questions": len(same), "answers_alike": mean(same), "first_alike": mean(tops), "kl_nats": round(mean(divergence), 5),
        "kl_worst": round(max(divergence), 5), "logged": answers["logged"], "backends": answers["decoder_backends"],
        "kernels": sorted({kernel for kernels in answers["layers"].values() for kernel in kernels}),
    }  # fmt: skip
    wrong = []
    if not abs(result["kl_nats"]) <= APART:
        wrong.append(f"first tokens are {result['kl_nats']:.3f} nats from the CPU's, more than {APART}")
    if result["answers_alike"] < ALIKE:
        wrong.append(f"{result['answers_alike']:.0%} of the answers are the CPU's")
    if answers["prompt_tokens"] != cpu["prompt_tokens"]:
        wrong.append(f"prompts have {answers['prompt_tokens'][:3]} tokens, the CPU's {cpu['prompt_tokens'][:3]}")
    return result | ({"wrong": "; ".join(wrong)} if wrong else {})


def _judged(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The rows; raises `Failed` with them if one is wrong."""
    if wrong := [f"{name}: {row['wrong']}" for name, row in rows.items() if "wrong" in row]:
        raise Failed("\n".join(wrong), rows)
    return dict(rows)


# --- The steps ---


def imports(place: Place) -> dict[str, Any]:
    """Import what serving imports; which operators there are, and what of the plugin's contract is broken."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    from vlmcompress.engines import vllm as ours
    from vlmcompress.engines.vllm.plugin import _contract, register

    rows: dict[str, Any] = {}
    began = time.monotonic()
    for name in IMPORTS:
        try:
            importlib.import_module(f"vllm.{name}")
        except Exception as error:
            rows[name] = {"wrong": f"{type(error).__name__}: {error}"[:300]}
    if current_platform.is_cuda():
        lacking = [name for name in OPERATORS if not hasattr(torch.ops._C, name)]
        rows["operators"] = {"wrong": f"lacks {', '.join(lacking)}"} if lacking else {}
    register()
    folder = Path(vllm.__file__).parent
    broken = [line for part in _contract.PARTS for line in _contract.problems(part, folder)]
    rows["contract"] = {"wrong": "; ".join(broken)} if broken else {}
    rows["plugin"] = {} if ours.installed().plugin else {"wrong": "vLLM finds no plugin of vlmcompress"}
    rows["versions"] = {"vllm": vllm.__version__, "torch": torch.__version__, "platform": current_platform.device_name,
                        "seconds": round(time.monotonic() - began, 1)}  # fmt: skip
    return _judged(rows)


def built(place: Place) -> dict[str, Any]:
    """Make the layers of each checkpoint on the meta device, on this GPU or a pretended one; the kernels that vLLM picks.

    No weight is loaded and nothing is computed. What fails here would fail in every later step. The pretended GPU is a Hopper,
    or of the compute capability in `GPU_VLLM_PRETENDED`.
    """
    import torch

    if not torch.cuda.is_available() and (library := importlib.util.find_spec("vllm._C_stable_libtorch")):
        _pretend(os.environ.get("GPU_VLLM_PRETENDED", "9.0"), Path(str(library.origin)).parent, place.work)
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    from gpu.engine import fits, look, with_reducer
    from vlmcompress.recipe import targets

    on_gpus = current_platform.is_cuda()
    capability = (current_platform.get_device_capability() if on_gpus else None) or (0, 0)
    machine = next(
        (name for name in targets.REGISTRY.names() if targets.get_target(name).capability == tuple(capability)), "cpu"
    )
    every = Path(os.environ[DATA]) / "checkpoints"
    for demo in _some(QUESTIONS, place.tiny):
        with_reducer(every / demo, REDUCERS[demo][0])
    checkpoints = sorted(folder for folder in every.iterdir() if folder.is_dir())
    rows: dict[str, dict[str, Any]] = {"platform": {"cuda": on_gpus, "target": machine}}
    for folder in checkpoints:
        name = folder.name
        try:
            options: dict[str, Any] = {"kv_cache_dtype": "fp8"} if name == "fp8-kv" else {}
            config = EngineArgs(
                model=str(folder), max_model_len=512, enforce_eager=True, **options
            ).create_engine_config()
            with set_current_vllm_config(config):
                if not model_parallel_is_initialized():
                    (place.work / "store").unlink(missing_ok=True)
                    init_distributed_environment(1, 0, f"file://{place.work}/store", 0, "gloo")
                    initialize_model_parallel(1, 1, backend="gloo")
                dtype: Any = config.model_config.dtype  # a name is resolved by now
                with set_default_torch_dtype(dtype), torch.device("meta"):
                    model = initialize_model(config)
        except Exception as error:
            what = "wrong" if name not in FORMATS or _expected(machine, name)[1] else "refused"  # as the target says
            rows[name] = {what: f"{type(error).__name__}: {error}"[:300]}
            continue
        layers = look(model)["layers"]
        kernels = sorted({kernel for kinds in layers.values() for kernel in kinds})
        rows[name] = {"model": f"{type(model).__module__}.{type(model).__name__}", "kernels": kernels}
        if on_gpus and name in FORMATS:
            key, expected = _expected(machine, name)
            rows[name] |= {"format": key, "expected": expected}
            if strange := [kernel for kernel in rows[name]["kernels"] if not fits(str(expected), kernel)]:
                rows[name]["unlike_targets"] = strange
    return _judged(rows)


def _expected(target: str, name: str) -> tuple[str, str | None]:
    """The format of a checkpoint, and the kernel that `recipe.targets` names for it on a target."""
    from vlmcompress.quantization.schemes import REGISTRY
    from vlmcompress.recipe import targets

    method = REGISTRY.get(FORMATS[name]["scheme"])
    key = targets.format_key(method.scheme(method.OPTIONS(**FORMATS[name].get("options", {}))))
    return key, targets.get_target(target).kernel(key)


def _pretend(capability: str, libraries: Path, work: Path) -> None:
    """Make vLLM's wheel for GPUs believe in a GPU of a capability: its libraries load next to a driver that answers nothing.

    torch has to be a build for CUDA. A C compiler makes the driver: every function of it that the libraries name.
    """
    import ctypes

    import triton.backends
    import vllm.platforms

    called = {name for file in libraries.rglob("*.so") for name in re.findall(rb"cu[A-Z]\w+(?=\0)", file.read_bytes())}
    source, driver = work / "libcuda.c", work / "libcuda.so.1"
    no_device = 100
    source.write_text("".join(f"int {name.decode()}() {{ return {no_device}; }}\n" for name in sorted(called)))
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", driver, source], check=True)
    ctypes.CDLL(str(driver), ctypes.RTLD_GLOBAL)
    # vllm/triton_utils/importing.py leaves Triton out unless one driver is active.
    nvidia: Any = triton.backends.backends["nvidia"].driver
    nvidia.is_active = staticmethod(lambda: True)
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    answers = {"get_device_capability": DeviceCapability(*map(int, capability.split("."))), "device_count": 1,
               "get_device_name": "pretended", "get_device_total_memory": 80 * 2**30, "num_compute_units": 128}  # fmt: skip
    methods = {name: classmethod(lambda cls, *_, answer=answer, **__: answer) for name, answer in answers.items()}
    vllm.platforms._current_platform = type("Pretended", (NonNvmlCudaPlatform,), methods)()


def answers(place: Place) -> dict[str, Any]:
    """Compare the demos' BF16 answers with the CPU's."""
    engines = {demo: _started(place, demo) for demo in _some(QUESTIONS, place.tiny)}
    return _judged({demo: compared(finish(), _reference(demo)) for demo, finish in engines.items()})


def formats(place: Place, names: Sequence[str]) -> dict[str, Any]:
    """Load checkpoints, and compare kernels with what `recipe.targets` names and answers with the CPU's."""
    from gpu.engine import fits
    from vlmcompress.recipe import targets

    rows: dict[str, dict[str, Any]] = {}
    machine = targets.get_target(target_here())
    here = [name for name in names if (Path(os.environ[DATA]) / "checkpoints" / name.removesuffix(MARLIN)).exists()]
    for some in _groups(here, place):
        for name, finish in {name: _started(place, name) for name in some}.items():
            row = compared(finish(), _reference(name))
            key, expected = _expected(target_here(), name)
            row |= {"format": key, "expected": expected, "problem": machine.format_problem(key)}
            strange = [kernel for kernel in row.get("kernels", ()) if not fits(str(row["expected"]), kernel)]
            if strange:  # which is news, and no failure: the table is of vLLM 0.32
                row["unlike_targets"] = strange
            rows[name] = row
    return _judged(rows)


def reduced(place: Place) -> dict[str, Any]:
    """Compare the kept tokens, the answers and the lengths of prompts of the demos' reducers with the CPU's."""
    rows = {}
    stored = json.loads((Path(os.environ[DATA]) / "cpu.json").read_text())
    every = [f"{demo} {spec}" for demo, specs in REDUCERS.items() for spec in specs]
    for some in _groups([name for name in every if name in stored][: 2 if place.tiny else None], place):
        for name, finish in {
            name: _started(place, name.partition(" ")[0], name.partition(" ")[2]) for name in some
        }.items():
            outcome, cpu = finish(), _reference(name)
            rows[name] = row = compared(outcome, cpu)
            if "error" in outcome:
                continue
            pairs = list(zip(outcome["kept"], cpu["kept"], strict=True))
            row["kept_alike"] = mean(len({*ours} & {*theirs}) / max(len(ours), len(theirs)) for ours, theirs in pairs)
            if row["kept_alike"] < ALIKE:
                row["wrong"] = f"{row['kept_alike']:.0%} of the kept tokens are the CPU's; {row.get('wrong', '')}"
    return _judged(rows)


def compiled(place: Place) -> dict[str, Any]:
    """CUDA graphs, and torch.compile with them: each as BF16 on a CPU. `served` does without graphs that fail."""
    ways = {"graphs": GRAPHS, "compile": {"mode": 3}}
    ways = {"graphs": {"mode": 0}} if place.tiny else ways
    eager, reference = place.work / "eager", _reference("llava")
    rows = {}
    for name, finish in {
        name: _started(place, "llava", label=f"{name}-", enforce_eager=False, compilation_config=way)
        for name, way in ways.items()
    }.items():
        rows[name] = compared(finish(), reference)
    eager.unlink(missing_ok=True)
    if "wrong" in rows["graphs"]:
        eager.touch()
    return _judged(rows)


def drafts(place: Place) -> dict[str, Any]:
    """Compare BF16 answers with drafted tokens with those without, on a CPU."""
    return _judged(
        {"ngram": compared(_started(place, "llava", label="ngram-", speculative_config=NGRAM)(), _reference("llava"))}
    )


def served(place: Place, scheme: str) -> dict[str, Any]:
    """`engine.serve`, and the tokens that `vlmcompress plan` expects in the same KV cache."""
    from gpu.bare import model
    from gpu.engine import QWEN, serve
    from vlmcompress.engines.vllm.served_model import read_served_model

    flags = ["--enforce-eager"] if (place.work / "eager").exists() else ["--compilation-config", json.dumps(GRAPHS)]
    os.environ["GPU_CHECK_FLAGS"] = json.dumps([] if place.tiny else flags)
    result = serve(place, scheme)
    layers = read_served_model(model(place, QWEN, "full")).decoder.layers(1)
    planned = 4 * 2**30 // sum(layer.token_bytes for layer in layers)  # `engine.servers` gives each 4 GiB
    result |= {"flags": flags, "planned_kv_tokens": planned}
    held = {name: row["kv_tokens"] for name, row in result["kept"].items()}
    if not place.tiny and any(abs(tokens / planned - 1) > 0.02 for tokens in held.values()):
        raise Failed(f"the KV cache holds {held} tokens, and vlmcompress plan expects {planned}", result)
    return result
