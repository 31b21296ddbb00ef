"""The options of a Consul client, its token, TLS, client objects of the program, a fork, and the findings of
diagnose()."""

from __future__ import annotations

import http.server
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import consul
import pytest

import multilock
from multilock import BackendRejected, BackendUnavailable, ConfigurationError, LossReason
from multilock.testing.conformance.base import Recorder, by_the_clock
from multilock_consul import open_backend
from tests.servers_consul import ConsulServer

Connect = Callable[..., multilock.Client]
ROOT_TOKEN = "6b4f6a52-0000-4000-8000-a0c1d8f3e111"
GUARDED = {"enabled": True, "default_policy": "deny", "tokens": {"master": ROOT_TOKEN, "agent": ROOT_TOKEN}}
RIGHTS = 'key_prefix "multilock/" { policy = "write" } session_prefix "" { policy = "write" }'


@pytest.fixture(scope="module")
def guarded() -> Iterator[ConsulServer]:
    """Start a server with access control lists that grants nothing without a token."""
    with ConsulServer(token=ROOT_TOKEN, acl=GUARDED) as server:
        yield server


@pytest.fixture(scope="module")
def token(guarded: ConsulServer) -> str:
    """Create a token with exactly the rights that the documentation page on Consul names."""
    guarded.ask("PUT", "acl/policy", {"Name": "locks", "Rules": RIGHTS})
    made: str = guarded.ask("PUT", "acl/token", {"Policies": [{"Name": "locks"}]})["SecretID"]
    return made


# ---- errors reported before any request


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("consul://user:secret@h", {}, "token="),
        ("consul://h/path", {}, "prefix="),
        ("consul://h:0", {}, "port"),
        ("consul://h:x", {}, "port"),
        ("consul://h1:8500,h2:99999", {}, "port"),
        ("consul://h1,,h2", {}, "empty"),
        ("consul://127.0.0.1:8500,", {}, "empty"),
        ("consul://,h", {}, "empty"),
        ("consul://:8500", {}, "empty"),
        ("consul://::1", {}, "\\[::1\\]"),
        ("consul://h,fe80::1:8500", {}, "brackets"),
        ("consul://[::1]8500", {}, "brackets"),
        ("consul://h", {"ca": "ca.pem"}, "consuls://"),
        ("consuls://h", {"key": "key.pem"}, "cert="),
        ("consuls://h", {"ca": "there-is-no-such-file.pem"}, "PEM"),
        ("consul://h", {"lock_delay": -1}, "lock_delay"),
        ("consul://h", {"lock_delay": 61}, "lock_delay"),
        ("consul://h", {"lock_delay": "soon"}, "lock_delay"),
        ("consul://h", {"lock_delay": True}, "lock_delay"),
        ("consul://h", {"token": 7}, "token"),
        ("consul://h", {"token": "a\r\nb"}, "token"),
        ("consul://h", {"datacenter": "dc2"}, "unknown option"),
        ("consul://h", {"prefix": "/app/"}, "prefix"),
        ("consul://h", {"prefix": "app//"}, "prefix"),
        ("consul://", {"client": object()}, "consul.Consul"),
        ("consul://", {"client": consul.Consul(), "token": "t"}, "client="),
        ("consul://h", {"client": consul.Consul(host="c")}, "c:8500, not to the agent of the URL"),
    ],
)
def test_a_configuration_mistake_raises_an_error_that_says_how_to_correct_it(
    url: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        multilock.connect(url, **options)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("consul://", "localhost:8500"),
        ("consuls://", "localhost:8501"),
        ("consuls://h", "h:8501"),
        ("consul://h1,h2:99,[::1]:98,[::2]", "h1:8500,h2:99,[::1]:98,[::2]:8500"),
        ("consul://h/", "h:8500"),
    ],
)
def test_agents_can_be_named_with_and_without_ports(url: str, shown: str) -> None:
    assert repr(open_backend(url, {})) == f"<ConsulBackend {url.partition(':')[0]}://{shown}>"


@pytest.mark.parametrize("url", ["consul://", "consul://[::1]:99"])
def test_a_py_consul_client_passes_on_its_ipv6_address(url: str) -> None:
    backend = open_backend(url, {"client": consul.Consul(host="[::1]", port=99)})
    assert repr(backend) == "<ConsulBackend consul://[::1]:99>"


