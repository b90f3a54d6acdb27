"""Plans: what a recipe will do to a model, worked out from headers alone, and every reason why it cannot."""
