"""Locks on Consul: ``consul://``, ``consuls://`` (TLS), or a client of py-consul.

`acquire_release` is the algorithm, `renewal` renews held locks, and `reader_locks` and `semaphore` add shared locks.
`keys` lays out the keys of a name, `sessions` keeps the sessions that the locks depend on, and `sweep` deletes keys
that were locked by a late request. `transactions` and `transport` carry the requests, `wire` reads HTTP, and `notices`
receives what the servers push. `inspection` shows operators who holds a lock, and `diagnosis` reports what weakens a
lock on these servers. The lock delay of a key is the time for which the servers refuse to lock it after the session
that locked it has ended.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote

import consul.base

from multilock import BackendUnavailable, ConfigurationError
from multilock.backend import Busy, Capabilities, Claim, Finding, Granted, Held, LockInfo, Notices, Returned
from multilock.options import (
    TLS_OPTIONS,
    client_alone,
    number,
    prefix_of,
    reject_unknown,
    text,
    tls_context,
    tls_only,
    ttl_of,
    verifies,
)
from multilock_consul.acquire_release import Recipe
from multilock_consul.diagnosis import diagnose
from multilock_consul.inspection import Inspection
from multilock_consul.keys import Keys
from multilock_consul.notices import Listener
from multilock_consul.renewal import Renewal
from multilock_consul.sessions import LOCK_DELAY_MAX, OWN, Sessions, safe_delay
from multilock_consul.transactions import Transactions
from multilock_consul.transport import Address, Agents

__all__ = ["ConsulBackend", "open_backend"]

OPTIONS = ("token", "lock_delay", *TLS_OPTIONS, "client")
TTL_MIN = 10.0  # seconds; the default of the servers' session_ttl_min
TTL_FLOOR = 0.1
TTL_MAX = 86400.0
DELAY_SEEN = 0.5  # seconds after the end of a lock delay until a waiter has tried again, at the latest
CLOSE_WITHIN = 0.5  # seconds for which a silent server may delay close()


def open_backend(url: str, options: Mapping[str, object]) -> ConsulBackend:
    """Return the backend for ``consul://host[:port][,host[:port]…]`` (port 8500) or ``consuls://…`` (port 8501).

    The first agent that replies is used. If that agent fails, the next one is used. The options are:

    * ``token`` is the ACL token. Without it the environment's ``CONSUL_HTTP_TOKEN`` is used.
    * ``lock_delay`` is in seconds, from 0 to 60. The default is 5 less than the ttl, and at least 1.
    * ``ca``, ``cert`` and ``key`` are files for ``consuls://``. With ``tls_verify=no`` any certificate is accepted.
    * ``client`` is a ``consul.Consul``. This backend opens its own connections with the client's address, token,
      datacentre and TLS settings, and never closes the client.

    Raises `ConfigurationError` if the options contradict each other. Sends no request.
    """
    scheme = url.partition("://")[0]
    reject_unknown(options, OPTIONS, scheme)
    prefix = prefix_of(options)
    if prefix.startswith("/") or "//" in prefix:
        raise ConfigurationError(f"prefix {prefix!r}: a key of Consul cannot begin with '/' or contain '//'")
    access = _access_of_client(url, options) if "client" in options else _access_of_url(url, scheme, options)
    return ConsulBackend(
        scheme,
        access,
        prefix=prefix,
        ttl=ttl_of(options),
        identity=cast("str", options.get("identity", "")),
        lock_delay=_lock_delay(options),
    )


@dataclass(frozen=True, slots=True, repr=False)
class AgentAccess:
    """The addresses of one client's agents, and the TLS settings, token and datacentre of its requests."""

    addresses: Sequence[Address]
    tls: ssl.SSLContext | None = None
    token: str | None = None
    dc: str | None = None


