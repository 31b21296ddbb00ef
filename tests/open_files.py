"""Give new files descriptors above 1023, which ``select()`` does not accept."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

import pytest

__all__ = ["over_a_thousand"]


@contextlib.contextmanager
def over_a_thousand() -> Iterator[None]:
    """Within the block, every newly opened file gets a descriptor above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while files.enter_context(open(os.devnull)).fileno() < 1100:
            pass
        yield