def test_capabilities_are_known_without_a_server() -> None:
    can = multilock.connect("consul://127.0.0.1:1?ttl=20").capabilities
    assert (can.fencing, can.fair, can.push_wait, can.push_loss, can.cross_host, can.survives_failover) == (
        (True, False) + 4 * (True,)
    )
    assert (can.ttl_min, can.ttl_max, can.ttl_step, can.lock_delay) == (10.0, 86400.0, 0.001, 15.0)
    assert 55 <= can.takeover_bound < 56


@pytest.mark.parametrize(("ttl", "delay"), [(2, 1), (6, 1), (10, 5), (30, 25), (65, 60), (600, 60)])
def test_the_lock_delay_covers_the_time_in_which_a_silent_holder_still_believes(ttl: float, delay: float) -> None:
    can = multilock.connect("consul://127.0.0.1:1", ttl=ttl).capabilities
    assert can.lock_delay == delay
    assert can.takeover_bound > 2 * max(ttl, 10) + delay


def test_inspect_shows_no_lock_of_a_longer_prefix(server: ConsulServer, connect: Connect) -> None:
    outer, inner = connect(server.url, prefix="app/"), connect(server.url, prefix="app/my ")
    inner.lock("job").acquire()
    assert outer.inspect("my job") is None
    assert list(outer.inspect_all()) == []
    outer.lock("my job").acquire()
    assert [info.name for info in outer.inspect_all()] == ["my job"]
    assert [info.name for info in inner.inspect_all()] == ["job"]


def test_a_server_that_refuses_a_short_ttl_grants_its_minimum(connect: Connect) -> None:
    with ConsulServer(session_ttl_min="10s") as server:
        client = connect(server.url, ttl=5)
        for _ in range(2):
            with client.lock("job") as lease:
                assert lease.ttl == 10
                assert lease.remaining() > 5
        codes = [finding.code for finding in client.diagnose()]
        assert "ttl-raised" in codes


# ---- tokens


def test_the_documented_permissions_of_a_token_are_sufficient(
    guarded: ConsulServer, token: str, connect: Connect
) -> None:
    client = connect(guarded.url, token=token)
    with client.lock("job") as lease:
        lease.renew()
        assert client.lock("job").try_acquire() is None
        assert [info.name for info in client.inspect_all()] == ["job"]
    assert client.force_release("job") is False
    assert list(client.inspect_all()) == []
    assert "not-told" in [finding.code for finding in client.diagnose()]


def test_a_py_consul_client_passes_on_its_token(guarded: ConsulServer, token: str, connect: Connect) -> None:
    with connect("consul://", client=consul.Consul(port=guarded.port, token=token)).lock("job"):
        pass


class OldHttp:
    """The attributes that the HTTP part of a python-consul client has."""

    def __init__(self, port: int, scheme: str = "http", verify: bool | str = True, cert: str | None = None) -> None:
        self.host, self.port, self.scheme, self.verify, self.cert = "127.0.0.1", port, scheme, verify, cert


class OldConsul(consul.base.Consul):  # type: ignore[misc]
    """A replacement for a client of python-consul, which cannot be installed beside py-consul. It has no timeouts, and
    its certificate and key are in one file."""

    def __init__(self, http: OldHttp, token: str | None = None) -> None:
        self.http, self.token, self.dc, self.scheme, self.consistency = http, token, None, http.scheme, "default"


def test_a_python_consul_client_passes_on_its_token(guarded: ConsulServer, token: str, connect: Connect) -> None:
    with connect("consul://", client=OldConsul(OldHttp(guarded.port), token)).lock("job"):
        pass