def _access_of_url(url: str, scheme: str, options: Mapping[str, object]) -> AgentAccess:
    where = url.partition("://")[2].rstrip("/")
    if "@" in where:
        raise ConfigurationError(f"{scheme}:// takes no user in its URL: give token=")
    if "/" in where:
        raise ConfigurationError(f"{scheme}:// takes no path in its URL: give the beginning of all keys as prefix=")
    files = tls_only(options, scheme, "consuls")
    if "key" in files and "cert" not in files:
        raise ConfigurationError("key= is the key of a certificate: give cert= too")
    port = 8501 if scheme == "consuls" else 8500
    return AgentAccess(
        [_address(scheme, each, port) for each in where.split(",")] if where else [Address("localhost", port)],
        tls=_tls(files, verify=verifies(options)) if scheme == "consuls" else None,
        token=_token(options.get("token", os.environ.get("CONSUL_HTTP_TOKEN"))),
    )


def _access_of_client(url: str, options: Mapping[str, object]) -> AgentAccess:
    scheme, _, rest = url.partition("://")
    client: Any = options["client"]
    if not isinstance(client, consul.base.Consul):
        raise ConfigurationError(
            f"client= of {scheme}:// takes a consul.Consul, not {type(client).__module__}.{type(client).__qualname__}"
        )
    client_alone(options, ("token", *TLS_OPTIONS))
    http = client.http
    tls = None
    if http.scheme == "https":
        cert, key = http.cert if isinstance(http.cert, (tuple, list)) else (http.cert, None)
        ca = http.verify if isinstance(http.verify, str) else None
        tls = _tls({"ca": ca, "cert": cert, "key": key}, verify=bool(http.verify))
    addresses = [Address(http.host.strip("[]"), int(http.port))]  # py-consul needs the brackets for its URLs
    if rest and _access_of_url(url, scheme, {}).addresses != addresses:
        raise ConfigurationError(
            f"client= is connected to {http.host}:{http.port}, not to the agent of the URL: give {scheme}://"
        )
    return AgentAccess(addresses, tls, _token(client.token), client.dc)


def _address(scheme: str, said: str, port: int) -> Address:
    host, colon, digits = said.rpartition(":")
    if said.endswith("]") or not colon:
        host, digits = said, str(port)
    bare = host.removeprefix("[").removesuffix("]")
    if not bare:  # if we guessed a host, a stranger's server could receive the token
        raise ConfigurationError(f"a host in the URL of {scheme}:// is empty: {scheme}:// alone is localhost")
    if host != (f"[{bare}]" if ":" in bare else bare):
        raise ConfigurationError(f"an IPv6 address in the URL of {scheme}:// needs brackets: [::1], or [::1]:{port}")
    if not digits.isdigit() or not 0 < int(digits) < 65536:
        raise ConfigurationError(f"the port in the URL of {scheme}:// must be a number from 1 to 65535")
    return Address(unquote(bare), int(digits))


def _tls(files: Mapping[str, str | None], *, verify: bool = True) -> ssl.SSLContext:
    ca = files.get("ca")
    if ca is not None and os.path.isdir(ca):
        return tls_context({**files, "ca": None}, folder=ca, verify=verify)
    return tls_context(files, verify=verify)


def _token(value: object) -> str | None:
    if not value:
        return None
    token = text("token", value)
    if not (token.isascii() and token.isprintable()):
        raise ConfigurationError("token has a character that no token of Consul has")
    return token


def _lock_delay(options: Mapping[str, object]) -> Callable[[float], float]:
    """Return a function from a session's ttl to the seconds of its lock delay."""
    if "lock_delay" not in options:
        return safe_delay
    seconds = number(float, options["lock_delay"])
    if seconds is None or not 0 <= seconds <= LOCK_DELAY_MAX:
        raise ConfigurationError(
            f"lock_delay must be 0 to {LOCK_DELAY_MAX:g} seconds, not {options['lock_delay']!r:.60}"
        )
    return lambda ttl: seconds


