"""Recover what a token reducer cost: adapters, the objective, and the loop of a short distillation, as pure mathematics.

A student (the model behind the reducer) learns to answer as its teacher (the model with all tokens) does. Nothing here knows of
models or files: `compression.recover` runs them.
"""
