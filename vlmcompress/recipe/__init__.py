"""Recipes: everything that decides what is written, as data; where values come from, and their checks."""

from vlmcompress.recipe.recipe import DEFAULT, FORMATS, SCHEMES, Calibrate, Recipe, Resolved, resolve

__all__ = ["DEFAULT", "FORMATS", "SCHEMES", "Calibrate", "Recipe", "Resolved", "resolve"]
