"""Reduced checkpoints, prompts for them, and what transformers answers with the reducer attached."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from eval.demo.measure import load_rows, messages
from tests.kit.reference import arguments
from tests.kit.tiny import build
from tests.kit.vllm_reduced import about
from vlmcompress.models import VLM, load
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction import scorer_file
from vlmcompress.reduction.choice import ReducerChoice, parse_reducer
from vlmcompress.reduction.hooks import attach
from vlmcompress.reduction.methods import Grid, Signals, TokenCounter, learned, reduce

Turns = list[dict[str, Any]]


def chosen(reducer: str | ReducerChoice) -> ReducerChoice:
    """A reducer, as it is or as the command line has it."""
    return parse_reducer(reducer) if isinstance(reducer, str) else reducer


def trained(reducer: str, vlm: VLM, folder: Path) -> str | ReducerChoice:
    """A reducer that goes by a scorer with the file of one, of random numbers, in `folder`; any other as it is."""
    if not reducer.startswith("learned"):
        return reducer
    config = vlm.model.config
    width, random = config.get_text_config().hidden_size, torch.Generator().manual_seed(4)
    weights = learned.initial(torch.zeros(width), torch.ones(width), 16, seed=4)
    facts = {"model_type": config.model_type, "source": vlm.path.name, "width": width, "hidden": 16, "keep": 0.25}
    path = folder / "scorer.safetensors"
    scorer_file.save_scorer(path, weights | {"value": torch.randn(16, 16, generator=random) / 4}, facts)
    return parse_reducer(f"{reducer},scorer={path}")


def reduced(source: Path, folder: Path, reducer: str | ReducerChoice, counter: TokenCounter | None = None) -> Path:
    """The checkpoint in `source`, with a reducer, in `folder`. Its files are links."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config, carried = json.loads((source / "config.json").read_text()), scorer_file.with_scorer_hash(chosen(reducer))
    if carried.reducer.scorer:
        (folder / scorer_file.CARRIED).parent.mkdir()
        (folder / scorer_file.CARRIED).write_bytes(scorer_file.content(carried))
        carried = scorer_file.carried(carried)
    (folder / "config.json").write_text(json.dumps(reducer_block.config_with_reducer(config, carried, counter)))
    return folder


