"""All suites of multilock for backends, run on the directory backend."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from multilock.names import escape
from multilock.testing import conformance


class Directory(conformance.Place):
    """A new directory for each test."""

    def __init__(self) -> None:
        super().__init__()
        self._path = Path(tempfile.mkdtemp(prefix="multilock-directory-"))

    @property
    def url(self) -> str:
        return f"directory://{self._path}"

    def delete(self, name: str) -> None:
        """Delete the name's file, without multilock."""
        key = self.prefix + escape(name)
        (self._path / f"{hashlib.sha256(key.encode()).hexdigest()}.held").unlink()

    def leftovers(self) -> list[str]:
        """Return the files of locks. Tombstones expire, so they are not listed."""
        return [file.name for file in self._path.iterdir() if file.suffix in (".held", ".new")]

    def close(self) -> None:
        shutil.rmtree(self._path)


for suite in conformance.SUITES:
    globals()[f"Test{suite.__name__}"] = type(f"Test{suite.__name__}", (suite,), {"backend": Directory})
