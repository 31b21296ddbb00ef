"""How a client logs in: digest and ACLs, TLS, chroots, options, and a client object of the program."""

from __future__ import annotations

import logging
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl

from multilock import BackendRejected, BackendUnavailable, ConfigurationError, LeaseState, Loss, LossReason
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import Recorder, answers, eventually, until_renewed
from multilock.testing.conformance.faces import background
from multilock_zookeeper import open_backend
from tests.backends.zookeeper.conftest import Connect, Operator
from tests.servers import free_port
from tests.servers_zookeeper import ZooKeeperServer


def login(server: ZooKeeperServer, who: str) -> str:
    return server.url.replace("://", f"://{who}@")


# ---- digest


def test_a_lock_of_one_user_is_protected_from_other_users(
    server: ZooKeeperServer, connect: Connect, operator: Operator
) -> None:
    ours = connect(login(server, "app:s3cret"), ttl=10)
    with ours.lock("job") as lease:
        assert connect(server.url, username="app", password="s3cret", ttl=10).lock("job").try_acquire() is None
        for stranger in (server.url, login(server, "app:wrong")):
            begun = time.monotonic()
            with pytest.raises(BackendRejected, match="username=") as caught:
                connect(stranger, ttl=10).lock("job").acquire(timeout=10)
            assert time.monotonic() - begun < 5
            assert "s3cret" not in str(caught.value)
        lease.renew()  # the holder may also renew its lease


def test_several_users_may_share_a_directory_made_by_hand(
    server: ZooKeeperServer, connect: Connect, operator: Operator
) -> None:
    by = operator(server.endpoint, auth_data=[("digest", "app:s3cret")])
    acl = [make_digest_acl("app", "s3cret", all=True), make_digest_acl("web", "pa55", all=True)]
    by.create("/multilock", b"", acl=acl)
    by.create("/multilock/job", b"", acl=acl)
    app, web = connect(login(server, "app:s3cret"), ttl=10), connect(login(server, "web:pa55"), ttl=10)
    with app.lock("job"):
        assert web.lock("job").try_acquire(timeout=3) is None
        waits = background(lambda: web.lock("job").acquire(timeout=10))
        eventually(lambda: len(by.get_children("/multilock/job")) == 2)
    assert waits.result(10).is_held()


