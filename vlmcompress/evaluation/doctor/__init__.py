"""Examination of a finished checkpoint's files, and of draft heads."""
