"""Fewer visual tokens: the methods, their choice in a recipe, hooks for transformers models, and who can serve them."""
