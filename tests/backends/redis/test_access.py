"""Access to the servers of each scheme: certificates, passwords and rights, and the errors for clients without them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

import multilock
from multilock.errors import BackendRejected, BackendUnavailable
from tests.backends.redis.kit import eventually, since
from tests.backends.redis.test_errors import RIGHTS
from tests.servers import RedisServer, free_port
from tests.servers_sentinel import SentinelServer

SCHEMES = ["redis", "redlock", "redis+sentinel", "redis+cluster"]
SECRET = "correct-horse"
WITHIN = 20.0
GUARD = 8.0  # seconds: `restart_guard`


class Place:
    """Servers of one scheme. Each listens with TLS on one port and without TLS on another, or only without TLS."""

    def __init__(self, scheme: str, *options: str, secure: bool = False) -> None:
        self.scheme = scheme
        self._stack = ExitStack()
        count = 3 if scheme == "redlock" else 1
        cluster = ("--cluster-enabled", "yes", *(("--tls-cluster", "yes") if secure else ()))
        options = (*options, *(cluster if scheme == "redis+cluster" else ()))
        self._secured = [str(free_port()) for _ in range(count + 1)] if secure else []
        self.servers = [RedisServer(*options, *self._tls(n)) for n in range(count)]
        self.guard = SentinelServer(lambda: self._monitor(options)) if scheme == "redis+sentinel" else None

    def _tls(self, n: int) -> Sequence[str]:
        return ("--tls-port", self._secured[n]) if self._secured else ()

    def _monitor(self, options: Sequence[str]) -> list[str]:
        primary = self._secured[0] if self._secured else self.servers[0].port
        lines = [f"sentinel monitor m 127.0.0.1 {primary} 1"]
        if self._secured:
            files = [
                f"{name.removeprefix('--')} {file}" for name, file in zip(options[::2], options[1::2], strict=True)
            ]
            lines += [*files, f"tls-port {self._secured[-1]}", "tls-replication yes"]
        return lines

    def connect(
        self, login: str = "", *, insecure: bool = False, server: str = "redis", **options: object
    ) -> multilock.Client:
        """Connect a client. With ``insecure`` it uses no TLS although the server demands it. ``server`` is the first
        part of the scheme, such as ``valkey``."""
        ports = self._secured or [str(each.port) for each in (*self.servers, *([self.guard] if self.guard else []))]
        asked = ports[-1:] if self.guard else ports[: len(self.servers)]
        each = login if self.scheme == "redlock" else ""
        hosts = f",{each}".join(f"localhost:{port}" for port in asked)
        scheme = secured(self.scheme) if self._secured and not insecure else self.scheme
        scheme = scheme.replace("redis", server)
        # The ttl is long, because a server must reply within a tenth of it, even on an overloaded machine.
        fixed: dict[str, Any] = {"ttl": 60} | ({"restart_guard": 0} if self.scheme == "redlock" else {})
        return multilock.connect(f"{scheme}://{login}{hosts}/{'m' if self.guard else '0'}", **(fixed | options))

    def __enter__(self) -> Place:
        for server in (*self.servers, *([self.guard] if self.guard else [])):
            self._stack.enter_context(server)
        if self.scheme == "redis+cluster":
            with redis.Redis(port=self.servers[0].port) as bare:
                bare.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
                eventually(lambda: "cluster_state:ok" in str(bare.execute_command("CLUSTER", "INFO")), within=WITHIN)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def secured(scheme: str) -> str:
    return {"redlock": "redlocks"}.get(scheme) or scheme.replace("redis", "rediss")


def is_handed_over(us: multilock.Client, them: multilock.Client) -> None:
    """Check that a lock can be acquired, waited for, renewed, and handed over to the waiter."""
    lease = us.lock("n").acquire(timeout=WITHIN)
    them.ping()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(them.lock("n").acquire, timeout=WITHIN)
        eventually(lambda: (info := us.inspect("n")) and info.waiting, within=WITHIN)
        lease.renew()
        assert lease.release()
        got = waits.result()
    got.renew()
    assert got.release()


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
    subprocess.run(
        [*make, *subject, "-keyout", "key.pem", "-out", "cert.pem"], cwd=folder, check=True, capture_output=True
    )
    return folder


@pytest.fixture(scope="module", params=SCHEMES)
def tls(request: pytest.FixtureRequest, certificates: Path) -> Iterator[Place]:
    """Start servers that demand certificates of their clients."""
    files = {"cert-file": "cert.pem", "key-file": "key.pem", "ca-cert-file": "cert.pem"}
    options = [part for name, file in files.items() for part in (f"--tls-{name}", str(certificates / file))]
    with Place(request.param, *options, secure=True) as place:
        yield place


def files(certificates: Path, *names: str) -> dict[str, Any]:
    return {name: str(certificates / ("key.pem" if name == "key" else "cert.pem")) for name in names}


def says(client: multilock.Client, pattern: str, kind: type[multilock.MultilockError] = BackendRejected) -> None:
    """Check that an acquire finally raises this error. On an overloaded machine it may raise timeouts before."""

    def refused() -> bool:
        try:
            client.lock("refused").try_acquire()
        except multilock.MultilockError as error:
            said.append(error)
            return isinstance(error, kind) and re.search(pattern, str(error)) is not None
        raise AssertionError("it was granted")

    said: list[multilock.MultilockError] = []
    with client:
        eventually(refused, within=WITHIN)
    assert SECRET not in str(said)


def test_every_operation_works_over_tls_with_a_client_certificate(tls: Place, certificates: Path) -> None:
    ours = files(certificates, "ca", "cert", "key")
    with tls.connect(**ours) as us, tls.connect(**ours) as them:
        is_handed_over(us, them)
        lease = them.lock("n").acquire(timeout=WITHIN)
        assert us.force_release("n")
        assert lease.wait_lost(WITHIN) is not None


def test_a_server_with_an_unknown_certificate_is_rejected(tls: Place) -> None:
    says(tls.connect(), r"not trusted.*ca=")


def test_tls_without_verification_works_and_is_a_finding(tls: Place, certificates: Path) -> None:
    with tls.connect(server="valkey", tls_verify="no", **files(certificates, "cert", "key")) as us:
        assert us.lock("n").acquire(timeout=WITHIN).release()
        assert "any certificate" in str([each for each in us.diagnose() if each.code == "tls-verify"])
    with tls.connect(**files(certificates, "ca", "cert", "key")) as us:
        us.lock("n").acquire(timeout=WITHIN).release()
        assert "tls-verify" not in {each.code for each in us.diagnose()}


def test_a_client_without_a_certificate_is_advised_to_give_one(tls: Place, certificates: Path) -> None:
    says(tls.connect(**files(certificates, "ca")), "cert= and key=", BackendUnavailable)


def test_a_tls_server_at_a_plain_url_is_reported_with_the_right_scheme(tls: Place) -> None:
    for server in ("redis", "valkey"):
        with_tls = secured(tls.scheme).replace("redis", server)
        says(tls.connect(insecure=True, server=server), f"{re.escape(with_tls)}://", BackendUnavailable)


# passwords and rights


@pytest.fixture(scope="module", params=SCHEMES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Start servers that demand a login, each with a user who has all rights."""
    with Place(request.param) as place:
        for server in place.servers:
            with redis.Redis(port=server.port) as bare:
                bare.execute_command(
                    "ACL", "SETUSER", "app", "on", f">{SECRET}", "allcommands", "allkeys", "allchannels"
                )
                bare.config_set("requirepass", "of-operators")
        if place.guard:  # the Sentinel needs this password to monitor the primary
            with place.guard.client() as guard:
                guard.execute_command("SENTINEL", "SET", "m", "auth-pass", "of-operators")
        yield place


