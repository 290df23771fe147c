"""Parameters that only the whole matrix runs; see tests/conftest.py."""

from collections.abc import Iterable
from typing import Any

import pytest


def in_matrix(values: Iterable[Any], but: Iterable[Any] = ()) -> list[Any]:
    """Return parameters that ``make test`` leaves out, without those in ``but``."""
    kept = list(but)
    return [
        value if value in kept else pytest.param(value, marks=pytest.mark.matrix)
        for value in values
    ]