class ConsulBackend:
    """The `multilock.backend.Backend` for one Consul cluster."""

    spi_version = 1

    def __init__(
        self,
        scheme: str,
        access: AgentAccess,
        *,
        prefix: str,
        ttl: float,
        identity: str,
        lock_delay: Callable[[float], float],
    ) -> None:
        self.scheme = scheme
        self._access = access
        self._prefix = prefix
        self._ttl = ttl
        self._identity = identity
        self._lock_delay = lock_delay
        self._agents: Agents
        self._opened = False
        longest = max(ttl, TTL_MIN)
        self.capabilities = Capabilities(
            fencing=True,
            fencing_scope="unless the servers lose their data: a snapshot was restored, a dev server ended",
            fair=False,
            push_wait=True,
            push_loss=True,
            cross_host=True,
            survives_failover=True,
            ttl_min=TTL_MIN,
            ttl_max=TTL_MAX,
            ttl_step=0.001,
            # A server ends a session after up to twice its ttl.
            takeover_bound=2 * longest + lock_delay(longest) + DELAY_SEEN,
            lock_delay=lock_delay(ttl),
            ttl_floor=TTL_FLOOR,
            hold_at_least=True,
            read_write=True,
            semaphore=True,
        )

    def __repr__(self) -> str:
        return f"<ConsulBackend {self.scheme}://{','.join(map(str, self._access.addresses))}>"

    def open(self, notices: Notices) -> None:
        if self._opened:
            self._agents.close()  # in a forked child this closes descriptors, and sends nothing
        self._opened = True
        access = self._access
        self._agents = Agents(access.addresses, tls=access.tls, token=access.token, dc=access.dc, now=notices.now)
        keys = Keys(self._prefix, self._agents)
        self._listener = Listener(self._agents, keys, notices, self._session_exists, self._session_ended)
        self._sessions = Sessions(
            self._agents,
            keys,
            notices,
            who=self._identity,
            lock_delay=self._lock_delay,
            ended=self._listener.forget_session,
        )
        transactions = Transactions(self._agents, keys)
        self._recipe = Recipe(keys, transactions, self._sessions, notices.now, self._listener.wait)
        self._renewal = Renewal(keys, transactions, self._sessions, notices.now)
        self._inspection = Inspection(self._agents, keys, transactions, self._sessions)

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        return self._recipe.attempt(claim, join, within)

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        # The sessions know exactly which requests of this claim have no reply, so ``unsure`` is not needed.
        self._listener.forget(claim.id)
        return Returned(self._recipe.release(claim, granted, within))

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        self._listener.forget(claim.id)
        return Returned(self._recipe.rest(claim, granted, seconds, within))

    def renew(
        self, group: Hashable, held: Sequence[Held], within: float
    ) -> Sequence[Granted | BackendUnavailable | None]:
        return self._renewal.renew(group, held, within)

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        for claim, granted in held:
            self._listener.hold(claim, cast("str", granted.key), granted.token or 0)
        if group != OWN:  # several locks may share this session, and the listener reports its end for all of them
            self._listener.watch_session(cast("str", group))

    def follow(self, names: frozenset[str], within: float) -> bool:
        return self._listener.follow(names)

    def inspect(self, name: str, within: float) -> LockInfo | None:
        return self._inspection.inspect(name, within)

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        return self._inspection.inspect_all(prefix, within)

    def force_release(self, name: str, within: float) -> bool:
        return self._inspection.force_release(name, within)

    def diagnose(self, within: float) -> list[Finding]:
        return diagnose(self._agents, self._ttl, self.capabilities.lock_delay, within)

    def ping(self, within: float) -> None:
        if not self._agents.api(within).status.leader():
            raise BackendUnavailable("Consul has no leader", unknown=False, backend="consul")

    def close(self) -> None:
        self._listener.close()
        until = self._agents.now() + CLOSE_WITHIN
        try:
            for session in self._sessions.close():
                if (left := until - self._agents.now()) <= 0:
                    break
                with suppress(Exception):  # the session expires
                    self._sessions.destroy(session, left)
        finally:
            self._agents.close()

    def _session_exists(self, session_id: str, within: float) -> bool:
        return self._sessions.exists(session_id, within)

    def _session_ended(self, session_id: str, within: float) -> bool:
        session = self._sessions.get(session_id)
        return session is None or self._sessions.is_gone(session, within)
