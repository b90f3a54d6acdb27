"""What every part of the package may use: files, folders, hashes, registries, progress, text. It knows nothing of models."""
