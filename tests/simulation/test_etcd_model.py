"""Compare the simulated etcd with a real server: replies, refusals, and the events of watches must be the same.

Both execute the same random calls. Most calls are those of the product's own recipe, whose requests and watches go to
both servers. Other calls are those of operators, and requests that arrive a second time.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from multilock import MultilockError
from multilock.backend import Claim, Granted
from multilock.model import owner_text
from multilock.testing.conformance.spi import Ear
from multilock_etcd import transactions, wire
from multilock_etcd.acquire_release import EtcdRecipe
from multilock_etcd.inspection import EtcdInspection
from multilock_etcd.keys import EtcdKeyspace, Range
from multilock_etcd.renewal import EtcdRenewal
from multilock_etcd.sessions import EtcdSessions
from multilock_etcd.sweep import EtcdSweep
from multilock_etcd.transport import LeaseMissing, Method, _translate, calls
from tests.servers_etcd import EtcdServer
from tests.simulation.etcd_store import Refused, Store, Stream

CALLS, SEEDS = 200, 16
CLIENTS, NAMES = 3, ["a", "b"]
KINDS = [("lock", 0), ("lock", 0), ("write", 0), ("read", 0), ("read", 0), ("permit", 2), ("permit", 2), ("permit", 3)]
WITHIN = 20.0  # seconds for a request, or for the events of a watch
TTL = 600.0  # seconds; long enough that no lease expires during a test
COMPACT = "/etcdserverpb.KV/Compact"
SLOW = ("--heartbeat-interval", "100", "--election-timeout", "1000")  # etcd's defaults, which decide the smallest ttl


class Watching:
    """The reports of the watches of a stream, by watch id. A reply with several events counts as several reports."""

    def __init__(self) -> None:
        self.told: dict[int, list[object]] = {}
        self.count = 0
        self.last: dict[int, int] = {}  # watch id -> the revision of its last event

    def hear(self, answer: Any) -> None:
        told = self.told.setdefault(answer.watch_id, [])
        if answer.created:
            told.append(("created", answer.header.revision))
        for event in answer.events:
            told.append((event.type, event.kv.SerializeToString(deterministic=True)))
        if answer.canceled:
            told.append(("canceled", answer.compact_revision))
        if answer.events:
            last = self.last.get(answer.watch_id, 0)
            assert last < answer.events[0].kv.mod_revision, "an answer has all events of a revision or none"
            self.last[answer.watch_id] = answer.events[-1].kv.mod_revision
        self.count += answer.created + len(answer.events) + answer.canceled


class Real:
    """A connection to a real server, with one watch stream."""

    def __init__(self, server: EtcdServer) -> None:
        self.server = server
        self._channel = grpc.insecure_channel(server.endpoint)
        self.watching = Watching()
        self._changed = threading.Condition()
        self._outgoing: list[Any] = []
        self._ended = False
        open_stream = self._channel.stream_stream(
            calls.WATCH.path,
            request_serializer=wire.WatchRequest.SerializeToString,
            response_deserializer=wire.WatchResponse.FromString,
        )
        self._stream = open_stream(self._requests())
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def execute(self, path: str, answer: Any, request: bytes) -> Any:
        stub = self._channel.unary_unary(path, response_deserializer=answer and answer.FromString)
        return stub(request, timeout=WITHIN, wait_for_ready=True)

    def watch(self, request: Any) -> None:
        with self._changed:
            self._outgoing.append(request)
            self._changed.notify_all()

    def _requests(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._outgoing or self._ended)
                if self._ended:
                    return
                request = self._outgoing.pop(0)
            yield request

    def _read(self) -> None:
        with suppress(grpc.RpcError):
            for answer in self._stream:
                with self._changed:
                    self.watching.hear(answer)
                    self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        """Wait until the watches have reported this many events."""
        with self._changed:
            self._changed.wait_for(lambda: self.watching.count >= count, WITHIN)

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._stream.cancel()
        self._channel.close()
        self._reader.join()


class Both:
    """Sends each request to the real server and to the model, and compares the replies. It replaces a transport."""

    name, silent = "etcd", False

    def __init__(self, real: Real) -> None:
        self.real = real
        self.model = Store(time.monotonic)
        self.model.revision = transactions.present_revision(_Alone(real), WITHIN)  # type: ignore[arg-type]
        self.watching = Watching()
        self.stream = Stream(self.watching.hear)
        self.model.streams[self.stream] = None
        self.sent: list[tuple[Method, Any]] = []
        self.where = ""
        self.watches = 0
        self.compact()

    def call(self, method: Method, request: Any, within: float) -> tuple[Any, float]:
        sent_at = time.monotonic()
        self.sent.append((method, request))
        error: Exception | None = None
        try:
            expected = self.real.execute(method.path, method.answer, request.SerializeToString())
        except grpc.RpcError as raised:
            error, expected = raised, (raised.code(), raised.details())
        if method is calls.GRANT and error is None:
            request = wire.LeaseGrantRequest(TTL=request.TTL, ID=expected.ID)
        try:
            said = self.model.execute(method.path, request)
        except Refused as refused:
            said = refused.code, refused.details
        assert comparable(said) == comparable(expected), f"{self.where}: {method.path} {request}"
        self.compare_watches()
        if error is not None:
            raise _translate(error, self.name)
        return expected, sent_at

    def watch(self, key: bytes, end: bytes, start: int, *, all_events: bool = False) -> int:
        self.watches += 1
        create = wire.WatchCreateRequest(
            key=key,
            range_end=end,
            start_revision=start,
            filters=[] if all_events else [wire.NOPUT],
            watch_id=self.watches,
        )
        self._watch(wire.WatchRequest(create_request=create))
        return self.watches

    def end_watch(self, number: int) -> None:
        self._watch(wire.WatchRequest(cancel_request=wire.WatchCancelRequest(watch_id=number)))

    def _watch(self, request: Any) -> None:
        self.real.watch(request)
        self.model.hear(self.stream, request)
        self.model.catch_up()
        self.compare_watches()

    def compare_watches(self) -> None:
        self.real.wait_for(self.watching.count)
        assert self.real.watching.told == self.watching.told, self.where

    def compact(self) -> None:
        # The server would end a watch that has not reported past events yet, but the model would not.
        wait_until(lambda: self.real.server.metric("etcd_debugging_mvcc_slow_watcher_total") == 0)
        with suppress(grpc.RpcError):  # the server refuses to compact a revision twice
            # "physical": the reply comes after the removal, so that a watch cannot still report what is being removed.
            self.real.execute(COMPACT, None, b"\x08" + varint(self.model.revision) + b"\x10\x01")
        self.model.compact()


class _Alone:
    """A transport that sends requests only to the real server."""

    def __init__(self, real: Real) -> None:
        self._real = real

    def call(self, method: Method, request: Any, within: float) -> tuple[Any, float]:
        return self._real.execute(method.path, method.answer, request.SerializeToString()), 0.0


class Watcher:
    """Creates the watches that a claim needs on both servers. It replaces the product's watcher."""

    def __init__(self, both: Both) -> None:
        self._both = both
        self._of: dict[str, list[int]] = {}

    def wait(self, claim_id: str, ranges: Collection[Range], start: int) -> None:
        self.stop(claim_id)
        self._of[claim_id] = [self._both.watch(key, end, start) for key, end in ranges]

    def count(self, keys: Range, waiter: Any, position: object) -> None:
        self.wait(waiter.claim.id, [keys], 0)

    def count_no_more(self, claim_id: str) -> None:
        self.stop(claim_id)

    def stop(self, claim_id: str) -> None:
        for number in self._of.pop(claim_id, []):
            if number in self._both.stream.watches:
                self._both.end_watch(number)

    def covers(self, claim_id: str) -> bool:
        return False


