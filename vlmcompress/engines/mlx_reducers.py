"""Fewer visual tokens in mlx-vlm: a checkpoint's reducer around `get_input_embeddings`. Standard library and numpy only.

Every family of mlx-vlm has that function, which puts the features of images among the embeddings of a prompt. The tokens that
remain keep their positions, as in vLLM and transformers: families with M-RoPE return positions, from which rows are taken; in
the others, whose attention counts positions itself, the RoPE of each layer is wrapped. It knows the last prompt alone, so that
such a family answers one request at a time.

The methods are those of `vlmcompress.reduction.methods` in numpy, for features that the language model would get. They return
each token's parent: itself for one that stays, -1 for one that goes. Loaded by path: what runs mlx-vlm need not have
vlmcompress.
"""

from __future__ import annotations

import math

import numpy as np

MROPE = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")  # ...ForConditionalGeneration
TILED = ("Idefics3", "InternVL", "SmolVLM")
CLASSES = (*MROPE, "Llava", *TILED)
# "temperature", which has one value: of earlier checkpoints; "keep_max": for requests
OPTIONS = ("method", "keep", "keep_max", "temperature", "window")
TEMPERATURE = 0.2


def uniform(rows: np.ndarray, grid: tuple, options: dict) -> np.ndarray:
    """The tokens of an even grid stay; see `methods.uniform`."""
    frames, height, width = grid
    index = []
    for frame, left in enumerate(_spread(_count(grid, options), frames)):
        used = min(height, left, max(math.ceil(left / width), round(math.sqrt(left * height / width))))
        for row, tokens in zip(_centres(used, height), _spread(left, used), strict=True):
            index += [(frame * height + row) * width + column for column in _centres(tokens, width)]
    return _kept(index, len(rows))


def pool(rows: np.ndarray, grid: tuple, options: dict) -> np.ndarray:
    """Each window becomes one token; see `methods.pool`."""
    (frames, height, width), sides = grid, options.get("window", "2x2").split("x")
    row, column = (_middles(length, int(step)) for length, step in zip((height, width), sides, strict=True))
    first = np.arange(frames) * (height * width)
    return (first[:, None, None] + row[:, None] * width + column).ravel()


