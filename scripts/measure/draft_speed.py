#!/usr/bin/env python3
"""Accepted guesses and tokens a second of drafts: none, n-grams, suffixes, Medusa, and EAGLE-3 with and without images.

    scripts/measure/draft_speed.py qwen|llava|smol [-o FOLDER] [--targets bf16 int8 w4 ...] [--prompts 40] [--steps 600]

The model is the demo that describes scenes in 30 to 60 words (`scripts/train/describe_demo.py assemble`), or demo-smol
(`scripts/train/assemble_demo_smol.py`), whose language model goes on from sentences of English prose (`eval/english.py`).
Targets are it, and what `quantize` makes of it in INT8 and in 4 bits, each with all and with half the visual tokens (`-half`).
Drafts are trained for the first target, on its answers to questions of the calibration split, one in six of which are short
ones of the frozen families. Other targets are asked with these drafts as they are, and with ones that `draft --from` aligned in
a tenth of the steps. All that is made and the figures of a target are kept in FOLDER (default: build/draft-speed), and not made
again.

Questions are of the validation split. For a target all engines are up at once, on one thread each, and are asked one question
after the other in turn, batch 1, greedily, in the target's own type; a second round asks them in float32, where rounding
decides nothing, and there all answers have to be those without a draft. Seconds are of the processor, of the engine's own
process; `decoded_per_second` is without the prompts' steps, `step_ms` a mean step behind these, of which `draft_ms` is drafting
and the rest, but for `none`, verifying. The last line is one JSON object.
"""

import argparse
import base64
import json
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyarrow as pa
import pyarrow.parquet as pq

from eval.demo.smol.data import prose
from eval.english import paragraphs
from eval.world.describing import description_rows
from eval.world.freeze import SCHEMA
from eval.world.rows import split_rows
from vlmcompress import engines
from vlmcompress.cli import main as vlmcompress
from vlmcompress.engines import Answer, Request
from vlmcompress.export.draft_folder import Draft
from vlmcompress.recipe import resolve
from vlmcompress.training.draft import ALIGNING, DraftTraining, draft
from vlmcompress.training.draft_lessons import Lessons

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
BLOCK = 32  # the least of vLLM's CPU build
TARGETS = {
    "bf16": [],
    "int8": ["--scheme", "int8"],
    "w4": ["--scheme", "gptq-plus", "--group-size", "32"],
    "bf16-half": ["--scheme", "none", "--reduce", "divprune:0.5"],
    "int8-half": ["--scheme", "int8", "--reduce", "divprune:0.5"],
    "w4-half": ["--scheme", "gptq-plus", "--group-size", "32", "--reduce", "divprune:0.5"],
}
DRAFTS: dict[str, dict[str, Any]] = {
    "text": {"images": "none", "block_size": BLOCK},
    "vector": {"images": "none", "image_vector": True, "block_size": BLOCK},
    "hidden": {},
    "all": {"images": "all", "block_size": BLOCK},
    "vision": {"images": "divprune:0.25", "image_vector": True, "block_size": BLOCK},
    "medusa": {"kind": "medusa"},
}
ALONE: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 3},
}


def made(folder: Path, *arguments: Any) -> Path:
    """A folder that a verb of ours writes, if it is not there."""
    if not folder.is_dir() and vlmcompress([str(part) for part in (*arguments, "-o", folder)]) != 0:
        raise SystemExit(f"{folder} was not made")
    return folder


def questions(work: Path, variant: str, split: str, count: int) -> Path:
    """A file of questions: descriptions, of "prose" English, and in calibration one in six of the frozen families."""
    file = work / f"{split}-{variant}-{count}.parquet"
    if not file.is_file():
        short = count // 6 if split == "calibration" else 0
        if variant == "prose":
            rows = [prose(split, number, text) for number, text in enumerate(paragraphs(split)[: count - short])]
        else:
            rows = description_rows(split, variant, count - short)
        if short:
            rows += split_rows(split, "qwen" if variant == "qwen" else "llava")[:short]
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), file)
    return file


def target_of(work: Path, source: Path, name: str, data: Path) -> Path:
    """The checkpoint of a target."""
    if name == "bf16":
        return source
    calib = [] if TARGETS[name][1] == "none" else ["--calib", data, "--samples", 64]
    return made(work / name, "quantize", source, *TARGETS[name], *calib)


