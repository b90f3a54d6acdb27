"""demo-photo: a LLaVA with DINOv2's eyes, asked about scenes of real pictures; assembled on demand."""