def _spread(total: int, parts: int) -> list[int]:
    return [((i + 1) * total + parts // 2) // parts - (i * total + parts // 2) // parts for i in range(parts)]


def _centres(count: int, cells: int) -> list[int]:
    return [(2 * i + 1) * cells // (2 * count) for i in range(count)]


def _middles(length: int, step: int) -> np.ndarray:
    start = np.arange(length) // step * step
    return start + (np.minimum(start + step, length) - start - 1) // 2


def divprune(rows: np.ndarray, grid: tuple, options: dict) -> np.ndarray:
    """The most diverse of rows `[n, d]` stay; see `methods.divprune`."""
    rows = _unit(rows)
    distance = 1 - rows @ rows.T
    np.fill_diagonal(distance, np.inf)
    nearest = np.nan_to_num(distance.min(1), posinf=0.0)
    np.fill_diagonal(distance, -np.inf)
    chosen: list[int] = []
    for _ in range(_count(grid, options)):
        token = int(nearest.argmax())
        nearest = np.minimum(nearest, distance[token]) if chosen else distance[token]
        chosen.append(token)
    return _kept(chosen, len(rows))


def coverage(rows: np.ndarray, grid: tuple, options: dict) -> np.ndarray:
    """Those of rows `[n, d]` that represent all of them best stay; see `methods.coverage`."""
    rows = _unit(rows)
    scores = rows @ rows.T / TEMPERATURE
    scores = np.exp(scores - scores.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    best, chosen = np.zeros(len(rows), np.float32), list[int]()
    for _ in range(_count(grid, options)):
        gain = np.maximum(scores - best[:, None], 0).sum(0)
        gain[chosen] = -1
        chosen.append(int(gain.argmax()))
        best = np.maximum(best, scores[:, chosen[-1]])
    return _kept(chosen, len(rows))


METHODS = {"coverage": coverage, "divprune": divprune, "pool": pool, "uniform": uniform}


def _count(grid: tuple, options: dict) -> int:
    count = math.floor(options.get("keep", 0.5) * math.prod(grid) + 0.5)
    return count or (1 if options.get("keep_max") else math.prod(grid))


def _kept(index: list[int], n: int) -> np.ndarray:
    parent = np.full(n, -1)
    parent[index] = index
    return parent


def _unit(rows: np.ndarray) -> np.ndarray:
    tiny = np.finfo(np.float32).tiny
    rows = rows / np.maximum(np.abs(rows).max(-1, keepdims=True), tiny)
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), tiny)


def means(rows: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """The rows `[m, d]` of the tokens that stay, each the mean of its children in `rows [n, d]`."""
    stays, child = np.flatnonzero(parent == np.arange(len(parent))), np.flatnonzero(parent >= 0)
    target = np.searchsorted(stays, parent[child])
    sizes = np.bincount(target)
    ordered = rows[child[np.argsort(target, kind="stable")]]
    return np.add.reduceat(ordered, np.cumsum(sizes) - sizes) / sizes[:, None].astype(np.float32)


def name_of(config: dict) -> str:
    """The name of a model's class, without the endings that all have."""
    name = str((config.get("architectures") or [""])[0])
    return name.removeprefix("Vlmcompress").removesuffix("ForConditionalGeneration")


def problem(config: dict) -> str:
    """Why the reducer in a checkpoint's config.json cannot be applied; empty if it can, or if there is none."""
    block = config.get("vlmcompress")
    if not block:
        return ""
    name, reduce = name_of(config), block.get("reduce") or {}
    if name not in CLASSES or reduce.get("method") not in METHODS:
        sides = f"{', '.join(CLASSES)} by {', '.join(METHODS)}", f"{name} by {reduce.get('method')}"
        return f"in MLX fewer tokens are for {sides[0]}, not for {sides[1]}"
    odd = [name for name in reduce if name not in OPTIONS or (name == "temperature" and reduce[name] != TEMPERATURE)]
    return f"in MLX the reducer {reduce['method']} has no option {odd[0]}" if odd else ""


def requested(keep, config: dict) -> float:
    """Check the share, or number of tokens, that a request sets for its images. ValueError if it may not set it."""
    most = ((config.get("vlmcompress") or {}).get("reduce") or {}).get("keep_max")
    if most is None:
        raise ValueError("the reducer has no 'keep_max', up to which requests may set 'keep'; leave it out")
    if type(keep) not in (int, float) or not (0 < keep <= most or (1 < keep <= 10**6 and keep == int(keep))):
        raise ValueError(
            f"'keep' must be a share above 0 and at most {most:g}, or a number of tokens from 2, got {keep!r:.80}"
        )
    if keep > 1 and name_of(config) in TILED:
        raise ValueError(f"{name_of(config)} cuts images into tiles; set 'keep' to a share here")
    return keep


def attach(model, config: dict) -> None:
    """Have a loaded model apply the reducer of its config.json, if there is one.

    `model.dropped` is the number of tokens that the last prompt lost, `model.stayed` the indices of the others. `model.keep` is
    the share, or number, of an image's tokens that the next prompts keep; None: the reducer's own.
    """
    import mlx.core as mx

    if not (block := config.get("vlmcompress")):
        return
    options, embeddings, vision = block["reduce"], model.get_input_embeddings, config["vision_config"]
    method, image_token = METHODS[options["method"]], config.get("image_token_id", config.get("image_token_index"))

    def array(values):
        return np.array(values.astype(mx.float32))

    def grids(tokens: int, shapes) -> list[tuple]:
        """The grids of a prompt's images, or of their tiles, whose side in pixels and in patches config.json has."""
        if shapes is not None:
            merged = vision["spatial_merge_size"]
            return [(frames, height // merged, width // merged) for frames, height, width in np.array(shapes).tolist()]
        size, patch = (int(np.ravel(vision[f"{key}_size"])[0]) for key in ("image", "patch"))
        side = round(size // patch * config.get("downsample_ratio", 1) / config.get("scale_factor", 1))
        return [(1, side, side)] * (tokens // side**2)

    index = mx.array([0])  # `model.stayed` as MLX's array

    def reduced(input_ids, pixel_values=None, **kwargs):
        nonlocal index
        output = embeddings(input_ids, pixel_values, **kwargs)
        model.dropped, model.stayed = 0, None
        if pixel_values is None:
            return output
        places = np.flatnonzero(np.array(input_ids[0]) == image_token)
        rows, start = array(output.inputs_embeds[0]), 0
        parent = np.arange(len(rows))
        for grid in grids(len(places), kwargs.get("image_grid_thw")):
            image = places[start : start + math.prod(grid)]
            settings = options
            if model.keep is not None:
                share = model.keep / len(image) if model.keep > 1 else model.keep
                settings = options | {"keep": min(share, options["keep_max"])}
            choice = method(rows[image], grid, settings)
            parent[image] = np.where(choice < 0, -1, image[choice])
            start += len(image)
        stayed = np.flatnonzero(parent == np.arange(len(rows)))
        model.dropped, model.stayed, index = len(rows) - len(stayed), stayed, mx.array(stayed)
        output.inputs_embeds = mx.array(means(rows, parent))[None].astype(output.inputs_embeds.dtype)
        if output.position_ids is not None:
            output.position_ids = output.position_ids[..., index]
            # the next position is that of the cache, which has fewer tokens, plus this
            output.rope_deltas = output.rope_deltas + model.dropped
        if output.visual_pos_masks is not None:  # of Qwen3-VL, whose features go into several layers
            output.visual_pos_masks = output.visual_pos_masks[:, index]
            visual = np.where(parent[places] < 0, -1, np.searchsorted(places, parent[places]))
            output.deepstack_visual_embeds = [
                mx.array(means(array(level), visual)).astype(level.dtype) for level in output.deepstack_visual_embeds
            ]
        return output

    def rotation(rope):
        """A layer's RoPE at the original positions of tokens `[1, heads, n, d]`, of which the cache holds `offset`."""

        def rotated(x, offset=0):
            if model.stayed is None:
                return rope(x, offset=offset)
            at, last = mx.arange(x.shape[2]) + offset, len(model.stayed) - 1
            position = mx.where(at > last, at + model.dropped, index[mx.minimum(at, last)])
            # RoPE takes an offset for each row of a batch, so that tokens become rows
            return rope(x.transpose(2, 1, 0, 3), offset=position).transpose(2, 1, 0, 3)

        return rotated

    model.get_input_embeddings, model.stayed, model.dropped, model.keep = reduced, None, 0, None
    for layer in () if name_of(config) in MROPE else model.language_model.layers:
        key = "rope" if hasattr(layer.self_attn, "rope") else "rotary_emb"
        setattr(layer.self_attn, key, rotation(getattr(layer.self_attn, key)))
