"""All suites on the backend of docs/writing-a-backend.md: ``make conformance``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.test_third_party import passed, python

__all__ = ["python", "test_the_example_backend_passes_every_suite"]


@pytest.mark.timeout(1200)
def test_the_example_backend_passes_every_suite(python: Path, tmp_path: Path) -> None:
    assert passed(python, tmp_path) > 400
