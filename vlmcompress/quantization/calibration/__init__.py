"""Capture the inputs of a model's decoder blocks, keep their statistics, and solve what each block becomes from them."""
