"""Recipes: all settings of a checkpoint as data, merged from several places and checked; and the table of targets."""

from vlmcompress.recipe.recipe import DEFAULT, FORMATS, SCHEMES, Calibrate, Recipe, Resolved, resolve

__all__ = ["DEFAULT", "FORMATS", "SCHEMES", "Calibrate", "Recipe", "Resolved", "resolve"]