class Ours:
    """One client of the product, without its kernel."""

    def __init__(self, number: int, both: Both, prefix: str) -> None:
        self.ear = Ear()
        self.client = f"{number:016x}"
        self.keys = EtcdKeyspace(prefix)
        changes = transactions.EtcdTransactions(self.keys, both, self.ear.now)  # type: ignore[arg-type]
        sessions = EtcdSessions(both, self.ear)  # type: ignore[arg-type]
        watcher: Any = Watcher(both)
        sweep = EtcdSweep(self.keys, changes, self.ear.now)
        self.recipe = EtcdRecipe(self.keys, both, changes, sessions, watcher, sweep, self.ear)  # type: ignore[arg-type]
        self.renewal = EtcdRenewal(self.keys, sessions, watcher, sweep, self.ear)
        self.inspection = EtcdInspection(self.keys, both, changes, sessions, self.ear.now)  # type: ignore[arg-type]
        self.claims: dict[Claim, Granted | None] = {}

    def claim(self, chance: random.Random, name: str) -> Claim:
        kind, permits = chance.choice(KINDS)
        claim_id = f"{self.client}.{chance.randbytes(16).hex()}"
        owner = owner_text(claim_id, kind, "host", 1, "me", TTL)
        return Claim(name, kind, claim_id, owner, TTL, chance.random() < 0.8, True, "me", permits)

    def acts(self, chance: random.Random) -> None:
        """Execute a random call of the kernel or of an operator."""
        name, share = chance.choice(NAMES), chance.random()
        if share < 0.35 or not self.claims:
            self.attempt(self.claim(chance, name), chance.random() < 0.8)
            return
        claim, unsure = chance.choice(list(self.claims)), chance.random() < 0.4
        granted = self.claims[claim]
        if share < 0.55:
            if granted is None:
                self.attempt(claim, True)
        elif share < 0.8:
            del self.claims[claim]
            self.recipe.release(claim, granted, unsure, WITHIN)
        elif share < 0.87 and granted is not None:
            del self.claims[claim]
            self.recipe.rest(claim, granted, unsure, TTL, WITHIN)
        elif share < 0.93 and granted is not None:
            held = [(each, had) for each, had in self.claims.items() if had and had.group == granted.group]
            self.renewal.renew(granted.group, held, WITHIN)
        elif share < 0.95:
            self.inspection.force_release(name, WITHIN)
        elif share < 0.98:
            self.inspection.inspect(name, WITHIN)
        else:
            list(self.inspection.inspect_all("", WITHIN))

    def attempt(self, claim: Claim, join: bool) -> None:
        self.claims[claim] = None
        answer = self.recipe.attempt(claim, join, WITHIN)
        if isinstance(answer, Granted):
            self.claims[claim] = answer


