"""Training: models after a reducer, the scorer of the reducer `learned`, and draft heads."""
