"""The lock on a majority of several independent Redis primaries: ``redlock://``.

This is Redlock as Redis documents it (https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/), with
fencing tokens, queues and pushes. Every server keeps the lock, a queue and the newest stamp of each name. A claim asks
all servers at once. A server that admits the claim votes for it until the lease ends. The vote has a *stamp*, a number
greater than every earlier stamp. A claim holds the lock if a majority of servers vote for it with the same stamp, which
is then its fencing token. This takes one round trip.

A waiter has nearly the same place in all queues, so after a release all servers hand the name to the same waiter. If
the votes are split, a minority gives way to earlier claims after a few milliseconds. A server that has restarted may
have forgotten its leases, so its votes do not count until all those leases have expired.

The modules, with the names that they define:

* `votes` has the record of one claim at all servers, the `Evidence`. It does no I/O.
* `connections` asks all servers at once. A `Fan` has one `Lane` (a connection) to each server.
* `acquire_release` acquires and releases in a thread, `event_loop` on an event loop.
* `renewal` extends the held leases.
* `background_thread` has the client's background thread, the `Clerk`.
* `notices` counts the pushes of the servers, and asks the servers to report losses.
* `servers` makes the subscriptions.
* `restarts` decides when a restarted server counts again.
* `inspection` serves operators.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

from multilock import BackendUnavailable, ConfigurationError
from multilock.backend import Busy, Capabilities, Channel, Claim, Finding, Granted, Held, LockInfo, Notices, Returned
from multilock.options import number, reject_unknown, ttl_of
from multilock.timing import JITTER, heartbeat, liveness
from multilock_redis.connect_errors import speaks_tls
from multilock_redis.endpoints import OPTIONS, endpoints_of_clients, endpoints_of_redlock, keyspace
from multilock_redis.keys import Keyspace
from multilock_redis.node import Node
from multilock_redis.redlock.acquire_release import Rounds
from multilock_redis.redlock.event_loop import Channel as FanChannel
from multilock_redis.redlock.inspection import Inspection
from multilock_redis.redlock.renewal import Renewal
from multilock_redis.redlock.restarts import Guarded
from multilock_redis.transport import Endpoint
from multilock_redis.wire import pack

__all__ = ["RedlockBackend", "open_redlock"]

TTL_MIN = 0.1  # seconds


def open_redlock(url: str, scheme: str, options: Mapping[str, object]) -> RedlockBackend:
    """Return the backend of ``redlock://h1,h2,h3[/db]`` or ``redlocks://…``.

    The options are those of ``redis://`` and these:

    * ``client`` is a list of ``redis.Redis``, one for each server.
    * ``restart_guard`` is the time in seconds for which a restarted server does not count, and also the longest ttl.
      The default is the client's ttl. With 0 a restarted server counts at once, and any ttl is allowed.

    Raises ConfigurationError if an option is wrong, if there are fewer than two servers, or if a server is named twice.
    """
    reject_unknown(options, (*OPTIONS, "client", "restart_guard"), scheme)
    keys, ttl = keyspace(options, scheme), ttl_of(options)
    if "client" in options:
        endpoints = endpoints_of_clients(url, options["client"], options)
    else:
        endpoints = endpoints_of_redlock(url, scheme, options)
    names = [endpoint.name for endpoint in endpoints]
    if len(names) < 2:
        raise ConfigurationError(f"{scheme}:// takes three or five servers, as in {scheme}://h1,h2,h3: one is redis://")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(f"{', '.join(twice)} is named twice: each server has one vote")
    guard = number(float, options.get("restart_guard", ttl))
    if guard is None or not 0 <= guard < math.inf:
        raise ConfigurationError("restart_guard must be seconds, or 0 for servers that never forget")
    return RedlockBackend(scheme, endpoints, keys, ttl=ttl, guard=guard)


class RedlockBackend:
    """See `multilock.backend.Backend` for what each method promises."""

    spi_version = 1

    def __init__(self, scheme: str, endpoints: Sequence[Endpoint], keys: Keyspace, *, ttl: float, guard: float) -> None:
        self.scheme = scheme
        self._endpoints = [Guarded.around(endpoint, guard) for endpoint in endpoints]
        self._keys = keys
        self._former: Rounds | None = None
        self._tls = any(speaks_tls(endpoint.name) for endpoint in endpoints)
        self.capabilities = Capabilities(
            fencing=True,
            fencing_scope=(
                "unless a majority of the servers loses the token's key, or a minority loses it and the clocks of the "
                "others differ by more than the time since the last grant"
            ),
            fair=True,
            push_wait=True,
            push_loss=True,
            cross_host=True,
            survives_failover=True,
            ttl_min=TTL_MIN,
            # With a longer ttl, a restarted server could count again although a forgotten lease is still valid.
            ttl_max=max(TTL_MIN, math.ceil(guard * 1000) / 1000) if guard else 365 * 86400.0,
            why_ttl_max=f"restart_guard is {guard:g} s: give all clients one as long as the longest ttl"
            if guard
            else "",
            ttl_step=0.001,
            takeover_bound=max(ttl, liveness(ttl)) + (1 + JITTER) * heartbeat(ttl),
            hold_at_least=True,
            why_one="two who share a name may have it from majorities of which no server knows both",
        )

    def __repr__(self) -> str:
        return f"<RedlockBackend {', '.join(endpoint.name for endpoint in self._endpoints)}>"

    def open(self, notices: Notices) -> None:
        if self._former:
            self._former.drop()
        Guarded.introduce(self._endpoints)
        self.rounds = self._former = Rounds(self.scheme, self._endpoints, self._keys, notices)
        self.servers = self.rounds.servers
        self._inspection = Inspection(self.servers)

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        return self.rounds.attempt(claim, join, within)

    def channel(self, within: float) -> Channel | None:
        fan = self.rounds.pool.make()
        descriptor = None if self._tls else fan.fileno()  # a TLS connection may have to write in order to read
        if descriptor is None:
            fan.close()
            return None
        fan.ready(self.servers.now() + within)
        return FanChannel(self.rounds, fan, descriptor)

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        return self.rounds.release(claim, unsure, within)

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        return self.rounds.release(claim, unsure, within, seconds)

    def renew(
        self, group: Hashable, held: Sequence[Held], within: float
    ) -> Sequence[Granted | BackendUnavailable | None]:
        return Renewal(self.rounds, held).ask(within)

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        self.rounds.pushes.watch(held, within)

    def follow(self, names: frozenset[str], within: float) -> bool:
        def follow(node: Node, within: float) -> bool:
            return node.listener.follow(names, within)

        # Any server may be in the next majority, so each must push the changes.
        told = self.servers.ask_most(follow, within, "follow it", everybody=True)
        if len(told) < len(self._endpoints):
            raise BackendUnavailable("not every server pushes changes: asked again", backend=self.scheme, unknown=False)
        return all(told.values())

    def inspect(self, name: str, within: float) -> LockInfo | None:
        return self._inspection.inspect(name, within)

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        return self._inspection.inspect_all(prefix, within)

    def force_release(self, name: str, within: float) -> bool:
        return self._inspection.force_release(name, within)

    def diagnose(self, within: float) -> list[Finding]:
        return self._inspection.diagnose(within)

    def ping(self, within: float) -> None:
        def ping(node: Node, within: float) -> None:
            node.connections.call(pack("PING"), within)

        self.servers.ask_most(ping, within, "answer")

    def close(self) -> None:
        self.rounds.close()
