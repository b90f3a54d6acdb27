"""Tools for every part of the package: files, folders, locks, hashes, registries, workers, progress, text."""
