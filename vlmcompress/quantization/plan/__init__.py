"""Plans from headers alone: what a recipe will do to a model, and every reason why it cannot."""
