"""Families of models, one file each, whose `SPEC` is a `ModelSpec`."""