def tiny(family: str, folder: Path, longest_edge: int | None = None) -> Path:
    """A tiny checkpoint with large random weights, so that a wrong position shows in its answers.

    longest_edge: most pixels of an image, where not the family's own.
    """
    build(family, folder)
    tensors = load_file(folder / "model.safetensors")
    untie(folder, tensors)
    for name, tensor in tensors.items():
        if "embed_tokens" in name:
            tensor.mul_(30)
        elif name.endswith("A_log"):
            tensor.fill_(-4.0)  # states that forget half in 40 tokens, not in one
        elif tensor.ndim == 2 and "embed" not in name and "lm_head" not in name:
            tensor.mul_(5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if config["text_config"].get("sliding_window"):  # longer prompts are refused in transformers
        config["text_config"]["sliding_window"] = 512
        file.write_text(json.dumps(config))
    file = folder / "processor_config.json"
    config = json.loads(file.read_text())
    images = config["image_processor"]
    if "video_processor" in config:  # vLLM normalizes videos with the constants of images
        config["video_processor"] |= {name: images[name] for name in ("image_mean", "image_std")}
    if longest_edge is not None:
        images["size"]["longest_edge"] = longest_edge
    file.write_text(json.dumps(config))
    return folder


def untie(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Give a model whose head is its table of words, so that it would say the last word again, a head of its own."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if not config["tie_word_embeddings"] or "lm_head.weight" in tensors:
        return
    (words,) = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    tensors["lm_head.weight"] = words[torch.randperm(len(words), generator=torch.Generator().manual_seed(0))]
    for part in (config, config["text_config"]):
        part["tie_word_embeddings"] = False
    file.write_text(json.dumps(config))


def loaded(source: Path, dtype: torch.dtype = torch.float32) -> VLM:
    """The same model in transformers, without a reducer."""
    vlm = load(source)
    vlm.model.to(dtype)
    return vlm


def noise(seed: int, width: int, height: int, flat: bool = False) -> Image.Image:
    """An image of which no two tokens are alike; `flat`: of which the right half is of one colour."""
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    if flat:
        levels[:, width // 2 :] = 90
    return Image.fromarray(levels)


def turn(*parts: Image.Image | str) -> dict[str, Any]:
    """A user's turn of images and texts."""
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
            for part in parts
        ],
    }


def noisy(flat: bool = False) -> list[Turns]:
    """One image, two of different sizes, none, an image after text, one that came before, and a second turn."""
    small, wide = noise(0, 84, 84, flat), noise(1, 196, 112, flat)
    first = turn(wide, "how many?")
    answered = {"role": "assistant", "content": [{"type": "text", "text": "three"}]}
    return [
        [turn(small, "what colour is it?")],
        [turn(noise(2, 140, 84, flat), "x", noise(3, 84, 112, flat), "which of the two is the larger one?")],
        [turn("hello there")],
        [turn("what is in this picture, please?", wide)],
        [turn(small, wide, "are they the same?")],
        [first],
        [first, answered, turn("and how many are red?")],
    ]


def questions(count: int, variant: str = "qwen") -> list[Turns]:
    """`count` questions about one image, a third as many about two, a sixth without and a sixth with the image last."""
    rows = load_rows(variant, "validation")
    by = {number: [row for row in rows if len(row["image"]) == number] for number in (0, 1, 2)}
    turns = [messages(row) for row in by[1][:count] + by[2][: count // 3] + by[0][: count // 6]]
    for row in by[1][count : count + count // 6]:
        (user,) = messages(row)
        turns.append([{**user, "content": user["content"][::-1]}])
    return turns


def film(vlm: VLM, folder: Path, frames: int = 6) -> dict[str, Any]:
    """A prompt about a video, longer on one side than in time."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{frames}.npy"
    np.save(file, np.stack([np.asarray(noise(number, 288, 64)) for number in range(frames)]))
    processor = vlm.processor
    prompt = processor.apply_chat_template([turn(noise(0, 8, 8), "what happens?")], add_generation_prompt=True)
    prompt = prompt.replace(processor.image_token, processor.video_token)
    return {"prompt": prompt, "images": [], "videos": [str(file)]}


def request(vlm: VLM, turns: Turns, folder: Path) -> dict[str, Any]:
    """The prompt's text and files of its images, for both engines."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for part in (part for each in turns for part in each["content"] if part["type"] == "image"):
        files.append(str(folder / f"{len(os.listdir(folder))}.png"))
        part["image"].save(files[-1])
    prompt = vlm.processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return {"prompt": prompt, "images": files}


def rows_of(positions: torch.Tensor) -> torch.Tensor:
    """`[rows, s]`, three rows of M-RoPE's or the one of plain RoPE, of positions as transformers' models take them."""
    return positions[-3:, 0] if positions.ndim == 3 else positions


def with_keeps(reducer: str | ReducerChoice, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The requests, where they may set a share the first three also with a third and with all of each image's tokens, in turns:
    caches then have the same image with several counts."""
    if chosen(reducer).reducer.keep_max is None:
        return requests
    shared = [request | {"keep": keep} for keep in (1 / 3, 1) for request in requests[:3]]
    return [*requests, *shared, *requests[:1]]


def fixed(reducer: str | ReducerChoice, request: dict[str, Any]) -> ReducerChoice:
    """The reducer of a checkpoint whose share is what the request sets."""
    choice = chosen(reducer)
    if choice.reducer.keep_max is None:
        return choice
    options: Any = choice.reducer
    return ReducerChoice(
        choice.method, dataclasses.replace(options, keep=request.get("keep", choice.reducer.keep), keep_max=None)
    )


@torch.inference_mode()
def reference(
    vlm: VLM,
    reducer: str | ReducerChoice,
    requests: list[dict[str, Any]],
    tokens: int,
    counter: TokenCounter | None = None,
) -> list[dict[str, Any]]:
    """Of each request the greedy answer's tokens, the positions that the language model gets, and how many tokens it gets."""
    answers, places = [], []
    for choice, group in itertools.groupby(requests, key=lambda request: fixed(reducer, request)):
        with attach(vlm, choice, counter=counter) as attached:
            hook = attached.text.register_forward_pre_hook(
                lambda _, args, kwargs: places.append(rows_of(kwargs["position_ids"])), with_kwargs=True
            )
            for request in group:
                places.clear()
                images = [Image.open(file) for file in request["images"]]
                media = filmed(request["videos"][0]) if "videos" in request else {"images": images or None}
                inputs = vlm.processor(text=[request["prompt"]], return_tensors="pt", **media)
                inputs = {k: v.to(vlm.model.dtype) if v.is_floating_point() else v for k, v in inputs.items()}
                request_inputs = {
                    "do_sample": False,
                    "max_new_tokens": tokens,
                    "output_logits": True,
                    "return_dict_in_generate": True,
                }
                out = vlm.model.generate(**inputs, **request_inputs)
                answer = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
                positions = torch.cat(places, 1).T.tolist()
                leads = [lead(logits[0]) for logits in out.logits]
                answers.append({"tokens": answer, "leads": leads, "positions": positions, "prompt": places[0].shape[1]})
            hook.remove()
    return answers


def filmed(file: str) -> dict[str, Any]:
    """A video and what is known about it, as processors take them."""
    frames = np.load(file)
    metadata = {name: value for name, value in about(len(frames)).items() if name != "do_sample_frames"}
    return {"videos": [frames], "video_metadata": [metadata], "do_sample_frames": False}


def lead(logits: torch.Tensor) -> float:
    """How far the best of `logits [words]` is ahead of the second best."""
    first, second = logits.float().topk(2).values.tolist()
    return first - second


@torch.inference_mode()
def film_reference(vlm: VLM, reducer: str, request: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The same of a video, without `attach`: the whole prompt, with what is not kept hidden from attention.

    Where attention is not all that mixes tokens, the prompt without them, each token at the position that it had. Where tokens
    merge within the encoder frames are images, so that it is `attach` after all.
    """
    chosen = fixed(reducer, request)
    if chosen.reducer.MERGES:
        return reference(vlm, reducer, [request], tokens)[0]
    inputs = vlm.processor(text=[request["prompt"]], return_tensors="pt", **filmed(request["videos"][0]))
    ids = inputs.pop("input_ids")
    placeholder, grid, features = film_features(vlm, inputs)
    result = reduce(chosen.reducer, Signals(grid, features=features))
    positions, kinds = torch.arange(ids.shape[1])[None], inputs.pop("mm_token_type_ids", None)
    if vlm.spec.images.grid == "thw":
        of_videos = {name: inputs[name] for name in ("video_grid_thw", "second_per_grid_ts") if name in inputs}
        positions, _ = vlm.model.model.get_rope_index(ids, mm_token_type_ids=kinds, **of_videos)
    mask, kinds = torch.ones_like(ids), torch.zeros_like(ids) if kinds is None else kinds
    columns = (ids[0] == placeholder).nonzero().squeeze(1)[: len(features)]  # a newline after them is kept
    mask[0, columns] = (result.target >= 0).long()
    answer: list[int] = []
    leads: list[float] = []
    while len(answer) < tokens and vlm.model.generation_config.eos_token_id not in answer:
        kwargs = dict(inputs) | {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        kwargs |= {"mm_token_type_ids": kinds} if vlm.spec.images.grid == "thw" else {}
        logits = (without(vlm, kwargs) if vlm.spec.mixed_blocks else vlm.model(**kwargs).logits)[0, -1]
        answer.append(int(logits.argmax()))
        leads.append(lead(logits))
        ids = torch.cat([ids, torch.tensor([[answer[-1]]])], 1)
        mask, kinds = (torch.cat([row, torch.full((1, 1), value)], 1) for row, value in ((mask, 1), (kinds, 0)))
        positions = torch.cat([positions, positions[..., -1:] + 1], -1)
    visible = mask[0, :-1].bool()  # the last token enters no language model
    left = rows_of(positions)[:, :-1][:, visible].T.tolist()
    return {"tokens": answer, "leads": leads, "positions": left, "prompt": len(left) - len(answer) + 1}


def without(vlm: VLM, kwargs: dict[str, Any]) -> torch.Tensor:
    """Logits `[1, m, words]` of a prompt without the tokens that its mask hides, at the positions given."""
    left = kwargs["attention_mask"][0].bool()
    rows = arguments(vlm, kwargs)["inputs_embeds"][:, left]
    text = vlm.model.get_submodule(vlm.spec.layers.rpartition(".")[0])
    return vlm.model.lm_head(text(inputs_embeds=rows, position_ids=kwargs["position_ids"][..., left]).last_hidden_state)


def film_features(vlm: VLM, inputs: Mapping[str, Any]) -> tuple[int, Grid, torch.Tensor]:
    """Of the one video in a processor's output the placeholder's id, the grid of its tokens and the tokens, `[n, d]`."""
    config, model = vlm.model.config, vlm.model.model
    if vlm.spec.images.grid == "thw":
        patches = inputs["video_grid_thw"]
        (features,) = model.get_video_features(inputs["pixel_values_videos"], patches).pooler_output
        t, h, w = (patches[0] // torch.tensor([1, 2, 2])).tolist()
        return config.video_token_id, (t, h, w), features
    if "pixel_values_videos" in inputs:
        (features,) = model.get_video_features(inputs["pixel_values_videos"]).pooler_output
        placeholder, frames = config.video_token_index, inputs["pixel_values_videos"].shape[1]
    else:
        features = model.get_image_features(inputs["pixel_values"]).pooler_output.flatten(0, 1)
        placeholder, frames = config.image_token_id, len(inputs["pixel_values"])
    side = math.isqrt(len(features) // frames)
    return placeholder, (frames, side, side), features
