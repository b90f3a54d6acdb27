"""What `report-error` says of two checkpoints."""

from __future__ import annotations

from vlmcompress.evaluation.doctor.layer_errors import LayerErrors
from vlmcompress.evaluation.report import layers


def test_errors_of_zero_have_no_factor() -> None:
    """A layer that was exact before, and one that only one checkpoint has, are shown without a ratio."""
    first = LayerErrors("a", {"exact": {"text": 0.0}, "same": {"text": 0.02}, "gone": {"text": 0.01}})
    other = LayerErrors("b", {"exact": {"text": 0.01}, "same": {"text": 0.01}})
    text = layers.layers_text(first, other, 0)
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in text.split("\n\n")[1].splitlines()[1:]}
    assert rows["exact"].endswith("-> 1.00%") and rows["gone"].endswith("-> -")
    assert rows["same"] == "2.00% -> 1.00% (0.50x)"
    assert "exact" in layers.layers_page(first, other)
