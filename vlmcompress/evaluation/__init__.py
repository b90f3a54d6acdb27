"""Accuracy, speed and memory of a checkpoint against its baseline, and the reports, searches and plans based on them."""
