"""Every decision has a number and a line in the index, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "decisions").glob("0*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_that_a_decision_names_exists(page: Path) -> None:
    missing = []
    for path, test in re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8")):
        file = ROOT / path
        if not file.exists() or not re.search(rf"def {test}\b", file.read_text(encoding="utf-8")):
            missing.append(f"{path}::{test}")
    assert missing == []


def test_every_number_has_exactly_one_page() -> None:
    assert [int(page.name[:4]) for page in PAGES] == list(range(1, len(PAGES) + 1))


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f"]({page.name})" not in index] == []
