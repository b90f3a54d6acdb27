"""Results to report."""

from __future__ import annotations

import pytest

from tests.kit.made_results import make_results
from vlmcompress.evaluation.results import Results


@pytest.fixture
def results() -> Results:
    """Everything that results can hold."""
    return make_results()
