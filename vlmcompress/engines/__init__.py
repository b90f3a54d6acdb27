"""Inference engines, each a process of its own: the compressor's environment and the engine's may differ."""
