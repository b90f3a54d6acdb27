"""The written folder: formats of weights, manifest, model card, launch files, and which engine reads it."""
