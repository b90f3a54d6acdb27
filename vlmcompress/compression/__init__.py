"""Doing it: calibrate, quantize, share bits out, sweep."""
