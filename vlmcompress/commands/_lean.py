"""What the libraries import for functions that no verb has a use for, left out: it is a quarter of a quick verb's time."""

from __future__ import annotations

import sys


def import_transformers() -> None:
    """Import transformers' models without scikit-learn, which it would import, where that is installed, for assisted decoding.

    With scikit-learn come scipy and pandas. Only transformers is kept from it, and only if neither has been imported before.
    """
    if "transformers" in sys.modules or "sklearn" in sys.modules:
        return
    sys.modules["sklearn"] = None  # type: ignore[assignment]  # as Python marks a module that cannot be imported
    try:
        from transformers import AutoModelForImageTextToText  # noqa: F401
    finally:
        del sys.modules["sklearn"]
