"""What is trained: models behind a reducer, the scorer of a reducer, and draft heads."""
