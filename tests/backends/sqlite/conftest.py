"""A lock file for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks.db"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite://{path}"


@pytest.fixture
def common() -> Iterator[Path]:
    """Return a directory that every user can enter, unlike those of pytest."""
    directory = Path(tempfile.mkdtemp(prefix="multilock-test-"))
    directory.chmod(0o755)
    yield directory
    directory.chmod(0o755)
    shutil.rmtree(directory)
