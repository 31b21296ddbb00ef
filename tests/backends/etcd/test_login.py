"""How a client logs in: user and password, tokens that expire, permissions, certificates."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multilock import BackendRejected, BackendUnavailable, ConfigurationError, LeaseState, LossReason, now
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import Pulse, eventually, until_renewed
from multilock.testing.conformance.faces import background
from multilock_etcd import wire
from multilock_etcd.notices import EtcdWatcher
from multilock_etcd.transport import EtcdTransport
from tests.backends.etcd.conftest import Connect
from tests.servers_etcd import EtcdServer, etcdctl


def protect(server: EtcdServer) -> None:
    """Switch authentication on: create root, and the user ``app`` with rights to ``multilock/`` only."""

    def do(*words: str) -> None:
        etcdctl(server.endpoint, *words)

    do("user", "add", "root:secret")
    do("role", "add", "app")
    do("role", "grant-permission", "app", "--prefix=true", "readwrite", "multilock/")
    do("user", "add", "app:s3cret")
    do("user", "grant-role", "app", "app")
    do("user", "grant-role", "root", "root")
    do("auth", "enable")


REFUSED = "nothing is pushed over the watch stream: etcd refuses a watch: permission denied"


@pytest.fixture
def guarded() -> Iterator[EtcdServer]:
    with EtcdServer("--auth-token-ttl", "2", "--bcrypt-cost", "4") as server:
        protect(server)
        yield server


def login(server: EtcdServer, who: str) -> str:
    return server.url.replace("://", f"://{who}@")


def test_user_and_password_may_be_in_the_url_or_in_options(guarded: EtcdServer, connect: Connect) -> None:
    with connect(login(guarded, "app:s3cret")).lock("job") as lease:
        assert connect(guarded.url, username="app", password="s3cret").lock("job").try_acquire() is None
        assert lease.is_held()


@pytest.mark.parametrize("who", ["app:wrong", "nobody:s3cret"])
def test_a_wrong_password_is_refused_at_once(guarded: EtcdServer, connect: Connect, who: str) -> None:
    begun = time.monotonic()
    with pytest.raises(BackendRejected) as caught:
        connect(login(guarded, who)).lock("job").acquire(timeout=10)
    assert time.monotonic() - begun < 5
    assert "s3cret" not in str(caught.value)


def test_a_client_without_a_user_is_refused_at_once(guarded: EtcdServer, connect: Connect) -> None:
    with pytest.raises(BackendRejected, match="username="):
        connect(guarded.url).lock("job").acquire(timeout=10)


def test_a_prefix_outside_the_users_permissions_is_refused_at_once(guarded: EtcdServer, connect: Connect) -> None:
    with pytest.raises(BackendRejected, match="prefix="):
        connect(login(guarded, "app:s3cret"), prefix="theirs/").lock("job").acquire(timeout=10)


def test_a_password_for_a_server_without_authentication_causes_no_error(shared: EtcdServer, connect: Connect) -> None:
    assert connect(login(shared, "app:s3cret"), prefix="open/").lock("job").try_acquire() is not None


def test_an_expired_token_is_replaced(guarded: EtcdServer, connect: Connect) -> None:
    ours, theirs = (connect(login(guarded, "app:s3cret"), ttl=60) for _ in range(2))
    holder = ours.lock("job").acquire()
    time.sleep(4)  # twice the time for which an unused token is valid
    assert theirs.lock("job").try_acquire() is None
    waits = background(lambda: theirs.lock("job").acquire(timeout=20))
    time.sleep(0.2)
    assert holder.release()
    assert waits.result(5).is_held()


def test_a_watch_refused_on_an_open_stream_is_created_with_a_new_token(guarded: EtcdServer, connect: Connect) -> None:
    ours, theirs = (connect(login(guarded, "app:s3cret"), ttl=60) for _ in range(2))
    holder = theirs.lock("job").acquire()
    kept = ours.lock("kept").acquire()
    # The watch stream is open, with the token of its login.
    eventually(lambda: guarded.metric("etcd_debugging_mvcc_watcher_total") == 2)
    time.sleep(4)  # twice the time for which an unused token is valid
    waits = background(lambda: ours.lock("job").acquire(timeout=20))
    later = ours.lock("later").acquire()
    eventually(lambda: guarded.metric("etcd_debugging_mvcc_watcher_total") == 4)
    assert holder.release()
    assert waits.result(5).is_held()
    for lease in (kept, later):
        etcdctl(guarded.endpoint, "--user", "root:secret", "del", "--prefix", f"multilock/{lease.name}/")
        loss = lease.wait_lost(5)
        assert loss is not None
        assert loss.reason is LossReason.TAKEN


def test_a_refused_watch_is_reported_once_and_tried_again_after_a_pause(
    shared: EtcdServer, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = []
    refuses = True
    hear, watch = EtcdWatcher._hear, EtcdTransport.watch

    def denied(watcher: EtcdWatcher, answer: Any) -> None:
        if answer.created and refuses:
            refused = {"watch_id": -1, "created": True, "canceled": True, "cancel_reason": "permission denied"}
            answer = wire.WatchResponse(**refused)
        hear(watcher, answer)

    def counted(transport: EtcdTransport, requests: Any) -> Any:
        opened.append(requests)
        return watch(transport, requests)

    monkeypatch.setattr(EtcdWatcher, "_hear", denied)
    monkeypatch.setattr(EtcdTransport, "watch", counted)
    client = connect(shared.url, prefix="denied/", ttl=60)
    with caplog.at_level(logging.WARNING, "multilock"):
        held = [client.lock(f"job-{number}").acquire() for number in range(5)]
        eventually(lambda: REFUSED in caplog.text)
        time.sleep(1.0)
        assert caplog.text.count(REFUSED) == 1
        assert len(opened) == 2, "once more, with a new token"
        assert [finding.code for finding in client.diagnose() if "permission denied" in finding.message] == [
            "pushes-down"
        ]
        assert all(lease.is_held() for lease in held)
        refuses = False
        eventually(lambda: "the watch stream is back" in caplog.text, 20)
    assert len(opened) == 3
    client.force_release("job-3")
    assert held[3].wait_lost(15) is not None


def test_a_single_try_during_a_login_that_hangs_ends_in_time(guarded: EtcdServer, connect: Connect) -> None:
    with FaultProxy.before(login(guarded, "app:s3cret")) as proxy:
        client = connect(proxy.url, ttl=60)
        hangs = proxy.hold_request(b"s3cret")
        waits = background(lambda: client.lock("first").acquire(timeout=20))
        hangs.wait(5)
        begun = now()
        with Pulse() as pulse:
            with pytest.raises(BackendUnavailable):
                client.lock("second", renew=False).try_acquire(timeout=0.3)
            assert now() - begun < 1.0 + pulse.stopped()
        hangs.release()
        assert waits.result(20).is_held()


def test_a_restart_invalidates_every_token_and_costs_no_lock(guarded: EtcdServer, connect: Connect) -> None:
    client, other = connect(login(guarded, "app:s3cret"), ttl=12), connect(login(guarded, "app:s3cret"), ttl=30)
    lease = client.lock("job").acquire()
    waits = background(lambda: other.lock("job").acquire(timeout=20))
    guarded.restart()
    until_renewed(lease, within=12)
    assert lease.state is LeaseState.HELD
    time.sleep(1.5)  # wait until the watch stream is open again
    assert lease.release()
    assert waits.result(5).is_held()


def test_losses_are_pushed_under_authentication_too(guarded: EtcdServer, connect: Connect) -> None:
    lease = connect(login(guarded, "app:s3cret"), ttl=60).lock("job").acquire()
    time.sleep(0.5)
    etcdctl(guarded.endpoint, "--user", "root:secret", "del", "--prefix", "multilock/job/")
    loss = lease.wait_lost(5)
    assert loss is not None
    assert loss.reason is LossReason.TAKEN


# ---- TLS


class Papers:
    """A certificate authority, certificates for server and client, and a certificate of an unknown authority."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca = self._authority("ca")
        self.stranger = self._authority("stranger")
        self.server = self._signed("server")
        self.client = self._signed("client")

    def path(self, name: str) -> str:
        return str(self._folder / name)

    def _authority(self, name: str) -> str:
        self._openssl("req", "-x509", *self._new(name), "-out", self.path(f"{name}.pem"), "-subj", f"/CN={name}")
        return self.path(f"{name}.pem")

    def _signed(self, name: str) -> tuple[str, str]:
        Path(self.path("names")).write_text("subjectAltName=IP:127.0.0.1\n")
        self._openssl("req", *self._new(name), "-out", self.path(f"{name}.csr"), "-subj", f"/CN={name}")
        ours = ("-CA", self.ca, "-CAkey", self.path("ca.key"), "-CAcreateserial", "-extfile", self.path("names"))
        self._openssl("x509", "-req", "-in", self.path(f"{name}.csr"), *ours, "-out", self.path(f"{name}.pem"))
        return self.path(f"{name}.pem"), self.path(f"{name}.key")

    def _new(self, name: str) -> tuple[str, ...]:
        return "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", self.path(f"{name}.key")

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def locked(papers: Papers) -> Iterator[EtcdServer]:
    """Start a server that shows a certificate, and demands a certificate from each client."""
    certificate, key = papers.server
    words = ("--cert-file", certificate, "--key-file", key, "--trusted-ca-file", papers.ca, "--client-cert-auth")
    with EtcdServer(*words, tls=True) as server:
        yield server