def test_a_login_in_the_url_is_used_for_all_servers(place: Place) -> None:
    with place.connect(f"app:{SECRET}@") as us, place.connect(username="app", password=SECRET) as them:
        is_handed_over(us, them)


def test_a_missing_password_is_reported(place: Place) -> None:
    says(place.connect(), "give username= and password=")


def test_a_wrong_password_is_reported_but_not_shown(place: Place) -> None:
    says(place.connect("app:battery-staple@"), r"check username=, password=")
    says(place.connect(username="nobody", password=SECRET), r"check username=, password=")


def test_a_certificate_without_tls_raises_an_error(place: Place) -> None:
    with pytest.raises(multilock.ConfigurationError, match=f"{re.escape(secured(place.scheme))}://"):
        place.connect(ca="/etc/ssl/ca.pem")


@pytest.fixture(scope="module")
def longer_up() -> Iterator[Place]:
    """Return shared servers that have been up for a while, so that `restart_guard` does not delay their votes."""
    with Place("redlock") as place:
        yield place


@pytest.fixture
def three(longer_up: Place) -> Place:
    for server in longer_up.servers:
        with redis.Redis(port=server.port) as bare:
            since(bare, "6.2", "rights on channels")
            bare.flushall()
            bare.execute_command("ACL", "SETUSER", "app", "reset", "on", "nopass", *RIGHTS, "+info")
    return longer_up


