"""If a URL leads to another service, or to a TLS port without using TLS, the error says so."""

from __future__ import annotations

import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import multilock
from multilock import BackendUnavailable, Client, MultilockError
from multilock.options import who_answered
from tests.servers import RedisServer, free_port
from tests.servers_consul import ConsulServer
from tests.servers_etcd import EtcdServer
from tests.servers_sentinel import SentinelServer


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    folder: Path = tmp_path_factory.mktemp("tls")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    rest = ["-subj", "/CN=localhost", "-days", "2", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*make, *rest], cwd=folder, check=True, capture_output=True)
    files = {"cert-file": "cert.pem", "key-file": "key.pem", "ca-cert-file": "cert.pem"}
    options = [part for name, file in files.items() for part in (f"--tls-{name}", str(folder / file))]
    port = str(free_port())
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer("--tls-port", port, *options))
        consul, etcd = stack.enter_context(ConsulServer()), stack.enter_context(EtcdServer())
        guard = stack.enter_context(SentinelServer(lambda: [f"sentinel monitor tls 127.0.0.1 {port} 2"]))
        yield {
            "sentinel": guard.endpoint,
            "redis": redis.endpoint,
            "redis with TLS": f"127.0.0.1:{port}",
            "consul": consul.endpoint,
            "etcd": etcd.endpoint,
        }


@pytest.mark.parametrize(
    ("scheme", "place", "says"),
    [
        ("redis", "consul", "an HTTP server listens there: it is not Redis"),
        ("redis", "redis with TLS", "If it uses TLS, write rediss://"),
        ("redis", "etcd", "is it a Redis?"),
        ("rediss", "redis", r"does this server use TLS\? If not, write redis://"),
        ("rediss", "consul", "this server does not use TLS: write redis://"),
        ("redis", "sentinel", r"is it a Sentinel\? Then give redis\+sentinel://host:port/NAME"),
        ("rediss", "sentinel", r"does this server use TLS\? If not, write redis://"),
        ("redis+sentinel", "redis", "it is not a Sentinel: give redis:// with this address"),
        ("redis+sentinel", "consul", "an HTTP server listens there: it is not Redis"),
        ("redis+sentinel", "redis with TLS", r"\(a Sentinel\).*If it uses TLS, write rediss\+sentinel://"),
        ("redis+sentinel", "sentinel", r"/tls/0 at .*If it uses TLS, write rediss\+sentinel://"),
        (
            "rediss+sentinel",
            "sentinel",
            r"does this server use TLS\? If not, write redis\+sentinel://",
        ),
        ("rediss+sentinel", "consul", r"this server does not use TLS: write redis\+sentinel://"),
        ("consul", "redis", "is it a Consul agent?"),
        ("consul", "redis with TLS", "If it uses TLS, write consuls:// in the URL"),
        ("consul", "etcd", "an HTTP server that is not Consul made no session"),
        ("consuls", "consul", "this server does not use TLS: write consul:// in the URL"),
        ("etcd", "redis", "a Redis listens there, not etcd"),
        ("etcd", "consul", "an HTTP server listens there, not etcd"),
        ("etcds", "consul", "this server does not use TLS: write etcd:// in the URL"),
    ],
)
def test_an_error_about_another_service_names_it(places: dict[str, str], scheme: str, place: str, says: str) -> None:
    path = "/tls" if "sentinel" in scheme else ""
    client = multilock.connect(f"{scheme}://{places[place]}{path}", ttl=10, request_timeout=2)
    with client, pytest.raises(MultilockError, match=says):
        client.lock("a").acquire(timeout=0)


def test_a_server_that_is_down_gets_no_further_request_to_identify_it() -> None:
    for scheme in ("redis", "rediss", "consul", "consuls"):
        with multilock.connect(f"{scheme}://127.0.0.1:{free_port()}", ttl=10, request_timeout=2) as client:
            with pytest.raises(MultilockError, match="cannot be reached") as caught:
                client.lock("a").acquire(timeout=0)
            assert "URL" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://{}", "redlock://{},{},{}", "consul://{}", "etcd://{}", "zk://{}", "postgres://{}"]
)
def test_an_error_about_a_server_that_is_down_says_what_to_check(url: str) -> None:
    places = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    with multilock.connect(url.format(*places), ttl=10, request_timeout=2) as client:
        for ask in (lambda: client.lock("a").acquire(timeout=0), client.ping):
            with pytest.raises(BackendUnavailable, match="cannot be reached: ") as caught:
                ask()
            assert [told.strip(".") for told in str(caught.value).split(": is the server running, ")][1:] == [
                "and are its host and port right? (`multilock doctor` checks them)"
            ]


