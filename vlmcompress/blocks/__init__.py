"""What one decoder block becomes: solved from statistics, predicted, kept on disk."""
