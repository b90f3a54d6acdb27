"""What a finished checkpoint is like: its files, and the errors of its layers."""
