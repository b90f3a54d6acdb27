"""Plans from headers alone: what a recipe will do to a model, every reason why it cannot, and what serving the result takes."""
