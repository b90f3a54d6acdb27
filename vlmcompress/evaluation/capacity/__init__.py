"""What serving a model takes, from its headers alone: weights, cache, requests at once, and their speed at best."""
