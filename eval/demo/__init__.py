"""Build, train, measure and export the two demo vision-language models."""
