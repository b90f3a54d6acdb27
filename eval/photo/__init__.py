"""Scenes of real pictures: photographs and drawings that Debian ships, put together at random, and questions about them."""
