"""Demo models that describe scenes in 30 to 60 words: low-rank adapters of their decoders, trained here, merged on demand."""
