"""What is asked for, as data."""

from vlmcompress.recipe.recipe import DEFAULT, FORMATS, SCHEMES, Calibrate, Recipe, Resolved, resolve

__all__ = ["DEFAULT", "FORMATS", "SCHEMES", "Calibrate", "Recipe", "Resolved", "resolve"]
