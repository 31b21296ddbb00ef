"""Every cell of the table in docs/interoperability.md is true. `make test` tries the column of `lock`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import multilock
from multilock import Client
from tests.interop.table import COLUMNS, in_page, printed, rows_of, try_pair, url_of
from tests.interop.theirs import BACKENDS

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

ROWS = rows_of(in_page())
numbers = itertools.count()
Start = Callable[[str], tuple[Any, Client]]


@pytest.fixture(scope="module")
def place() -> Iterator[Start]:
    """Start a server of this kind and a client. All pairs use them."""
    started: dict[str, tuple[Any, Client]] = {}
    with ExitStack() as stack:

        def place(scheme: str) -> tuple[Any, Client]:
            if scheme not in started:
                server = stack.enter_context(BACKENDS[scheme][0]())
                started[scheme] = server, stack.enter_context(multilock.connect(url_of(server, scheme), ttl=10))
            return started[scheme]

        yield place


def test_the_table_has_every_lock_of_other_programs_and_of_multilock() -> None:
    assert list(ROWS) == [(scheme, theirs) for scheme, (_, locks) in BACKENDS.items() for theirs in locks]
    assert printed(ROWS) == in_page()


@pytest.mark.parametrize(
    "column", [each if each == "`lock`" else pytest.param(each, marks=pytest.mark.rare) for each in COLUMNS]
)
@pytest.mark.parametrize(("scheme", "theirs"), ROWS)
def test_each_cell_states_the_measured_result(place: Start, scheme: str, theirs: str, column: str) -> None:
    server, client = place(scheme)
    expected = ROWS[scheme, theirs][column]
    make = BACKENDS[scheme][1][theirs]
    assert try_pair(client, server, make, column, f"cell{next(numbers)}", expected) == expected
