"""Every invariant of clients that share a name has a mutant (a seeded defect) on every backend, which shows that tests
check the invariant.

Other schemes of a backend count as that backend. ``redlock://`` has no readers and permits, so it needs mutants only
for exclusive locks.
"""

from __future__ import annotations

import pytest

from multilock.registry import OURS
from tests.mutants.__main__ import INVARIANTS, misfits, read_all

BACKENDS = sorted({ours.module.removeprefix("multilock_") for ours in OURS.values()})
MUTANTS = read_all()
#: There is one mutant for each rule and backend. A new mutant of a rule replaces the present one (docs/decisions/0046).
AT_MOST = 250


@pytest.mark.parametrize("invariant", INVARIANTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_invariant_has_a_seeded_defect_on_every_backend(backend: str, invariant: str) -> None:
    assert [each.name for each in MUTANTS if each.invariant == invariant and each.name.startswith(f"{backend}-")]


def test_every_seeded_defect_of_an_invariant_names_an_existing_one() -> None:
    assert [each.name for each in MUTANTS if each.invariant not in (None, *INVARIANTS)] == []


def test_there_are_at_most_250_seeded_defects() -> None:
    assert len(MUTANTS) <= AT_MOST


def test_every_seeded_defect_fits_the_code() -> None:
    assert misfits(MUTANTS) == []


def test_no_two_seeded_defects_have_the_same_name() -> None:
    names = [each.name for each in MUTANTS]
    assert sorted(set(names)) == sorted(names)