def test_messages_of_kazoo_are_logged_without_passwords(
    server: ZooKeeperServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(1)
    for place in (login(server, "app:hunter2"), login(server, "app:hunter2") + "/a/chroot"):
        with connect(place).lock("job"):
            pass
    said = [(record.name, record.getMessage()) for record in caplog.records]
    assert "hunter2" not in repr(said) + repr([record.args for record in caplog.records]) + caplog.text
    assert any(name.startswith("kazoo.client") and "Create2" in message for name, message in said)
    assert any(name.startswith("kazoo.client") and "Auth" in message for name, message in said)


def test_messages_of_kazoo_are_filtered_by_the_level_of_its_logger(
    server: ZooKeeperServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(server.url, ttl=10)
    eventually(lambda: answers(client))
    for level, expected in ((logging.WARNING, False), (logging.DEBUG, True), (logging.WARNING, False)):
        with caplog.at_level(level, "kazoo"):
            caplog.clear()
            client.lock("job").acquire().release()
            assert any(record.name.startswith("kazoo") for record in caplog.records) is expected


# ---- chroot


def test_a_missing_chroot_is_created_and_names_do_not_include_it(
    server: ZooKeeperServer, connect: Connect, operator: Operator
) -> None:
    client = connect(f"{server.url}/apps/one", ttl=10)
    lost = Recorder[Loss]()
    lease = client.lock("job", on_lost=lost).acquire()
    assert connect(f"{server.url}/apps/two", ttl=10).lock("job").try_acquire() is not None
    assert connect(f"{server.url}/apps/one", ttl=10).lock("job").try_acquire() is None
    assert [info.name for info in client.inspect_all()] == ["job"]
    time.sleep(0.5)
    by = operator(server.endpoint)
    by.delete("/apps/one/multilock/job/" + by.get_children("/apps/one/multilock/job")[0])
    assert lost.wait().reason is LossReason.TAKEN
    assert not lease.is_held()


# ---- TLS


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create ca.pem, and server.pem and client.pem signed by it, each with its key."""
    folder = tmp_path_factory.mktemp("pems")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2",
            "-subj", "/CN=ca")  # fmt: skip
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for who in ("server", "client"):
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{who}.key", "-out", "csr", "-subj", f"/CN={who}")
        openssl("x509", "-req", "-in", "csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-out",
                f"{who}.crt", "-days", "2", "-extfile", "names")  # fmt: skip
        (folder / f"{who}.pem").write_text((folder / f"{who}.key").read_text() + (folder / f"{who}.crt").read_text())
    return folder


@pytest.fixture(scope="module")
def secured(pems: Path) -> Iterator[tuple[ZooKeeperServer, str]]:
    """Start a server that demands certificates of its clients, and return it with its URL for TLS."""
    port = free_port()
    settings = {
        "secureClientPort": port,
        "secureClientPortAddress": "127.0.0.1",
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        "ssl.keyStore.location": pems / "server.pem",
        "ssl.trustStore.location": pems / "ca.pem",
    }
    with ZooKeeperServer(**settings) as server:  # type: ignore[arg-type]
        yield server, f"zookeeper://127.0.0.1:{port}"


def test_mutual_tls_works(secured: tuple[ZooKeeperServer, str], pems: Path, connect: Connect) -> None:
    files = {"ca": str(pems / "ca.pem"), "cert": str(pems / "client.crt"), "key": str(pems / "client.key")}
    client = connect(secured[1], ttl=10, **files)
    with client.lock("job") as lease:
        assert connect(secured[0].url, ttl=10).lock("job").try_acquire() is None
        lease.renew()
    assert "tls-verify" not in {finding.code for finding in client.diagnose()}


def test_without_verification_a_client_works_and_diagnose_says_so(
    secured: tuple[ZooKeeperServer, str], pems: Path, connect: Connect
) -> None:
    files = {"cert": str(pems / "client.crt"), "key": str(pems / "client.key")}
    client = connect(secured[1], ttl=10, tls_verify=False, **files)
    assert client.lock("unverified").acquire(timeout=10).release()
    assert "tls-verify" in {finding.code for finding in client.diagnose()}
    with pytest.raises(ConfigurationError, match="give tls=true with it"):
        connect(secured[1], tls_verify=False)


def test_a_server_with_an_unknown_certificate_is_refused(secured: tuple[ZooKeeperServer, str]) -> None:
    import multilock

    with multilock.connect(secured[1], tls=True, ttl=3) as client, pytest.raises(BackendRejected, match="ca="):
        client.lock("job").acquire(timeout=10)


@contextmanager
def answering(farewell: bytes | None) -> Iterator[str]:
    """Run a server that accepts every connection, answers a TLS greeting with ``farewell``, and hangs up.

    If ``farewell`` is None, the server resets the connection instead. Yields the server's URL.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.recv(1000)
                    if farewell is None:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    else:
                        connection.sendall(farewell)

    threading.Thread(target=serve, daemon=True).start()
    yield f"zookeeper://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.mark.parametrize("farewell", [b"", None])
def test_a_connection_lost_during_the_tls_handshake_is_tried_again(farewell: bytes | None, connect: Connect) -> None:
    """A load balancer without a server behind it accepts a connection and then ends it."""
    with answering(farewell) as url:
        client = connect(url, ttl=3, tls=True, outage_timeout=1.5)
        begun = time.monotonic()
        with pytest.raises(BackendUnavailable, match="cannot be reached"):
            client.lock("job").acquire(timeout=10)
        assert time.monotonic() - begun > 1


@pytest.mark.parametrize("farewell", [b"hello, I speak no TLS\n", b"\x15\x03\x03\x00\x02\x02\x28"])
def test_a_host_without_tls_or_with_a_tls_alert_is_refused(farewell: bytes, connect: Connect) -> None:
    with answering(farewell) as url, pytest.raises(BackendRejected, match="TLS failed"):
        connect(url, ttl=3, tls=True).lock("job").acquire(timeout=10)


# ---- a client object passed to connect()


def test_a_kazoo_client_object_is_used_with_its_session_and_never_closed(
    server: ZooKeeperServer, connect: Connect, operator: Operator
) -> None:
    theirs = operator(server.endpoint, timeout=10)
    client = connect("zookeeper://", client=theirs, ttl=30)
    before = server.metric("zk_global_sessions")
    lease = client.lock("job").acquire()
    # A second session would stay at the server for 10 seconds.
    eventually(lambda: server.metric("zk_global_sessions") == before)
    assert lease.ttl == 10.0
    assert connect(server.url, ttl=10).lock("job").try_acquire() is None
    lease.renew()
    client.close()
    assert theirs.connected
    assert theirs.get_children("/multilock/job") == []


def test_stopping_the_kazoo_client_object_loses_its_locks(
    server: ZooKeeperServer, connect: Connect, operator: Operator
) -> None:
    theirs = operator(server.endpoint, timeout=10)
    lost = Recorder[Loss]()
    connect("zookeeper://", client=theirs, ttl=10).lock("job", on_lost=lost).acquire()
    theirs.stop()
    assert lost.wait().reason is LossReason.SESSION_LOST


def test_a_kazoo_client_object_that_reconnects_keeps_its_locks(connect: Connect, operator: Operator) -> None:
    with ZooKeeperServer() as server, FaultProxy.before(server.url, server.port) as proxy:
        theirs = operator(f"{proxy.host}:{proxy.port}", timeout=6)
        lease = connect("zookeeper://", client=theirs, ttl=6).lock("job").acquire()
        proxy.cut()
        eventually(lambda: theirs.connected)
        until_renewed(lease)
        assert lease.state is LeaseState.HELD


# ---- options


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("zookeeper://", {}, "names its servers"),
        ("zookeeper://h:port", {}, "write host:port"),
        ("zookeeper://h//a", {}, "one of its parts is empty"),
        ("zookeeper://h", {"prefix": "a//b/"}, "one of its parts is empty"),
        ("zookeeper://h", {"node_style": "go"}, "kazoo or curator"),
        ("zookeeper://h", {"username": "me"}, "belong together"),
        ("zookeeper://h", {"cert": "me.pem"}, "belong together"),
        ("zookeeper://h", {"ca": "absent.pem"}, "can be read"),
        ("zookeeper://h", {"tls": "perhaps"}, "true or false"),
        ("zookeeper://h", {"tls": False, "ca": "ca.pem"}, "ca= is for TLS: give tls=true"),
        ("zookeeper://h", {"client": object()}, "the client already has its servers"),
        ("zookeeper://", {"client": object()}, "KazooClient"),
        ("zookeeper://h", {"delay": 1}, "delay"),
        ("zookeeper://h", {"ttl": 86400.0 * 30}, "2147483 s at most"),
    ],
)
def test_an_unusable_option_is_reported_before_any_request(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_backend(url, options)


def test_a_ttl_below_the_minimum_is_rounded_up() -> None:
    assert open_backend("zookeeper://h", {"ttl": 0.05}).capabilities.ttl_max == 0.1


def test_a_lock_cannot_have_a_longer_ttl_than_its_client(shared: ZooKeeperServer, connect: Connect) -> None:
    client = connect(shared.url, ttl=6, prefix="limits/")
    with pytest.raises(ValueError, match="6 s at most"):
        client.lock("job", ttl=7)
    with client.lock("job", ttl=2) as lease:
        assert lease.ttl == 6.0


def test_no_password_shows_in_a_repr() -> None:
    assert "s3cret" not in repr(open_backend("zookeeper://app:s3cret@h", {}))


def test_a_kazoo_client_object_that_was_not_started_is_started(server: ZooKeeperServer, connect: Connect) -> None:
    theirs = KazooClient(server.endpoint, timeout=6)
    client = connect("zookeeper://", client=theirs, ttl=6)
    with client.lock("job") as lease:
        assert lease.remaining() > 2
    client.close()
    assert theirs.connected
    theirs.stop()
    theirs.close()
