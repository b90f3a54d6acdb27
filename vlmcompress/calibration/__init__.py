"""Passes over a model that observe the inputs of its layers, and the folder of statistics that they write."""
