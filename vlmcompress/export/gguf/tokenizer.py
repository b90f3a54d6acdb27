"""A tokenizer as the metadata of a GGUF file, from `tokenizer.json` and the files next to it.

Two kinds are supported: byte-level BPE (`gpt2` in llama.cpp) and SentencePiece's BPE with byte fallback: `llama`, which merges
by scores of tokens, or `gemma4`, which merges by the list and never across line breaks. llama.cpp splits text by its own, named
patterns; the name is looked up by the pattern in tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's token types

_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_MARKS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
)
PATTERNS = {
    _WORDS + r"\p{N}|" + _TAIL: "qwen2",
    _WORDS + r"\p{N}{1,3}|" + _TAIL: "llama-bpe",
    _MARKS + r"\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen35",
    _CASED + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "tekken",
}
"""Pattern by which a tokenizer splits text -> llama.cpp's name for it."""


def metadata(
    folder: Path,
    vocabulary: int,
    config: Mapping[str, Any],
    kind: str = "llama",
    visible: Container[str] = (),
) -> dict[str, Any]:
    """The metadata of the tokenizer in a folder.

    Args:
        vocabulary: rows of the model's embedding; tokens that the tokenizer lacks are written as unused.
        config: the model's configuration, for the tokens that begin and end a text.
        kind: llama.cpp's name of SentencePiece's BPE.
        visible: special tokens that an answer shows.

    Raises:
        UserError: the tokenizer is unsupported or damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"{folder} has no tokenizer.json, which GGUF's tokenizer is made from; save a fast tokenizer there"
        )
    content, settings = json_files.read(path), _optional(folder / "tokenizer_config.json")
    try:
        return _metadata(content, settings, folder, vocabulary, config, kind, visible)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise UserError(f"{path} is not a readable tokenizer ({error!r}); restore it from the source") from error


def added_tokens(folder: Path) -> dict[str, int]:
    """Text -> id of the tokens that a folder's tokenizer adds to its vocabulary."""
    return {entry["content"]: entry["id"] for entry in json_files.read(folder / "tokenizer.json")["added_tokens"]}


def _metadata(
    content: Mapping[str, Any],
    settings: Mapping[str, Any],
    folder: Path,
    vocabulary: int,
    config: Mapping[str, Any],
    kind: str,
    visible: Container[str],
) -> dict[str, Any]:
    model = content["model"]
    if model["type"] != "BPE":
        raise UserError(f"GGUF supports only BPE tokenizers here, not {model['type']}; write another format")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    # transformers writes byte_fallback for byte-level tokenizers, too, which it made of a GGUF file
    pieces = bool(model.get("byte_fallback")) and "ByteLevel" not in [step.get("type") for step in _steps(content)]
    tokens, kinds = _tokens(content, vocabulary, pieces, visible)
    keys: dict[str, Any] = {"model": kind if pieces else "gpt2", "pre": "default" if pieces else _splitting(content)}
    keys |= {"tokens": tokens, "token_type": kinds}
    if not pieces or kind != "llama":
        keys["merges"] = merges or ["00 00"]  # llama.cpp requires merges; this one never applies
    if pieces:
        keys["scores"] = _scores(tokens, model["merges"])
        # Either of two steps can put a space before a text.
        steps = [content.get("normalizer") or {}, content.get("pre_tokenizer") or {}]
        steps += [inner for step in steps for inner in step.get("normalizers", ())]
        keys["add_space_prefix"] = any(
            step.get("type") == "Prepend" or step.get("prepend_scheme", "never") != "never" for step in steps
        )
    ids = {token: index for index, token in enumerate(tokens)}
    keys |= _specials(settings, config, ids, _optional(folder / "generation_config.json").get("eos_token_id"))
    keys["add_bos_token"] = _adds_bos(content, settings)
    keys["add_eos_token"] = False
    keys["chat_template"] = _template(folder, settings)
    return {
        f"tokenizer.{'' if name == 'chat_template' else 'ggml.'}{name}": v for name, v in keys.items() if v is not None
    }


def _tokens(
    content: Mapping[str, Any], vocabulary: int, pieces: bool, visible: Container[str]
) -> tuple[list[str], list[int]]:
    """The text and type of each of `vocabulary` tokens."""
    by_id = {index: token for token, index in content["model"]["vocab"].items()}
    added = {entry["id"]: entry for entry in content.get("added_tokens", ())}
    by_id |= {index: entry["content"] for index, entry in added.items()}
    if by_id and max(by_id) >= vocabulary:
        raise UserError(f"the tokenizer has token {max(by_id)}, the model's embedding has {vocabulary} rows")
    unknown = content["model"].get("unk_token")
    tokens, kinds = [], []
    for index in range(vocabulary):
        token = by_id.get(index)
        kind = UNUSED if token is None else NORMAL
        if index in added:
            kind = CONTROL if added[index].get("special") and token not in visible else USER_DEFINED
        if pieces and token is not None:
            if token == unknown:
                kind = UNKNOWN
            elif len(token) == 6 and token.startswith("<0x"):
                kind = BYTE
        tokens.append(f"[PAD{index}]" if token is None else token)
        kinds.append(kind)
    return tokens, kinds


def _scores(tokens: list[str], merges: list) -> list[float]:
    """SentencePiece's score of each token. llama.cpp merges the pair with the highest score, so earlier merges score higher."""
    rank: dict[str, int] = {}
    for place, merge in enumerate(merges):
        rank.setdefault("".join(merge.split(" ", 1) if isinstance(merge, str) else merge), place)
    return [-float(rank[token]) if token in rank else -1e4 - len(merges) for token in tokens]


def _steps(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps that split text before BPE."""
    before: dict[str, Any] = content.get("pre_tokenizer") or {}
    steps: list[dict[str, Any]] = before.get("pretokenizers", [before])
    return steps


def _splitting(content: Mapping[str, Any]) -> str:
    """llama.cpp's name of the pattern by which a byte-level tokenizer splits text."""
    steps = _steps(content)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    pattern = next((step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"), None)
    if pattern in PATTERNS:
        return PATTERNS[pattern]
    raise UserError("the tokenizer splits text by a pattern without a known name in llama.cpp; write another format")


def _specials(
    settings: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int], stops: Any
) -> dict[str, Any]:
    """Ids of the BOS, EOS and padding tokens, and of up to two others that end an answer; `stops`: all that do."""
    text = config.get("text_config", config)
    keys = {}
    for name, key in (
        ("bos", "bos_token_id"),
        ("eos", "eos_token_id"),
        ("pad", "padding_token_id"),
        ("unk", "unknown_token_id"),
    ):
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        ends = text.get(f"{name}_token_id")
        keys[key] = ids.get(str(token), ends[0] if isinstance(ends, list) and ends else ends)
    others = [stop for stop in stops if stop != keys["eos_token_id"]] if isinstance(stops, list) else []
    keys |= zip(("eot_token_id", "eom_token_id"), others, strict=False)
    return {key: value for key, value in keys.items() if isinstance(value, int) and 0 <= value < len(ids)}


def _adds_bos(content: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether the BOS token is added to a text."""
    after = content.get("post_processor") or {}
    for step in after.get("processors", [after]):
        if step.get("type") == "TemplateProcessing":
            return bool(step["single"]) and "SpecialToken" in step["single"][0]
    return bool(settings.get("add_bos_token"))


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    stored = _optional(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(stored, list):  # several by name
        stored = next((entry["template"] for entry in stored if entry.get("name") == "default"), None)
    return stored


def _optional(path: Path) -> dict[str, Any]:
    return json_files.read(path) if path.is_file() else {}
