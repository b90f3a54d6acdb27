"""Passes over a model that see what its layers are given, and the folder of statistics that they write."""
