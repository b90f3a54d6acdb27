"""Demo models with a skill, such as reading labels: low-rank adapters of their decoders, merged on demand."""