def comparable(reply: Any) -> object:
    """Return the parts of a reply that the model must give as well."""
    if isinstance(reply, tuple):
        return reply
    reply = type(reply).FromString(reply.SerializeToString())
    revision = reply.header.revision
    reply.ClearField("header")
    for each in getattr(reply, "responses", ()):
        for _, part in each.ListFields():
            part.ClearField("header")
    if isinstance(reply, wire.LeaseTimeToLiveResponse):
        reply.TTL = reply.grantedTTL if reply.grantedTTL - 60 < reply.TTL < reply.grantedTTL else reply.TTL
    return revision, reply.SerializeToString(deterministic=True)


def varint(number: int) -> bytes:
    low = [number >> shift & 127 for shift in range(0, max(1, number.bit_length()), 7)]
    return bytes([*(each | 128 for each in low[:-1]), low[-1]])


def stray(chance: random.Random, both: Both, prefix: bytes) -> None:
    """Execute an operator's request, or an earlier request that arrives again."""
    keys = [key for key in both.model.rows if key.startswith(prefix)]
    key, share = chance.choice(keys or [prefix + b"a/x"]), chance.random()
    if share < 0.4 and both.sent:
        both.call(*chance.choice(both.sent), WITHIN)
    elif share < 0.5:
        put = {"request_put": {"key": key, "value": chance.randbytes(3)}}
        both.call(calls.TXN, wire.TxnRequest(success=[put]), WITHIN)
    elif share < 0.6:
        end = chance.choice([b"", prefix + b"a0", prefix + b"b/~"])
        both.call(calls.DELETE, wire.DeleteRangeRequest(key=key, range_end=end), WITHIN)
    elif share < 0.65 and both.model.leases:
        lease = chance.choice([*both.model.leases, 5])
        both.call(calls.TIME_TO_LIVE, wire.LeaseTimeToLiveRequest(ID=lease), WITHIN)
        both.call(calls.REVOKE, wire.LeaseRevokeRequest(ID=lease), WITHIN)
    elif share < 0.75:
        both.compact()
    elif share < 0.85:
        old, new = both.model.compacted + chance.randrange(-1, 2), both.model.revision + 2
        start = chance.choice([0, max(1, old), max(1, old), new, both.model.revision - chance.randrange(6)])
        both.watch(key, chance.choice([b"", prefix + b"~"]), start, all_events=chance.random() < 0.5)
    else:
        order = chance.choice([0, wire.ASCEND, wire.DESCEND])
        sort = {"sort_target": wire.SORT_BY_CREATION, "sort_order": order} if order else {}
        limit, newest = chance.choice([0, 1, 2]), chance.choice([0, both.model.revision - chance.randrange(9)])
        parts = {"limit": limit, "max_create_revision": newest, "keys_only": chance.random() < 0.5, **sort}
        both.call(calls.RANGE, wire.RangeRequest(key=prefix, range_end=prefix + b"~", **parts), WITHIN)


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer(*SLOW) as server:
        yield server


