"""Cost of images for a model, before and after a reducer, from its config and processor alone: no weights are read.

Visual tokens are those that the processor puts into a prompt with images of these sizes. The cost is that of the language
model's prefill and cache; the encoder's is not in it. No reducer lowers that; `resize` does.

    multiply-adds of a block for n tokens: n * (entries of its linear layers) + 2 * (width of the queries) * pairs(n)
    pairs(n): of a token and one that it attends to, n (n + 1) / 2, fewer where the attention slides

Of a mixture's experts those count that a token is sent to. What a short convolution or a recurrent state takes beside its
linear layers is left out: it grows with n as they do and is small beside them, and their states do not grow.

A method within the language model leaves the blocks before the first at which it drops tokens as they are. A sliding block
caches its window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import nn

from vlmcompress.data.encode import encode_prompt
from vlmcompress.data.samples import Sample
from vlmcompress.errors import UserError
from vlmcompress.hf_hooks import resizing
from vlmcompress.hf_hooks.support import check, chooses_images
from vlmcompress.hf_hooks.views import tokens_left
from vlmcompress.models import VLM, Layout, build_meta_model, decoder_layers, load_processor, read_config, spec_for
from vlmcompress.recipe.reducer import ReducerChoice
from vlmcompress.recipe.resize import Resize

LARGEST = 50_000_000  # pixels of an image; a blank one of that size is given to the processor


@dataclass(frozen=True)
class Block:
    """A decoder block: entries of its linear layers, width of its queries, of keys and values together, and its window."""

    entries: int
    queries: int
    cached: int
    window: int | None


@dataclass(frozen=True)
class Cost:
    """Cost of one prompt. `visual`: tokens behind the last stage that drops any; `kv_bytes`: of visual tokens alone.

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
        costs = {name: cost and asdict(cost) for name, cost in self.reduced.items()}
        rest = {"family": self.family, "images": images, "text": self.text, "context": self.context}
        return (
            rest
            | {"text_only": asdict(self.text_only), "full": asdict(self.full), "reduced": costs}
            | {"notes": list(self.notes)}
        )


