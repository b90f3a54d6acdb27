"""The folder that is written: weights, their sizes, manifest, model card, and the reducer's block in config.json."""