def test_a_client_certificate_is_accepted(locked: EtcdServer, papers: Papers, connect: Connect) -> None:
    certificate, key = papers.client
    client = connect(locked.url, ca=papers.ca, cert=certificate, key=key)
    with client.lock("job") as lease:
        assert client.lock("job").try_acquire() is None
        assert lease.is_held()


def test_a_client_without_a_certificate_is_refused(locked: EtcdServer, papers: Papers, connect: Connect) -> None:
    with pytest.raises(BackendRejected):
        connect(locked.url, ca=papers.ca, outage_timeout=2.0).lock("job").acquire(timeout=10)


def test_a_server_with_an_unknown_certificate_is_refused_at_once(
    locked: EtcdServer, papers: Papers, connect: Connect
) -> None:
    certificate, key = papers.client
    with pytest.raises(BackendRejected, match="ca="):
        connect(locked.url, ca=papers.stranger, cert=certificate, key=key).lock("job").acquire(timeout=10)


def test_verification_cannot_be_switched_off_and_the_remedy_works(
    locked: EtcdServer, papers: Papers, connect: Connect
) -> None:
    with pytest.raises(ConfigurationError, match="give the server's certificate as ca="):
        connect(locked.url, tls_verify=False)
    certificate, key = papers.client
    client = connect(locked.url, ca=papers.server[0], cert=certificate, key=key, tls_verify=True)
    assert client.lock("verified").acquire(timeout=10).release()


def test_a_missing_file_is_named(locked: EtcdServer, connect: Connect) -> None:
    with pytest.raises(BackendRejected, match=r"no-such\.pem"):
        connect(locked.url, ca="no-such.pem").lock("job").try_acquire()


# ---- URLs


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("etcd://", {}),
        ("etcd://h:0", {}),
        ("etcd://h:x", {}),
        ("etcd://h1,,h2", {}),
        ("etcd://h/path", {}),
        ("etcd://h", {"ca": "x.pem"}),
        ("etcds://h", {"cert": "x.pem"}),
        ("etcd://h", {"password": "s3cret"}),
        ("etcd://h", {"nonsense": "1"}),
        ("etcd://h", {"client": object()}),
        ("etcd://", {"client": object()}),
    ],
)
def test_a_configuration_mistake_is_found_before_any_request(
    url: str, options: dict[str, object], connect: Connect
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        connect(url, **options)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("url", ["etcd://h", "etcd://h1,h2:1,h3", "etcd://[::1]:2379,10.0.0.1", "etcds://u:p%40@h/"])
def test_a_url_accepts_these_forms_and_no_others(url: str, connect: Connect) -> None:
    client = connect(url)
    assert "p%40" not in repr(client)
    assert "p@" not in repr(client)
