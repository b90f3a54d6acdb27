"""Plan the serving of a model from its headers alone: weights, cache, concurrent requests."""
