"""Questions about keys that both the recipe and the notices ask."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from multilock_etcd import messages as m
from multilock_etcd.transport import Transport, calls

__all__ = ["AT_ONCE", "missing", "revision"]

AT_ONCE = 100  # operations in a transaction; etcd takes 128


def revision(transport: Transport, within: float) -> int:
    """The present one, as a majority agrees."""
    said, _ = transport.call(calls.TXN, m.TxnRequest(), within)
    now: int = said.header.revision
    return now


def missing(
    transport: Transport, keys: Sequence[tuple[bytes, int | None, Hashable]], within: float
) -> tuple[set[bytes], int]:
    """Those of these keys, `AT_ONCE` at most, that do not exist any more at their create_revision, or have moved from
    their lease to another; and the present revision: a watch from there on misses nothing."""
    reads = [m.RequestOp(request_range=m.RangeRequest(key=key, keys_only=True)) for key, _, _ in keys]
    said, _ = transport.call(calls.TXN, m.TxnRequest(success=reads), within)
    gone: set[bytes] = set()
    for (key, created, lease), answer in zip(keys, said.responses, strict=True):
        found = answer.response_range.kvs
        # An operator's put leaves it without a lease, and takes it from nobody.
        if not found or found[0].create_revision != created or found[0].lease not in (lease, 0):
            gone.add(key)
    return gone, said.header.revision