def deny(place: Place, count: int, *rights: str) -> None:
    """Change the rights of the user on ``count`` of the servers."""
    for server in place.servers[:count]:
        with redis.Redis(port=server.port) as bare:
            bare.execute_command("ACL", "SETUSER", "app", *rights)


@pytest.mark.parametrize(
    "rights", [("resetchannels",), ("-publish",), ("-client|tracking",), ("-info",), ("-evalsha",)]
)
def test_a_permission_missing_on_one_of_three_servers_costs_only_time(three: Place, rights: tuple[str, ...]) -> None:
    deny(three, 1, *rights)
    guarded: dict[str, Any] = {"ttl": GUARD, "restart_guard": GUARD}
    with three.connect("app:x@", **guarded) as us, three.connect("app:x@", **guarded) as them:
        is_handed_over(us, them)


@pytest.mark.parametrize("rights", [("resetchannels",), ("-publish",), ("-client|tracking",)])
def test_without_channels_on_any_of_three_servers_waiters_look_by_timers(three: Place, rights: tuple[str, ...]) -> None:
    deny(three, 3, *rights)
    with three.connect("app:x@") as us, three.connect("app:x@") as them:
        is_handed_over(us, them)


def test_two_of_three_servers_without_a_readable_uptime_are_reported_with_the_remedy(three: Place) -> None:
    deny(three, 2, "-info")
    says(three.connect("app:x@", ttl=GUARD, restart_guard=GUARD), "allow this user INFO, or give restart_guard=0")
    with three.connect("app:x@") as us, three.connect("app:x@") as them:
        is_handed_over(us, them)


def test_each_server_may_have_a_login_of_its_own() -> None:
    hosts = []
    with Place("redlock") as own:
        for n, server in enumerate(own.servers):
            with redis.Redis(port=server.port) as bare:
                since(bare, "6.2", "rights on channels")
                bare.execute_command("ACL", "SETUSER", f"user{n}", "on", f">pw{n}", *RIGHTS, "+info")
                bare.config_set("requirepass", "of-operators")
            hosts.append(f"user{n}:pw{n}@localhost:{server.port}")
        with multilock.connect(f"redlock://{','.join(hosts)}/0", ttl=30, restart_guard=0) as us:
            us.lock("n").acquire(timeout=WITHIN).release()
        hosts[1:] = [host.rpartition("@")[2] for host in hosts[1:]]
        says(multilock.connect(f"redlock://{','.join(hosts)}/0", restart_guard=0), "give username= and password=")