def test_the_token_of_the_environment_is_the_default(
    guarded: ConsulServer, token: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSUL_HTTP_TOKEN", token)
    with connect(guarded.url).lock("job"):
        pass


@pytest.mark.parametrize("given", ["", "11111111-1111-4111-8111-111111111111"])
def test_a_wrong_token_is_refused_at_once(guarded: ConsulServer, given: str, connect: Connect) -> None:
    client = connect(guarded.url, **({"token": given} if given else {}))
    asks: list[Callable[[], object]] = [
        client.lock("job").acquire,
        lambda: client.inspect("job"),
        lambda: list(client.inspect_all()),
        lambda: list(client.inspect_all("job")),
    ]
    for ask in asks:
        with pytest.raises(BackendRejected) as refused:
            ask()
        assert not given or given not in str(refused.value)


def test_a_read_only_token_is_refused_at_once(guarded: ConsulServer, connect: Connect) -> None:
    rules = 'key_prefix "multilock/" { policy = "read" } session_prefix "" { policy = "write" }'
    guarded.ask("PUT", "acl/policy", {"Name": "readers", "Rules": rules})
    token = guarded.ask("PUT", "acl/token", {"Policies": [{"Name": "readers"}]})["SecretID"]
    with pytest.raises(BackendRejected, match="denied"):
        connect(guarded.url, token=token).lock("job").acquire()


def test_a_token_is_never_shown(guarded: ConsulServer, token: str, connect: Connect) -> None:
    client = connect(guarded.url, token=token)
    assert token not in repr(client)
    assert token not in repr(open_backend(guarded.url, {"token": token}))


def test_a_key_that_the_token_does_not_cover_is_refused(guarded: ConsulServer, token: str, connect: Connect) -> None:
    with pytest.raises(BackendRejected, match="denied"):
        connect(guarded.url, token=token, prefix="elsewhere/").lock("job").acquire()


@pytest.mark.parametrize("kept", ["", 'key_prefix "multilock/" { policy = "read" }'])
@pytest.mark.parametrize("watched", [True, False])
def test_a_revoked_permission_does_not_prove_a_loss(connect: Connect, watched: bool, kept: str) -> None:
    with ConsulServer(token=ROOT_TOKEN, acl=GUARDED, log_level="debug") as server:
        server.ask("PUT", "acl/policy", {"Name": "locks", "Rules": RIGHTS})
        made = server.ask("PUT", "acl/token", {"Policies": [{"Name": "locks"}]})
        lost = Recorder[multilock.Loss]()
        connect(server.url, token=made["SecretID"], ttl=3).lock("job", on_lost=lost).acquire()
        if watched:
            time.sleep(0.6)  # wait until the first query was sent, before the right is revoked
        server.ask("PUT", "acl/policy", {"Name": "less", "Rules": kept or 'key "other" { policy = "read" }'})
        server.ask("PUT", f"acl/token/{made['AccessorID']}", {"Policies": [{"Name": "less"}]})
        loss = lost.wait(1, 10.0)
        assert by_the_clock(loss)
        assert not loss.confirmed
        assert server.key("multilock/job/.lock"), "the key stays locked, because no reply said that it is free"
        assert server.requests()["GET session/info"] < 10


def test_a_session_that_ends_after_its_permission_was_revoked_is_lost(connect: Connect) -> None:
    with ConsulServer(token=ROOT_TOKEN, acl=GUARDED) as server:
        server.ask("PUT", "acl/policy", {"Name": "locks", "Rules": RIGHTS})
        made = server.ask("PUT", "acl/token", {"Policies": [{"Name": "locks"}]})
        lost = Recorder[multilock.Loss]()
        connect(server.url, token=made["SecretID"], ttl=30).lock("job", on_lost=lost).acquire()
        server.ask("PUT", f"acl/token/{made['AccessorID']}", {"Policies": []})
        time.sleep(0.6)  # wait until the query was sent
        assert lost.calls == []
        server.ask("PUT", f"session/destroy/{server.sessions()[0]['ID']}")
        loss = lost.wait(1, 5.0)
        assert (loss.reason, loss.confirmed) == (LossReason.SESSION_LOST, True)


# ---- TLS


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a certificate authority, and a certificate for 127.0.0.1 that both server and client use."""
    folder = tmp_path_factory.mktemp("pem")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    for words in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=ca",
        "req -newkey rsa:2048 -nodes -keyout key.pem -out csr -subj /CN=agent",
        "x509 -req -in csr -CA ca.pem -CAkey ca.key -CAcreateserial -out cert.pem -days 2 -extfile san",
    ):
        subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def tls(pem: Path) -> Iterator[ConsulServer]:
    with ConsulServer(
        verify_incoming_https=True,
        ca_file=str(pem / "ca.pem"),
        cert_file=str(pem / "cert.pem"),
        key_file=str(pem / "key.pem"),
    ) as server:
        yield server


def test_tls_works_with_a_certificate_of_our_own_authority(tls: ConsulServer, pem: Path, connect: Connect) -> None:
    url = f"consuls://127.0.0.1:{tls.ports['https']}"
    files = {"ca": str(pem / "ca.pem"), "cert": str(pem / "cert.pem"), "key": str(pem / "key.pem")}
    client = connect(url, **files)
    lost = client.lock("job").acquire()
    waiter = connect(url, **files)
    entered = threading.Event()

    def enter() -> None:
        with waiter.lock("job").acquire(timeout=10):
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert not entered.wait(0.6)
    lost.release()
    assert entered.wait(5)
    thread.join()


def test_a_py_consul_client_passes_on_its_certificates(tls: ConsulServer, pem: Path, connect: Connect) -> None:
    theirs = consul.Consul(
        port=tls.ports["https"],
        scheme="https",
        verify=str(pem / "ca.pem"),
        cert=(str(pem / "cert.pem"), str(pem / "key.pem")),
    )
    with connect("consul://", client=theirs).lock("job"):
        pass


def test_a_python_consul_client_passes_on_its_certificate(
    tls: ConsulServer, pem: Path, tmp_path: Path, connect: Connect
) -> None:
    both = tmp_path / "both.pem"
    both.write_text((pem / "cert.pem").read_text() + (pem / "key.pem").read_text())
    http = OldHttp(tls.ports["https"], "https", str(pem / "ca.pem"), str(both))
    with connect("consul://", client=OldConsul(http)).lock("job"):
        pass


def test_an_agent_with_an_unknown_certificate_is_refused_at_once(tls: ConsulServer, connect: Connect) -> None:
    with pytest.raises(BackendRejected, match="ca="):
        connect(f"consuls://127.0.0.1:{tls.ports['https']}").lock("job").acquire()


def test_without_verification_a_client_works_and_diagnose_says_so(
    tls: ConsulServer, pem: Path, connect: Connect
) -> None:
    url, files = (
        f"consuls://localhost:{tls.ports['https']}",
        {"cert": str(pem / "cert.pem"), "key": str(pem / "key.pem")},
    )
    client = connect(f"{url}?tls_verify=no", **files)
    assert client.lock("unverified").acquire(timeout=10).release()
    assert "tls-verify" in {finding.code for finding in client.diagnose()}
    with pytest.raises(ConfigurationError, match="only consuls://"):
        connect("consul://h?tls_verify=no")


# ---- other tests


def test_diagnose_reports_a_single_server_in_development_mode(shared: ConsulServer, connect: Connect) -> None:
    findings = {finding.code: finding for finding in connect(shared.url).diagnose()}
    assert set(findings) == {"dev-mode", "few-servers"}
    assert all(finding.remedy for finding in findings.values())


def test_diagnose_reports_that_python_consul_is_installed_too(
    shared: ConsulServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: {"python-consul": "1.1.0"}[name])
    [finding] = [each for each in connect(shared.url).diagnose() if each.code == "python-consul"]
    assert "1.1.0" in finding.message


def test_diagnose_reports_an_agent_that_accepts_few_connections(connect: Connect) -> None:
    with ConsulServer(limits={"http_max_conns_per_client": 20}) as server:
        assert "few-connections" in [finding.code for finding in connect(server.url).diagnose()]


def test_a_response_of_another_program_does_not_count(connect: Connect) -> None:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(BackendUnavailable):
                connect(f"consul://127.0.0.1:{server.server_port}").lock("job").try_acquire()
        finally:
            server.shutdown()
            thread.join()


def test_a_forked_child_opens_its_own_connections_and_acquires_its_own_locks(
    shared: ConsulServer, connect: Connect
) -> None:
    client = connect(shared.url)
    lease = client.lock("parents").acquire()
    child = os.fork()
    if child == 0:
        try:
            alone = client.lock("parents").try_acquire() is None and not lease.is_held()
            with client.lock("childs") as mine:
                alone = alone and mine.is_held()
            client.close()
            os._exit(0 if alone else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    lease.renew()
    assert lease.release()
