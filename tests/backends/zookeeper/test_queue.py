"""The queue of a name: parsing a list of nodes, and choosing those that matter to a claim."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kazoo.protocol.serialization import GetChildren, int_struct

from multilock.backend import Claim
from multilock_zookeeper.queue import Contender, awaited, contenders, refusal, refusal_of_permits, relevant
from multilock_zookeeper.transport import _Listing

MARKS = ["__lock__", "__rlock__", "!p3__lock__", "!p2__lock__", "-lock-", "__READ__", "_lock__"]
NUMBERS = ["-1000000001", "-000000012", "0000000002", "0000000009", "00000000x0"]
LOCK = Claim("n", "lock", "own", "owner", 6.0, True, True, "me")
CLAIMS = {
    "__lock__": LOCK,
    "__rlock__": LOCK._replace(kind="read"),
    "!p3__lock__": LOCK._replace(kind="permit", permits=3),
}

names = st.text(st.characters(exclude_characters="\0/", codec="utf-8"), min_size=1, max_size=300)


@given(st.lists(names))
def test_a_listing_is_read_as_kazoo_reads_it(children: list[str]) -> None:
    encoded = [child.encode() for child in children]
    reply = b"head" + int_struct.pack(len(encoded)) + b"".join(int_struct.pack(len(one)) + one for one in encoded)
    assert _Listing.deserialize(reply, 4) == GetChildren.deserialize(reply, 4) == children


@pytest.mark.oracle
@pytest.mark.parametrize("mark", CLAIMS)
def test_siblings_that_are_left_out_change_no_decision(mark: str) -> None:
    asks = CLAIMS[mark]
    others = ["locks", *(f"{number}{mark}{number}" for mark in MARKS for number in NUMBERS)]
    for pair, number in product(combinations(others, 2), ("-1000000010", "-000000010", "0000000005", "1000000001")):
        own = f"own{mark}{number}"
        children = [*pair, own]
        kept = relevant("kazoo", asks, own, children)
        assert _decision(asks, own, kept) == _decision(asks, own, children), children


def _decision(asks: Claim, own: str, children: Sequence[str]) -> object:
    """Return why the claim with the node ``own`` is refused, and whether it must wait."""
    queue = contenders(children)
    at: Contender = next(one for one in queue if one.node == own)
    ahead = queue[: queue.index(at)]
    refused = refusal("kazoo", "/multilock/n", at, queue, children) or refusal_of_permits(asks, ahead)
    return bool(refused), bool(awaited(asks, ahead))
