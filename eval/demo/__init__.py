"""The two demo vision-language models: how they are built, trained, measured and exported."""
