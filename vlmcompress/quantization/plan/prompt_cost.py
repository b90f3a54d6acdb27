"""Cost of a prompt with images, before and after a reducer, from a model's config and processor alone: no weights are read.

Visual tokens are those that the processor puts into a prompt with images of these sizes (`visual_count`). The cost is that of
the language model's prefill (`roofline.decoder_work`) and cache; the encoder's is not in it. No reducer lowers that; `resize`
does. A recurrent block's state, which does not grow with the prompt, is not counted as cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from vlmcompress.engines.vllm.served_model import Attention, describe
from vlmcompress.models import VLM, Layout, build_meta_model, load_processor, read_config, spec_for
from vlmcompress.models.data.encode import encode_prompt
from vlmcompress.models.data.samples import Sample
from vlmcompress.quantization.plan import roofline
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.hooks import resizing
from vlmcompress.reduction.resize import Resize
from vlmcompress.reduction.support import require_reducer
from vlmcompress.reduction.visual_count import Counted, kept_tokens, layouts_of, per_block
from vlmcompress.utils.errors import UserError


@dataclass(frozen=True)
class Cost:
    """Cost of one prompt. `visual`: tokens after the last stage that drops any; `kv_bytes`: of visual tokens alone.

    blocks: visual tokens in each decoder block.
    """

    visual: int
    prompt: int
    multiply_adds: int
    kv_bytes: int
    kv_bytes_prompt: int
    blocks: tuple[int, ...]

    @property
    def differs(self) -> bool:
        """Whether blocks have different numbers of visual tokens."""
        return len(set(self.blocks)) > 1


@dataclass(frozen=True)
class Planned:
    """Costs of one prompt. `reduced`: cost by reducer, None for one whose count depends on the image's content."""

    family: str
    layouts: tuple[Layout, ...]
    text: int
    context: int | None
    text_only: Cost
    full: Cost
    reduced: dict[str, Cost | None]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The costs as JSON data."""
        images = [
            {"tokens": layout.tokens, "pieces": [[p.rows, p.columns] for p in layout.pieces]} for layout in self.layouts
        ]
        return {
            "family": self.family,
            "images": images,
            "text": self.text,
            "context": self.context,
            "text_only": asdict(self.text_only),
            "full": asdict(self.full),
            "reduced": {name: cost and asdict(cost) for name, cost in self.reduced.items()},
            "notes": list(self.notes),
        }


class Decoder:
    """What a prompt costs in a model's decoder. `itemsize`: bytes of one number in its cache."""

    def __init__(self, meta_model: Any, itemsize: int):
        self.decoder, self.itemsize = describe(meta_model), itemsize
        self.blocks = roofline.blocks(meta_model, self.decoder)

    def cost(self, visual: Sequence[int], text: int) -> Cost:
        """Compute the cost of a prompt with `text` text tokens and, in each block, `visual` visual ones."""
        cache = of_text = 0
        for block, count in zip(self.decoder.blocks, visual, strict=True):
            if isinstance(block, Attention):
                token_bytes = block.token_bytes(self.itemsize)
                window = block.window or count + text
                cache += token_bytes * min(count + text, window)
                of_text += token_bytes * min(text, window)
        work = sum(roofline.decoder_work(self.blocks, [count + text for count in visual]))
        return Cost(visual[-1], visual[-1] + text, work, cache - of_text, cache, tuple(visual))


def prompt_costs(
    path: str | Path,
    sizes: Sequence[tuple[int, int]],
    question: str,
    chosen: Sequence[ReducerChoice],
    kv_bytes: int | None = None,
    resize: Resize | None = None,
) -> Planned:
    """Compute the costs of one prompt with images of these sizes.

    Args:
        path: folder with config.json and the processor's files.
        sizes: `(width, height)` of each image.
        question: text after the images; the chat template adds more.
        kv_bytes: bytes of one number in the cache; None: those of the model's type.
        resize: images made smaller, alone and before each of the reducers; a share of it is measured on these sizes.
    """
    spec = spec_for(read_config(path, weights=False))
    model, processor = build_meta_model(path, weights=False), load_processor(path)
    vlm = VLM(model, processor, spec, Path(path))
    for reducer in chosen:
        try:
            require_reducer(vlm, reducer)
        except UserError as error:
            raise UserError(f"--reduce {reducer}: {error}") from error
    counted = Counted(layouts_of(spec, processor, sizes), None, 0, (), 0)
    blank = [Image.new("RGB", size, "gray") for size in sizes]
    inputs = encode_prompt(Sample("prompt", blank, question, origin="the prompt"), vlm)["input_ids"][0]
    visual = int((inputs == getattr(model.config, spec.image_token)).sum())
    if visual != counted.tokens:
        raise UserError(f"the processor in {path} makes {visual} visual tokens where its settings say {counted.tokens}")
    text = len(inputs) - visual
    decoder = Decoder(model, kv_bytes or model.dtype.itemsize)
    count = len(decoder.blocks)
    costs: dict[str, Cost | None] = {}
    stages = [("", counted)]  # images as they are, and as `resize` makes them
    if resize is not None:
        settled = resizing.settle(spec, processor, [tuple(sizes)], resize)
        smaller = resizing.resized(vlm, settled)
        stages.append((str(settled), Counted(layouts_of(smaller.spec, smaller.processor, sizes), None, 0, (), 0)))
    for label, stage in stages:
        if label:
            costs[label] = decoder.cost([stage.tokens] * count, text)
        for reducer in chosen:
            left = kept_tokens(stage, reducer, spec)
            name = f"{label} + {reducer}" if label else str(reducer)
            costs[name] = None if left is None else decoder.cost(per_block(stage, left, reducer, count), text)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    notes = sorted(
        {f"{reducer}: {note}" for reducer in chosen for layout in counted.images for note in too_small(reducer, layout)}
    )
    if context and text + counted.tokens > context:
        notes.append(f"the prompt has {text + counted.tokens:,} tokens, the model's context {context:,}")
    if resize is None and (note := resizing.ceiling_note(spec, processor)):
        notes.append(note)
    full, without = (decoder.cost([visual] * count, text) for visual in (counted.tokens, 0))
    return Planned(spec.family, counted.images, text, context, without, full, costs, tuple(notes))


def too_small(chosen: ReducerChoice, layout: Layout) -> list[str]:
    """List the grids of an image that are kept whole because the kept share of them would round to no token."""
    grids = sorted({grid[1:] for grid, _ in layout.grids() if chosen.too_small(grid)})
    return [
        f"the share is less than one token of a {rows}x{columns} grid, which is kept whole" for rows, columns in grids
    ]
