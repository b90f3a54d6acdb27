"""Tools that every part of the package may use: files, folders, hashes, registries, progress, text. Nothing about models."""
