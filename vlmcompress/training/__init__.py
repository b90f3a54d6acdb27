"""What is trained: models behind a reducer, the scales of codes, the scorer of a reducer, and draft heads."""
