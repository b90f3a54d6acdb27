"""Capture the inputs of a model's decoder blocks, store their statistics, and quantize each block with them."""
