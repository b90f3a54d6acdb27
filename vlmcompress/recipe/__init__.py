"""A recipe is everything that decides what is written, as data: where its values come from, and checking them."""

from vlmcompress.recipe.recipe import DEFAULT, FORMATS, SCHEMES, Calibrate, Recipe, Resolved, resolve

__all__ = ["DEFAULT", "FORMATS", "SCHEMES", "Calibrate", "Recipe", "Resolved", "resolve"]
