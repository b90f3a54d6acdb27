"""demo-smol: a LLaVA whose language model is a real pretrained one, SmolLM2-135M-Instruct, taken from a PyPI package."""
