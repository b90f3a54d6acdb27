"""Load a model's processor: tokenizer, image processor and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoProcessor

from vlmcompress.models._requirements import require_processor_sizes
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import foreign_errors

_LIMITS = ("max_length", "truncation", "truncation_strategy", "stride", "padding", "pad_to_multiple_of")
"""Settings of a tokenizer that shorten or lengthen what it encodes."""


def load_processor(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Load the processor of the model in `path`, which neither truncates nor pads unless it is asked to.

    Raises:
        UserError: it cannot be loaded, takes no images, or has a setting that is out of bounds.
    """
    require_processor_sizes(Path(path))
    remedy = "; copy the tokenizer and processor files from the source"
    with foreign_errors(f"{path} has no usable processor", remedy):
        try:
            processor = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
        except ImportError as error:
            needed = " ".join(str(error).split()).partition(" but ")[0]
            raise UserError(f"{path}: {needed}; install it with pip, torchvision in the build of your torch") from error
    if not hasattr(processor, "image_processor"):
        raise UserError(f"{path} has a tokenizer but no image processor; copy preprocessor_config.json from the source")
    if not isinstance(getattr(processor, "image_token", ""), str):
        raise UserError(f"{path}: the processor's image_token is no text; copy the processor's files from the source")
    # Tools that calibrate leave their truncation in tokenizer.json, and transformers 5.17 takes it for the processor's own
    # (`_merge_kwargs` in `processing_utils.py` reads the tokenizer's `init_kwargs`): prompts would lose their end.
    for key in _LIMITS:
        processor.tokenizer.init_kwargs.pop(key, None)
    if (backend := getattr(processor.tokenizer, "backend_tokenizer", None)) is not None:
        backend.no_truncation()
        backend.no_padding()
    return processor
