"""One model under test, quantized by one method after another, for `compare_weights.py`.

A bench has the model's folder, the samples that calibrate it, and what it says in 16 bits
on English texts and on questions about images; `quantized` makes a model by a method, and `Bench.measure` compares it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyarrow as pa
import pyarrow.parquet as pq
import teacher_forcing
import text_probe
import torch
from weight_methods import Grid, Row

from eval import english
from vlmcompress import models
from vlmcompress.models import VLM
from vlmcompress.models.data import Sample, bundled_data, encode, load_samples
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve


class Bench:
    """A model under test: its folder, a split's texts and questions, and what it says to them in 16 bits."""

    def __init__(self, source: Path, split: str, args: argparse.Namespace):
        self.args, self.folder, self.name, self.work, self.split = args, source, source.name, args.work, split
        self.world = bundled_data(source, "calibration")
        self.questions: list[Sample] = chosen(source, split, args.questions) if self.world else []
        self.plain = models.load(self.folder)
        self.english = text_probe.speaks(self.plain)

    @cached_property
    def texts(self) -> text_probe.Reference | None:
        """The model in 16 bits on English; None where it knows none."""
        if not self.english:
            return None
        path = self.work / "reference" / f"{self.name}-{self.split}-{self.args.paragraphs}-texts.pt"
        texts = english.paragraphs(self.split)[: self.args.paragraphs]

        def make() -> text_probe.Reference:
            vlm = models.load(self.folder)
            return text_probe.reference(vlm, text_probe.tokenized(vlm, texts))

        return teacher_forcing.cached(path, make)

    @cached_property
    def reference_answers(self) -> tuple[list[teacher_forcing.Rows], tuple[torch.Tensor, ...]] | None:
        """The world's questions as inputs of the language model, and what it says to them in 16 bits."""
        if not self.questions:
            return None
        path = self.work / "reference" / f"{self.name}-{self.split}-{self.args.questions}-questions.pt"

        def make() -> tuple[list[teacher_forcing.Rows], tuple[torch.Tensor, ...]]:
            vlm = models.load(self.folder)
            rows = teacher_forcing.pack(teacher_forcing.encode_questions(vlm, self.questions))
            return rows, teacher_forcing.predictions(vlm, rows)

        return teacher_forcing.cached(path, make)

    @cached_property
    def data(self) -> Path:
        """The file with the samples that calibrate every method, llm-compressor's, too; written anew.

        llm-compressor's pipeline wants the same keys of every sample. So each has an image of the world and its question, where
        there is a world, and after that a paragraph of English in the same conversation, where the model knows it.
        """
        rows = pq.read_table(self.world).to_pylist() if self.world else []
        samples = [
            {"id": row["id"], "image": row["image"], "messages": _turns(row["question"], row["answer"])}
            for row in rows
            if row["image"]
        ]
        if self.english:
            # The first sentence asks, the rest answers, so that methods that read answers can.
            texts = [_turns(*english.halves(text)) for text in english.paragraphs("calibration")]
            samples = samples or [{"id": f"english-{k:04d}", "messages": []} for k in range(len(texts))]
            pairs = zip(samples, texts, strict=False)  # the shorter of the two ends it
            samples = [sample | {"messages": [*sample["messages"], *turns]} for sample, turns in pairs]
        path = self.work / f"{self.name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(samples), path)
        return path

    def recipe_keys(self, out: Path, seed: int) -> dict[str, Any]:
        """The keys of a recipe that all methods share."""
        samples: dict[str, Any] = {"data": str(self.data), "samples": self.args.samples}
        return {"model": str(self.folder), "out": str(out), "seed": seed, "calibrate": samples}

    def samples(self, seed: int) -> list[dict[str, torch.Tensor]]:
        """The calibration samples, encoded."""
        return list(encode(load_samples(self.data, samples=self.args.samples, seed=seed), self.plain))

    def measure(self, vlm: VLM) -> dict[str, torch.Tensor]:
        """Measure a quantized model: `text/NAME [texts]` and `answers/NAME [questions]`."""
        values_by_name: dict[str, torch.Tensor] = {}
        if self.texts is not None:
            values_by_name |= {f"text/{name}": values for name, values in text_probe.compare(vlm, self.texts).items()}
        if self.reference_answers is not None:
            rows, (original, label, question) = self.reference_answers
            if not _same_inputs(vlm, self.plain):  # e.g. a rotated one: it reads other embeddings
                rows = teacher_forcing.pack(teacher_forcing.encode_questions(vlm, self.questions))
            logits, *_ = teacher_forcing.predictions(vlm, rows)
            measures = teacher_forcing.measure(original, logits, label, question)
            values_by_name |= {f"answers/{name}": values for name, values in measures.items()}
        return values_by_name


def _turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _same_inputs(quantized: VLM, other: VLM) -> bool:
    """Whether what enters the language model is the same in both."""
    spec, parts = quantized.spec, (quantized.model.get_input_embeddings(), other.model.get_input_embeddings())
    pairs = [tuple(part.weight for part in parts)]
    for name in (*spec.vision, *spec.projector):
        mine, others = (dict(vlm.model.get_submodule(name).named_parameters()) for vlm in (quantized, other))
        pairs += [(mine[key], others[key]) for key in others if key in mine]
    return all(torch.equal(a.float(), b.float()) for a, b in pairs)


def quantized(bench: Bench, grid: Grid | None, row: Row, seed: int) -> tuple[VLM, dict[str, Any]]:
    """Quantize the model by a method, and say how long that took.

    Args:
        grid: the number format; None: that of the row's own options.
    """
    if row.kind == "stock":
        return _stock(bench, grid, row, seed)
    out = bench.work / "checkpoint"
    keys = bench.recipe_keys(out, seed) | row.recipe_in(grid)
    facts: dict[str, Any] = {}
    if row.data_free:
        keys.pop("calibrate")
    start = time.process_time()
    manifest = quantize(resolve(keys).recipe, overwrite=True, restart=True).manifest
    facts |= {"seconds": round(time.process_time() - start, 1), "phases": manifest.get("timing")}
    facts |= {"bytes": manifest["size"]["weights_after"], "bytes_before": manifest["size"]["weights_before"]}
    vlm = teacher_forcing.load_quantized(out, bench.plain)
    shutil.rmtree(out)
    return vlm, facts


def _stock(bench: Bench, grid: Grid | None, row: Row, seed: int) -> tuple[VLM, dict[str, Any]]:
    """Quantize the model by llm-compressor, in place: in float32, as CPUs multiply BF16 four times as slowly."""
    from stock_methods import run_stock

    vlm = models.load(bench.folder)
    vlm.model.float()
    start = time.process_time()
    run_stock(vlm, bench.samples(seed), row.scheme, **(grid.options if grid else {}))
    return vlm, {"seconds": round(time.process_time() - start, 1)}


def chosen(model: Path, split: str, per_family: int | None) -> list[Sample]:
    """Choose the first `per_family` questions of each family of a split."""
    samples = load_samples(bundled_data(model, split), samples=None, seed=0, decode_images=False)
    counts: dict[str, int] = {}
    kept = []
    for sample in samples:
        counts[sample.family] = 1 + counts.get(sample.family, 0)
        if per_family is None or counts[sample.family] <= per_family:
            kept.append(sample)
    return kept
