"""Reducers on real models."""
