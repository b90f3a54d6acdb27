"""The model card of a demo model."""


def model_card(kind: str, summary: dict) -> str:
    """README.md of a checkpoint (filled in by the training script)."""
    return f"# demo-{kind}\n\n{summary}\n"
