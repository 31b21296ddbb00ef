"""Questions about keys that both the recipe and the notices ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from multilock_etcd import messages as m
from multilock_etcd.transport import Transport, calls

__all__ = ["missing", "revision"]

AT_ONCE = 100  # operations in a transaction; etcd takes 128


def revision(transport: Transport, within: float) -> int:
    """The present one, as a majority agrees."""
    said, _ = transport.call(calls.TXN, m.TxnRequest(), within)
    now: int = said.header.revision
    return now


def missing(
    transport: Transport, keys: Sequence[tuple[bytes, int | None]], within: float, now: Callable[[], float]
) -> tuple[set[bytes], int]:
    """Those of these keys that do not exist any more at their create_revision; and the revision of the first answer:
    a watch from there on misses nothing."""
    deadline = now() + within
    gone: set[bytes] = set()
    first = 0
    for start in range(0, len(keys), AT_ONCE):
        chunk = keys[start : start + AT_ONCE]
        reads = [m.RequestOp(request_range=m.RangeRequest(key=key, keys_only=True)) for key, _ in chunk]
        said, _ = transport.call(calls.TXN, m.TxnRequest(success=reads), deadline - now())
        first = first or said.header.revision
        for (key, created), answer in zip(chunk, said.responses, strict=True):
            found = answer.response_range.kvs
            if not found or found[0].create_revision != created:
                gone.add(key)
    return gone, first
