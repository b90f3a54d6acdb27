"""Accuracy: both checkpoints answer the same questions in an engine, and the difference is tested statistically."""