@pytest.mark.parametrize(
    ("said", "who"),
    [
        (b"\x15\x03\x03\x00\x02\x02\x46", "what listens there speaks TLS"),
        (b"HTTP/1.0 400 Bad Request\r\n", "an HTTP server listens there"),
        (b"-NOAUTH Authentication required.\r\n", "a Redis listens there"),
        (b"\x00\x00\x06\x04\x00\x00\x00\x00\x00", "an HTTP/2 server listens there, as etcd is one"),
        (b"SSH-2.0-OpenSSH", None),
        (b"", None),
    ],
)
def test_the_first_bytes_identify_the_server(said: bytes, who: str | None) -> None:
    assert who_answered(said) == who


SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "url",
    [
        "redis://:{}@127.0.0.1:1",
        "redis://u:{}@127.0.0.1:1/x",
        "redis://u:{}@127.0.0.1:bad/0",
        "redis://u:p%40{}@127.0.0.1:1",
        "redis://u:a@{}@127.0.0.1:1",
        "redis://u:a/{}@127.0.0.1:1",
        "redis://u:a?{}@127.0.0.1:1",
        "redis://u:a#{}@127.0.0.1:1",
        "redis://u:%zz{}@127.0.0.1:1",
        "redis://u:{}@a:1,b:2/0",
        "redis://127.0.0.1:1/{}",
        "redis://127.0.0.1:1?db={}",
        "redis://127.0.0.1:1?password={}&colour=3",
        "rediss://u:{}@127.0.0.1:1",
        "redlock://u:{}@a,b,c",
        "redis+sentinel://u:{}@a,b,c",
        "redis+sentinel://u:{}@127.0.0.1:1/m",
        "redis+sentinel://u:a/{}@127.0.0.1:1/m",
        "redis+sentinel://127.0.0.1:1/m/{}",
        "redis+sentinel://127.0.0.1:1/m?sentinel_password={}",
        "nosuch://u:{}@h",
        "u:{}@h:1",
        "consul://127.0.0.1:1?token={}",
        "consul://u:{}@127.0.0.1:1",
        "etcd://u:{}@127.0.0.1:1",
        "etcd://127.0.0.1:1?username=u&password={}",
        "zookeeper://u:{}@127.0.0.1:1/x",
        "zookeeper://127.0.0.1:1/x?username=u&password={}",
        "sqlite://u:{}@h/x",
        "unix://u:{}@/no/such.sock",
    ],
)
def test_a_password_is_never_shown(url: str, caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str] = []
    with caplog.at_level("DEBUG"):
        try:
            with multilock.connect(url.format(SECRET), ttl=10, request_timeout=0.5) as client:
                shown += [repr(client), repr(client._kernel.settings), repr(client._kernel.backend)]
                client.lock("a").acquire(timeout=0)
        except MultilockError as error:
            shown.append("".join(traceback.format_exception(error)))
            shown.append(repr(error))
    assert shown
    assert SECRET not in "\n".join(shown)
    assert SECRET not in caplog.text


@pytest.mark.parametrize("ask", [Client.diagnose, lambda client: client.lock("a").acquire(0)])
@pytest.mark.parametrize(
    ("scheme", "path"),
    [
        ("redis", "/0"),
        ("redis+sentinel", "/name"),
        ("redis+cluster", ""),
        ("redlock", "/0"),
        ("etcd", ""),
        ("consul", ""),
        ("zookeeper", ""),
    ],
)
def test_the_error_about_a_refused_connection_names_the_scheme_and_the_cause(
    scheme: str, path: str, ask: Callable[[Client], object]
) -> None:
    """The error names the scheme of the URL, even if the backend uses another one internally. The `__cause__` of the
    error is the exception of the client library."""
    hosts = ",".join(f"127.0.0.1:{free_port()}" for _ in range(3 if scheme == "redlock" else 1))
    client = multilock.connect(f"{scheme}://{hosts}{path}", ttl=10, request_timeout=2)
    with client, pytest.raises(BackendUnavailable) as caught:
        ask(client)
    assert caught.value.backend == scheme
    assert caught.value.__cause__ is not None
    assert not isinstance(caught.value.__cause__, MultilockError)