@pytest.fixture
def real(server: EtcdServer) -> Iterator[Real]:
    real = Real(server)
    yield real
    real.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_model_of_etcd_answers_our_requests_as_a_server_does(
    real: Real, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "NEAR", seed % 3)  # a small number, so that most waiters count as far behind
    chance, prefix = random.Random(seed), f"{seed}/"
    both = Both(real)
    clients = [Ours(number, both, prefix) for number in range(CLIENTS)]
    for number in range(CALLS):
        both.where = f"seed {seed}, call {number}"
        with suppress(MultilockError, LeaseMissing):
            if chance.random() < 0.15:
                stray(chance, both, prefix.encode())
            else:
                chance.choice(clients).acts(chance)
    for watch in list(both.stream.watches):
        both.end_watch(watch)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WITHIN
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.slow
def test_the_model_ends_a_lease_with_all_its_keys_as_a_server_does(real: Real) -> None:
    both, keys = Both(real), [b"lease/b", b"lease/a"]
    said, _ = both.call(calls.GRANT, wire.LeaseGrantRequest(TTL=1), WITHIN)
    assert said.TTL == 2
    puts = [{"request_put": {"key": key, "lease": said.ID}} for key in keys]
    both.call(calls.TXN, wire.TxnRequest(success=puts), WITHIN)
    both.watch(b"lease/", b"lease0", 0)
    wait_until(lambda: real.watching.count > both.watching.count)
    assert both.model.leases[said.ID].until <= time.monotonic()
    both.model.end_lease(said.ID)
    both.compare_watches()
    both.call(calls.KEEP_ALIVE, wire.LeaseKeepAliveRequest(ID=said.ID), WITHIN)
    both.call(calls.TIME_TO_LIVE, wire.LeaseTimeToLiveRequest(ID=said.ID), WITHIN)
    with pytest.raises(LeaseMissing):
        both.call(calls.TXN, wire.TxnRequest(success=puts), WITHIN)


@pytest.mark.slow
def test_the_last_second_of_a_lease_counts_as_no_time_left(real: Real) -> None:
    both = Both(real)
    said, _ = both.call(calls.GRANT, wire.LeaseGrantRequest(TTL=3), WITHIN)
    request = wire.LeaseTimeToLiveRequest(ID=said.ID)
    asked = calls.TIME_TO_LIVE.path, wire.LeaseTimeToLiveResponse, request.SerializeToString()
    wait_until(lambda: real.execute(*asked).TTL < 1)
    assert both.model.execute(calls.TIME_TO_LIVE.path, request).TTL < 1
    assert real.execute(*asked).TTL == 0


@pytest.mark.slow
def test_the_model_keeps_keys_and_leases_over_a_restart_as_a_server_does(server: EtcdServer, real: Real) -> None:
    both = Both(real)
    said, _ = both.call(calls.GRANT, wire.LeaseGrantRequest(TTL=100), WITHIN)
    put = {"request_put": {"key": b"kept/a", "lease": said.ID}}
    both.call(calls.TXN, wire.TxnRequest(success=[put]), WITHIN)
    wait_until(lambda: _time_left(real, said.ID) < 99)
    server.restart()
    both.model.extend_leases(1.0)
    again = Both(Real(server))
    again.model.rows, again.model.leases = both.model.rows, both.model.leases
    again.model._keys = both.model._keys
    try:
        assert _time_left(again.real, said.ID) >= 99
        again.call(calls.RANGE, wire.RangeRequest(key=b"kept/a"), WITHIN)
    finally:
        again.real.close()


def _time_left(real: Real, lease: int) -> int:
    request = wire.LeaseTimeToLiveRequest(ID=lease).SerializeToString()
    left: int = real.execute(calls.TIME_TO_LIVE.path, wire.LeaseTimeToLiveResponse, request).TTL
    return left
