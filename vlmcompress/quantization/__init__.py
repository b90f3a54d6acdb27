"""From a recipe and a model to quantized weights: plan, calibration, schemes, and the run that joins them."""
