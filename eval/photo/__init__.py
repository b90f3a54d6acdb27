"""Scenes of pictures that others drew or took, put together at random, and questions about them."""
