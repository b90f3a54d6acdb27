"""Runs that compress a model: calibrate it, quantize it, share out bits among its layers."""
