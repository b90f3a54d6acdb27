"""Drive llm-compressor's sequential pipeline, for its own modifiers and those that rest on them.

It cuts the model into one subgraph per decoder block and runs the calibration set through each, sample by sample. Our own
passes over the blocks (`calibration.capture`) do without it. The modality of each token travels in the field that
llm-compressor calls `loss_mask`.
"""

from __future__ import annotations

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers import Modifier
from torch import Tensor
from torch.utils.data import DataLoader

from vlmcompress.models import VLM


def alike(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Give every batch the same keys, as the pipeline traces the model once, with the first batch.

    A sample without an image gets the shortest sample with one appended, as tokens to ignore: attention is causal, so the
    text before them is computed as if they weren't there, and statistics leave them out.
    """
    donors = [batch for batch in batches if "pixel_values" in batch]
    if len(donors) in (0, len(batches)):
        return batches
    donor = min(donors, key=lambda batch: batch["input_ids"].shape[1])
    length = donor["input_ids"].shape[1]

    def extend(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        tail = {**donor, "modality": torch.zeros_like(donor["modality"])}
        appended = {
            key: torch.cat([value, tail[key]], 1) for key, value in batch.items() if tail[key].shape == (1, length)
        }
        return tail | appended

    return [batch if "pixel_values" in batch else extend(batch) for batch in batches]


def loader(batches: list[dict[str, Tensor]]) -> DataLoader:
    """Load samples from `encode` as llm-compressor takes them: all with the same keys, modalities as `loss_mask`."""
    items = [{**{k: v for k, v in b.items() if k != "modality"}, "loss_mask": b["modality"]} for b in alike(batches)]
    return DataLoader(items, batch_size=1, collate_fn=lambda rows: rows[0])  # type: ignore[arg-type]


def run_oneshot(vlm: VLM, batches: list[dict[str, Tensor]], recipe: list[Modifier], layer_class: str) -> None:
    """Run the calibration set through llm-compressor's sequential pipeline.

    Args:
        batches: from `encode`: the processor's tensors plus `modality [1, tokens]`; one sample each.
        recipe: the modifiers to run.
        layer_class: class name of a decoder block.
    """
    oneshot(
        model=vlm.model,
        processor=vlm.processor,
        recipe=recipe,
        dataset=loader(batches),
        num_calibration_samples=len(batches),
        sequential_targets=[layer_class],
        use_loss_mask=True,
        pipeline="sequential",
    )
