"""Rotations that leave a model's answers as they are and its weights easier to round: orthogonal matrices, no model.

Which tensors of a checkpoint are rotated is `models.stream`; `checkpoint.rotate` writes the rotated checkpoint.
"""
