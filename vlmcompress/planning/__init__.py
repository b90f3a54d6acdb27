"""What a recipe will do to a model, from headers alone, and why it cannot where it cannot."""
