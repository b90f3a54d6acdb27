"""One decoder block at a time: its quantized weights solved from statistics, or their errors predicted; results on disk."""
