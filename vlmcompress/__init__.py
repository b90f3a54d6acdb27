"""vlmcompress: quantize a vision-language model into a checkpoint that a real engine serves."""

__version__ = "0.1.0"
