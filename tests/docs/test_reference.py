"""The reference names every public member, and no other names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import multilock

PAGE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text(encoding="utf-8")
SECTIONS = {
    multilock.Client: "## Client",
    multilock.DistributedLock: "## DistributedLock",
    multilock.Lease: "## Lease",
    multilock.Election: "## Election and Leadership",
    multilock.ReadWriteLock: "## ReadWriteLock and Semaphore",
    multilock.Loss: "| `Loss`",
    multilock.LockInfo: "| `LockInfo`",
    multilock.LeaderInfo: "| `LeaderInfo`",
    multilock.Finding: "| `Finding`",
    multilock.Capabilities: "| `Capabilities`",
}


def section(heading: str) -> str:
    """Return the text from this heading to the next. If ``heading`` is the beginning of a row of a table, return that
    row."""
    start = PAGE.index(f"\n{heading}") + 1
    one_row = heading.startswith("|") and heading != "| `Capabilities`"
    ends = PAGE.find("\n" if one_row else "\n## ", start)
    return PAGE[start : ends if ends > 0 else None]


def named(text: str) -> set[str]:
    """Return the name at the start of each piece of code: for ``lock(name, …)``, ``lock``."""
    return {re.split(r"[(.=]", code)[0] for code in re.findall(r"`([^`]+)`", text)}


@pytest.mark.parametrize("its", SECTIONS, ids=lambda its: its.__name__)
def test_every_public_member_is_in_the_reference(its: type) -> None:
    members = {name for name in dir(its) if not name.startswith("_")}
    assert members - named(section(SECTIONS[its])) == set()


@pytest.mark.parametrize("its", list(SECTIONS)[:4], ids=lambda its: its.__name__)
def test_every_member_in_the_reference_exists(its: type) -> None:
    cells = [line.split("|")[1] for line in section(SECTIONS[its]).splitlines() if line.startswith("| `")]
    assert {name for name in named(" ".join(cells)) if not hasattr(its, name)} == set()


def test_every_error_is_in_the_reference_with_its_base_class() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:`(\w*)` )?\|", section("## Errors"), re.MULTILINE))
    errors = {
        name: its
        for name in multilock.__all__
        if isinstance(its := getattr(multilock, name), type) and issubclass(its, multilock.MultilockError)
    }
    bases = {
        name: [base.__name__ for base in its.__bases__ if base.__module__ == "builtins"] for name, its in errors.items()
    }
    assert rows == {name: "".join(base) for name, base in bases.items() if name != "MultilockError"}
