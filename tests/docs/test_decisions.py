"""What a decision names exists: its tests, its mutants, and its line in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutants.__main__ import read_all

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


def test_every_mutant_of_the_table_of_findings_exists() -> None:
    text = (ROOT / "docs" / "decisions" / "0010-hostile-reading.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 36))
    mutants = [row.split("|")[4].strip(" `") for row in rows]
    assert set(mutants) <= {mutant.name for mutant in read_all()}


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f"]({page.name})" not in index] == []
