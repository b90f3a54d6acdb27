"""The former name of `vlmcompress.hf_hooks`, which the cards of older checkpoints import from."""

from vlmcompress.hf_hooks import *  # noqa: F403
