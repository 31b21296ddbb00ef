"""The table of slots, and redirections, in the formats of all versions of Redis."""

from __future__ import annotations

from typing import Any

import pytest

from multilock_redis.keys import Keyspace
from multilock_redis.slot_table import SLOTS, Address, SlotTable, key_slot
from multilock_redis.wire import Redirected, refusal

A, B, C = (Address("10.0.0.1", port) for port in (7000, 7001, 7002))


def node(address: Address) -> list[Any]:
    return [address.host.encode(), address.port, b"id", []]


def test_the_slot_table_gives_each_slot_its_primary_and_its_replicas() -> None:
    table = SlotTable.of([[0, 99, node(A), node(C)], [100, SLOTS - 1, node(B)], [50, 50, node(B)]], A)
    assert [table.owner(slot) for slot in (0, 49, 50, 51, 99, 100, SLOTS - 1)] == [A, A, B, A, A, B, B]
    assert table.primaries == (A, B)
    assert table.replicas == {A: [C], B: []}
    assert table.uncovered() == 0


def test_slots_without_a_node_are_counted() -> None:
    table = SlotTable.of([[10, 19, node(A)]], A)
    assert table.owner(9) is None
    assert table.uncovered() == SLOTS - 10


@pytest.mark.parametrize("host", [b"", None, b"?"])
def test_a_missing_host_means_the_node_that_was_asked(host: bytes | None) -> None:
    table = SlotTable.of([[0, 1, [host, 7001]]], A)
    assert table.owner(0) == B


def test_a_moved_slot_has_another_primary_at_once() -> None:
    table = SlotTable.of([[0, SLOTS - 1, node(A)]], A)
    table.moved(5, C)
    assert (table.owner(4), table.owner(5)) == (A, C)
    assert table.primaries == (A, C)


@pytest.mark.parametrize(
    "answer", [b"OK", [1], [[0, 1]], [[0, SLOTS, node(A)]], [[2, 1, node(A)]], [[0, 1, [b"h", b"x"]]], [[0, 1, None]]]
)
def test_a_reply_that_is_not_a_slot_table_is_recognised(answer: Any) -> None:
    with pytest.raises(ValueError, match="which node serves which slot"):
        SlotTable.of(answer, A)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("MOVED 3999 10.0.0.1:6381", (False, 3999, "10.0.0.1", 6381)),
        ("ASK 3999 host-1.example:6381", (True, 3999, "host-1.example", 6381)),
        ("MOVED 1 ::1:7000", (False, 1, "::1", 7000)),
        ("MOVED 1 [::1]:7000", (False, 1, "::1", 7000)),
        ("MOVED 1 :7000", (False, 1, "", 7000)),
        ("MOVED 1 ?:7000", (False, 1, "", 7000)),
    ],
)
def test_a_redirection_is_parsed(text: str, told: tuple[bool, int, str, int]) -> None:
    error = refusal(text, "redis://h:1/0")
    assert isinstance(error, Redirected)
    assert (error.once, error.slot, error.host, error.port) == told


@pytest.mark.parametrize("name", ["a", "invoices/42", "ü{}*", "..."])
def test_all_keys_of_a_name_are_in_one_slot(name: str) -> None:
    keys = Keyspace("multilock/", key_slot)
    lock = keys.lock(name)
    assert {key_slot(b"{%b}:%b" % (lock, part)) for part in (b"queue", b"live", b"token", b"holders", b"gone:1.2")} == {
        keys.slot(name)
    }
    assert Keyspace("multilock/").slot(name) == 0
