"""What is trained: models after a reducer, the scorer of a reducer, and draft heads."""
