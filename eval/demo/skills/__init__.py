"""Demo models with a skill, describing scenes or giving boxes: low-rank adapters of their decoders, merged on demand."""
