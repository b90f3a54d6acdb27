"""Fewer visual tokens in mlx-vlm: a checkpoint's reducer around `get_input_embeddings`. Standard library and numpy only.

Every family of mlx-vlm has that function, which puts the features of images among the embeddings of a prompt. Families with
M-RoPE return positions as well; so the rows that a method drops go from both, and the others keep their positions, as in
vLLM and transformers. In other families attention counts positions itself, and there is no such place.

The methods are those of `vlmcompress.reduction.methods` in numpy, for features that the language model would get. Loaded by
path: what runs mlx-vlm need not have vlmcompress.
"""

from __future__ import annotations

import math

import numpy as np

CLASSES = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")  # ...ForConditionalGeneration
OPTIONS = ("method", "keep", "temperature")  # a checkpoint has those that are not at their defaults


def uniform(rows: np.ndarray, grid: tuple, count: int, options: dict) -> list[int]:
    """The `count` tokens of an even grid; see `methods.uniform`."""
    frames, height, width = grid
    index = []
    for frame, left in enumerate(_spread(count, frames)):
        used = min(height, left, max(math.ceil(left / width), round(math.sqrt(left * height / width))))
        for row, tokens in zip(_centres(used, height), _spread(left, used), strict=True):
            index += [(frame * height + row) * width + column for column in _centres(tokens, width)]
    return index


def _spread(total: int, parts: int) -> list[int]:
    return [((i + 1) * total + parts // 2) // parts - (i * total + parts // 2) // parts for i in range(parts)]


def _centres(count: int, cells: int) -> list[int]:
    return [(2 * i + 1) * cells // (2 * count) for i in range(count)]


def divprune(rows: np.ndarray, grid: tuple, count: int, options: dict) -> list[int]:
    """The `count` most diverse of rows `[n, d]`; see `methods.divprune`."""
    rows = _unit(rows)
    distance = 1 - rows @ rows.T
    np.fill_diagonal(distance, np.inf)
    nearest = np.nan_to_num(distance.min(1), posinf=0.0)
    np.fill_diagonal(distance, -np.inf)
    chosen: list[int] = []
    for _ in range(count):
        token = int(nearest.argmax())
        nearest = np.minimum(nearest, distance[token]) if chosen else distance[token]
        chosen.append(token)
    return chosen


def coverage(rows: np.ndarray, grid: tuple, count: int, options: dict) -> list[int]:
    """The `count` of rows `[n, d]` that represent all of them best; see `methods.coverage`."""
    rows = _unit(rows)
    scores = rows @ rows.T / options.get("temperature", 0.2)
    scores = np.exp(scores - scores.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    best, chosen = np.zeros(len(rows), np.float32), list[int]()
    for _ in range(count):
        gain = np.maximum(scores - best[:, None], 0).sum(0)
        gain[chosen] = -1
        chosen.append(int(gain.argmax()))
        best = np.maximum(best, scores[:, chosen[-1]])
    return chosen


METHODS = {"coverage": coverage, "divprune": divprune, "uniform": uniform}


def _unit(rows: np.ndarray) -> np.ndarray:
    tiny = np.finfo(np.float32).tiny
    rows = rows / np.maximum(np.abs(rows).max(-1, keepdims=True), tiny)
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), tiny)


def refusal(config: dict) -> str:
    """Why the reducer in a checkpoint's config.json cannot be applied; empty if it can, or if there is none."""
    block = config.get("vlmcompress")
    if not block:
        return ""
    reduce = block.get("reduce") or {}
    name = str((config.get("architectures") or [""])[0]).removeprefix("Vlmcompress")
    name = name.removesuffix("ForConditionalGeneration")
    if name not in CLASSES or reduce.get("method") not in METHODS:
        sides = f"{', '.join(CLASSES)} by {', '.join(METHODS)}", f"{name} by {reduce.get('method')}"
        return f"in MLX fewer tokens are for {sides[0]}, not for {sides[1]}"
    odd = [name for name in reduce if name not in OPTIONS]
    return f"in MLX the reducer {reduce['method']} has no option {odd[0]}" if odd else ""


def attach(model, config: dict) -> None:
    """Have a loaded model apply the reducer of its config.json, if there is one.

    `model.dropped` is the number of tokens that the last prompt lost, `model.stayed` the indices of the others.
    """
    import mlx.core as mx

    if not (block := config.get("vlmcompress")):
        return
    options, embeddings = block["reduce"], model.get_input_embeddings
    method, merged = METHODS[options["method"]], config["vision_config"]["spatial_merge_size"]

    def reduced(input_ids, pixel_values=None, **kwargs):
        output = embeddings(input_ids, pixel_values, **kwargs)
        model.dropped, model.stayed = 0, None
        if pixel_values is None:
            return output
        places = np.flatnonzero(np.array(input_ids[0]) == model.config.image_token_id)
        rows = np.array(output.inputs_embeds[0].astype(mx.float32))
        stays, start = np.ones(len(rows), bool), 0
        for frames, height, width in np.array(kwargs["image_grid_thw"]).tolist():
            grid = (frames, height // merged, width // merged)
            image = places[start : start + math.prod(grid)]
            count = math.floor(options.get("keep", 0.5) * len(image) + 0.5) or len(image)
            stays[image] = False
            stays[image[method(rows[image], grid, count, options)]] = True
            start += len(image)
        index = mx.array(np.flatnonzero(stays))
        output.inputs_embeds, output.position_ids = output.inputs_embeds[:, index], output.position_ids[..., index]
        model.dropped, model.stayed = len(rows) - len(index), np.flatnonzero(stays)
        # the next position is that of the cache, which has fewer tokens, plus this
        output.rope_deltas = output.rope_deltas + model.dropped
        if output.visual_pos_masks is not None:  # of Qwen3-VL, whose features go into several layers
            visual = mx.array(np.flatnonzero(stays[places]))
            output.visual_pos_masks = output.visual_pos_masks[:, index]
            output.deepstack_visual_embeds = [features[visual] for features in output.deepstack_visual_embeds]
        return output

    model.get_input_embeddings = reduced
