"""The list of oracles in the shared suites must match the names of the tests."""

from __future__ import annotations

from multilock.testing.conformance import SUITES
from tests.oracles import CONFORMANCE


def test_every_oracle_of_the_shared_suites_is_one_of_their_tests() -> None:
    assert sorted(CONFORMANCE - {name for suite in SUITES for name in vars(suite)}) == []