@dataclass
class Kept:
    """Answers that vLLM gave once, in the place of an engine."""

    file: Path
    name: str = "vllm"
    local: bool = True

    def answer(self, model: Path, requests: list[Request], *, on_answer: Any, media: Any = None, **options: Any) -> Any:
        """Give the answers of the file; what it lacks vLLM answers, and it is kept there."""
        kept = json.loads(self.file.read_text()) if self.file.is_file() else {}
        lacking = [request for request in requests if request.id not in kept]
        if lacking:
            run = engines.get("vllm").answer(model, lacking, media=media, **options)
            kept |= {name: answer.text for name, answer in run.answers.items()}
            self.file.write_text(json.dumps(kept))
        for request in requests:
            on_answer(Answer(request.id, kept[request.id], "stop", 0, 0))


def trained(
    folder: Path, target: Path, data: Path, args: argparse.Namespace, flags: dict[str, Any], base: Path | None
) -> Path:
    """The folder of a draft head for `target`, trained if it is not there; `base`: the one to begin with."""
    if not folder.is_dir():
        steps, every = (args.steps, 50) if base is None else (max(1, args.steps // 10), 10)
        values = {"data": str(data), "samples": args.samples}
        recipe = resolve({"model": str(target), "out": str(folder), "scheme": "none", "calibrate": values}).recipe
        settings = {"vocabulary": args.vocabulary} if base is None else {"lr": ALIGNING}
        training = DraftTraining(steps=steps, every=every, answer_tokens=args.answer, **settings, **flags)
        answers = Kept(folder.parent / f"answers-{target.name}.json")
        began = time.process_time()
        facts = draft(recipe, training, base=base and Draft.of(base), engine=answers, resume=True)
        print(
            json.dumps({"draft": folder.name, "seconds": round(time.process_time() - began), **facts["acceptance"]}),
            flush=True,
        )
    return folder


def remembered() -> None:
    """Have each sample's lesson computed once in a process: these trainings see few samples many times."""
    compute = Lessons.lesson

    def lesson(lessons: Lessons, index: int) -> Any:
        memory = vars(lessons).setdefault("memory", {})
        if index not in memory:
            memory[index] = compute(lessons, index)
        return memory[index]

    Lessons.lesson = lesson  # type: ignore[method-assign]


def engine(pipe: Any, model: Path, setting: dict[str, Any] | None, dtype: str, most: int) -> None:
    """A process with an engine: a prompt comes, an answer of at most `most` tokens, seconds and counts go."""
    from vllm import LLM, SamplingParams

    try:
        llm = LLM(
            str(model),
            dtype=dtype,
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=4,
            max_num_batched_tokens=1024,
            limit_mm_per_prompt={"image": 2},
            speculative_config=setting,
            block_size=BLOCK,
            enable_prefix_caching=False,
            disable_log_stats=False,
        )
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}"[:300])
        return
    pipe.send(None)
    drafter = getattr(llm.llm_engine.model_executor.driver_worker.worker.model_runner, "drafter", None)
    steps, proposals = timed(llm.llm_engine, "step"), timed(drafter, "propose") if drafter else []
    sampling = SamplingParams(max_tokens=most, temperature=0)
    while (prompt := pipe.recv()) is not None:
        steps.clear(), proposals.clear()
        before, wall, seconds = counted(llm), time.perf_counter(), time.process_time()
        (output,) = llm.chat([prompt], sampling, use_tqdm=False)
        spent = time.process_time() - seconds, time.perf_counter() - wall
        after = counted(llm)
        counts = [now - then for now, then in zip(after, before or [0] * len(after), strict=True)]
        behind = [len(steps) - 1, sum(steps[1:]), sum(proposals[1:])]  # the first step has the prompt
        pipe.send((list(output.outputs[0].token_ids), *spent, counts, behind))


def timed(part: Any, name: str) -> list[float]:
    """A list to which the processor time of each call of a method is added from now on."""
    method, seconds = getattr(part, name), list[float]()

    def timing(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        result = method(*args, **kwargs)
        seconds.append(time.process_time() - began)
        return result

    setattr(part, name, timing)
    return seconds


def counted(llm: Any) -> list[int]:
    """vLLM's counts so far: steps with a draft, and accepted guesses by position."""
    metrics = {metric.name: metric for metric in llm.get_metrics() if "spec_decode" in metric.name}
    if "vllm:spec_decode_num_drafts" not in metrics:
        return []
    places = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return [metrics["vllm:spec_decode_num_drafts"].value, *places]


def asked(
    model: Path, settings: dict[str, Any], prompts: list[Any], dtype: str, most: int
) -> dict[str, dict[str, Any]]:
    """Ask all engines in turn; name -> figures, or why it did not start."""
    context = multiprocessing.get_context("fork")
    engines, figures = {}, {}
    for name, setting in settings.items():
        ours, theirs = context.Pipe()
        process = context.Process(target=engine, args=(theirs, model, setting, dtype, most), daemon=True)
        process.start()
        theirs.close()
        try:
            problem = ours.recv()
        except EOFError:
            problem = "the process ended"
        if problem:
            figures[name] = {"problem": problem}
        else:
            engines[name] = ours, process
    answers: dict[str, list[Any]] = {name: [] for name in engines}
    names = list(engines)
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first question twice, to warm up
        for name in names[number % len(names) :] + names[: number % len(names)]:
            engines[name][0].send(prompt)
            answers[name].append(engines[name][0].recv())
    for pipe, process in engines.values():
        pipe.send(None)
        process.join(60)
    expected = [answer[0] for answer in answers["none"]]
    for name, (_, *rest) in answers.items():
        tokens = sum(len(answer[0]) for answer in rest)
        steps, step_seconds, draft_seconds = (
            sum(column) for column in zip(*(answer[4] for answer in rest), strict=True)
        )
        drafts, *places = [sum(column) for column in zip(*(answer[3] for answer in rest), strict=True)] or [0]
        figures[name] = {
            "tokens": tokens,
            "per_second": round(tokens / sum(answer[1] for answer in rest), 2),
            "per_second_wall": round(tokens / sum(answer[2] for answer in rest), 2),
            "decoded_per_second": round((tokens - len(rest)) / step_seconds, 2),
            "step_ms": round(1000 * step_seconds / steps, 2),
            "draft_ms": round(1000 * draft_seconds / steps, 2),
            "same": sum(answer[0] == other for answer, other in zip(rest, expected[1:], strict=True)),
            **({"by_position": [round(place / drafts, 4) for place in places]} if drafts else {}),
            **(
                {"accepted": round(sum(places) / drafts, 3), "length": round(1 + sum(places) / drafts, 3)}
                if drafts
                else {}
            ),
        }
    return figures


def prompts_of(file: Path) -> list[Any]:
    """Conversations for `LLM.chat`."""
    prompts = []
    for row in pq.read_table(file).to_pylist():
        urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in row["image"]]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        prompts.append([{"role": "user", "content": [*content, {"type": "text", "text": row["question"]}]}])
    return prompts


def measured(
    name: str, folder: Path, settings: dict[str, Any], prompts: list[Any], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The figures of a target, a row a draft."""
    figures = asked(folder, settings, prompts, "auto", args.answer)
    precise = asked(folder, settings, prompts[: args.exact], "float32", args.answer) if args.exact else {}
    rows = []
    for kind, figure in figures.items():
        rows.append({"target": name, "draft": kind, **figure, "same_float32": precise.get(kind, {}).get("same")})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("qwen", "llava", "smol"))
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build/draft-speed")
    parser.add_argument(
        "--source", type=Path, help="the checkpoint; default: build/demo-MODEL-describe, build/demo-smol"
    )
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=list(DRAFTS))
    parser.add_argument("--align", nargs="*", choices=DRAFTS, help="drafts to align to the other targets; default: all")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--samples", type=int, default=600, help="questions to train on; a tenth is held out")
    parser.add_argument("--answer", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--vocabulary", type=int, default=32000, help="most tokens that a draft can guess")
    parser.add_argument("--exact", type=int, default=12, help="questions asked in float32, too")
    parser.add_argument("--train", action="store_true", help="make targets and drafts, ask nothing")
    args = parser.parse_args()
    remembered()
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    work, variant = args.output / args.model, {"smol": "prose"}.get(args.model, args.model)
    work.mkdir(parents=True, exist_ok=True)
    source = args.source or ROOT / ("build/demo-smol" if args.model == "smol" else f"build/demo-{args.model}-describe")
    data, validation = (
        questions(work, variant, *part) for part in (("calibration", args.samples), ("validation", args.prompts))
    )
    about = {"prompts": args.prompts, "exact": args.exact, "steps": args.steps, "drafts": args.drafts}
    rows = []
    for target in args.targets:
        folder, settings = target_of(work, source, target, data), dict(ALONE)
        for name in args.drafts:
            first = trained(work / f"draft-{name}", source, data, args, DRAFTS[name], None)
            settings[name] = Draft.of(first).speculative_config()
            if target != "bf16" and name in (args.drafts if args.align is None else args.align):
                aligned = trained(work / f"draft-{name}-{target}", folder, data, args, {}, first)
                settings[f"{name}, aligned"] = Draft.of(aligned).speculative_config()
        if args.train:
            continue
        import vllm.entrypoints.llm  # noqa: F401, once, for all that are forked

        file = work / f"figures-{target}.json"
        if not file.is_file() or json.loads(file.read_text())["about"] != about:
            figures = measured(target, folder, settings, prompts_of(validation), args)
            file.write_text(json.dumps({"about": about, "rows": figures}))
        rows += json.loads(file.read_text())["rows"]
    print(json.dumps({"model": args.model, **about, "rows": rows}))


if __name__ == "__main__":
    main()
