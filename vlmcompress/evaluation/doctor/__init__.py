"""Examination of a finished checkpoint: its files, and the errors of its layers."""