def plan(
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
        question: text behind the images; the chat template adds its own.
        kv_bytes: bytes of one number in the cache; None: those of the model's own type.
        resize: images made smaller, alone and before each of the reducers; a share of it is measured on these sizes.
    """
    spec = spec_for(read_config(path, weights=False))
    model, processor = build_meta_model(path, weights=False), load_processor(path)
    vlm = VLM(model, processor, spec, Path(path))
    for reducer in chosen:
        try:
            check(vlm, reducer)
        except UserError as error:
            raise UserError(f"--reduce {reducer}: {error}") from error
    layouts = tuple(_layout(vlm, size, len(sizes)) for size in sizes)
    visual = sum(layout.tokens for layout in layouts)
    text = _prompt_tokens(vlm, sizes, question) - visual
    decoder = blocks(vlm)
    width = kv_bytes or model.dtype.itemsize
    # Of tokens that merge within tiles it is not known beforehand which lie in what is cut off.
    tiled = spec.visual_grid == "anyres"
    costs: dict[str, Cost | None] = {}
    for label, stage in _stages(vlm, sizes, layouts, resize):
        if label:
            costs[label] = cost(decoder, [sum(layout.tokens for layout in stage)] * len(decoder), text, width)
        for reducer in chosen:
            name = f"{label} + {reducer}" if label else str(reducer)
            costs[name] = (
                None if tiled and hasattr(reducer.module, "merge") else _reduced(decoder, stage, text, reducer, width)
            )
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    notes = sorted(
        {f"{reducer}: {note}" for reducer in chosen for layout in layouts for note in too_small(reducer, layout)}
    )
    if context and text + visual > context:
        notes.append(f"the prompt has {text + visual:,} tokens, the model's context {context:,}")
    full, without = (cost(decoder, [count] * len(decoder), text, width) for count in (visual, 0))
    return Planned(spec.family, layouts, text, context, without, full, costs, tuple(notes))


def _stages(
    vlm: VLM, sizes: Sequence[tuple[int, int]], layouts: tuple[Layout, ...], resize: Resize | None
) -> list[tuple[str, tuple[Layout, ...]]]:
    """Images as they are, with an empty label, and as `resize` makes them."""
    stages = [("", layouts)]
    if resize is not None:
        settled = resizing.settle(vlm.spec, vlm.processor, [tuple(sizes)], resize)
        smaller = resizing.resized(vlm, settled)
        stages.append((str(settled), tuple(_layout(smaller, size, len(sizes)) for size in sizes)))
    return stages


def too_small(chosen: ReducerChoice, layout: Layout) -> list[str]:
    """List the grids of an image that are kept whole because the kept share of them would round to no token."""
    grids = sorted({grid[1:] for grid, _ in layout.grids() if chosen.too_small(grid)})
    return [
        f"the share is less than one token of a {rows}x{columns} grid, which is kept whole" for rows, columns in grids
    ]


def blocks(vlm: VLM) -> list[Block]:
    """Describe the decoder's blocks."""
    config = vlm.model.config.get_text_config()
    names = decoder_layers(vlm.model, vlm.spec)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(names)
    blocks = []
    for name, kind in zip(names, kinds, strict=True):
        block = vlm.model.get_submodule(name)
        width = {part: 0 for part in ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj")}
        for key, module in block.named_modules():
            if isinstance(module, nn.Linear) and (part := key.rpartition(".")[2]) in width:
                width[part] = module.in_features if part in ("o_proj", "out_proj") else module.out_features
        # What leaves attention is as wide as its queries; `q_proj` may hold an output gate as well.
        queries = (width["o_proj"] or width["out_proj"]) if width["q_proj"] else 0
        window = config.sliding_window if kind == "sliding_attention" else None
        values = width["v_proj"] or width["k_proj"]  # or keys are values
        blocks.append(Block(_entries(vlm, block), queries, width["k_proj"] + values, window))
    return blocks


def _entries(vlm: VLM, block: nn.Module) -> int:
    """Entries of a block's linear layers, of a mixture's experts those that a token is sent to, and its router's."""
    spec = vlm.spec
    everything = dict(block.named_modules())
    linears = {name: module.weight.numel() for name, module in everything.items() if isinstance(module, nn.Linear)}
    if not spec.experts or spec.experts not in everything:
        return sum(linears.values())
    experts: Any = everything[spec.experts]
    of_experts = sum(count for name, count in linears.items() if name.startswith(f"{spec.experts}."))
    others = sum(linears.values()) - of_experts
    if spec.router is not None and spec.router not in linears:
        router: Any = everything[spec.router]
        others += router.weight.numel()
    return others + of_experts // len(experts) * vlm.model.config.get_text_config().num_experts_per_tok


def cost(blocks: Sequence[Block], visual: Sequence[int], text: int, itemsize: int) -> Cost:
    """Compute the cost of a prompt with `text` text tokens and, in each block, `visual` visual ones."""
    work = cache = of_text = 0
    for block, count in zip(blocks, visual, strict=True):
        n = count + text
        window = min(n, block.window or n)
        work += n * block.entries + 2 * block.queries * (window * (window + 1) // 2 + (n - window) * window)
        cache += block.cached * window * itemsize
        of_text += block.cached * min(text, window) * itemsize
    return Cost(visual[-1], visual[-1] + text, work, cache - of_text, cache, tuple(visual))


def _reduced(
    blocks: Sequence[Block], layouts: Sequence[Layout], text: int, chosen: ReducerChoice, itemsize: int
) -> Cost | None:
    """Compute the cost with a reducer; None when its counts are not known beforehand."""
    full = sum(layout.tokens for layout in layouts)
    if chooses_images(chosen.module):
        if len({layout.tokens for layout in layouts}) > 1:
            return None
        return cost(blocks, [tokens_left(full, len(layouts), chosen)] * len(blocks), text, itemsize)
    grids = [grid for layout in layouts for grid, _ in layout.grids()]
    left = [chosen.left(grid, len(blocks)) for grid in grids]
    newlines = full - sum(math.prod(grid) for grid in grids)
    counts = [count for count in left if count is not None]
    if len(counts) < len(left):
        return None
    return cost(blocks, [newlines + sum(block) for block in zip(*counts, strict=True)], text, itemsize)


def _layout(vlm: VLM, size: tuple[int, int], images: int) -> Layout:
    width, height = size
    if width * height > LARGEST:
        raise UserError(
            f"--image-size {width}x{height} is {width * height / 1e6:.1f} Mpx, more than {LARGEST / 1e6:.0f}"
        )
    try:
        return vlm.spec.layout(vlm.processor, width, height, images)
    except ValueError as error:
        raise UserError(f"--image-size {width}x{height}: the model's processor refuses it ({error})") from error


def _prompt_tokens(vlm: VLM, sizes: Sequence[tuple[int, int]], question: str) -> int:
    """Count the tokens of a prompt with blank images."""
    blank = [Image.new("RGB", size, "gray") for size in sizes]
    inputs = encode_prompt(Sample("prompt", blank, question, origin="the prompt"), vlm)["input_ids"][0]
    visual = int((inputs == getattr(vlm.model.config, vlm.spec.image_token)).sum())
    expected = sum(vlm.spec.layout(vlm.processor, *size, len(sizes)).tokens for size in sizes)
    if visual != expected:
        raise UserError(f"the processor in {vlm.path} makes {visual} visual tokens where its settings say {expected}")
    return len(inputs)
