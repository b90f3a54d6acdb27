"""The written folder: weights, format, manifest, card, and the reducer's block in config.json."""
