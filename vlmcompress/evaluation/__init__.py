"""What compression cost: both checkpoints answer the same questions in the engine, and the difference gets error bars."""
