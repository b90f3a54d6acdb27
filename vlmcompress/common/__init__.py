"""What every part may use: files, folders, hashes, registries, progress, text. It knows nothing of models."""
