"""Statistics of a layer's inputs, by modality: Gram matrices, maxima, gradients, ranges. Pure mathematics."""
