"""URLs, options and client objects that are accepted, or refused before any I/O. Connections of client objects are
never shared."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.sentinel import Sentinel

import multilock
from multilock.errors import BackendRejected, BackendUnavailable, ConfigurationError
from multilock.model import LossReason
from multilock_redis import RedisBackend, open_backend
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Bare, Ours
from tests.servers import RedisServer, free_port

MANAGED = Sentinel([("h", 1)]).master_for("m")  # type: ignore[no-untyped-call]


def test_an_unknown_option_is_refused_with_a_list_of_the_known_options() -> None:
    with pytest.raises(ConfigurationError, match=r"'colour'.*\bca\b.*\bclient\b.*\bdb\b.*\bpassword\b"):
        open_backend("redis://h", {"colour": "red"})


@pytest.mark.parametrize("prefix", ["{a}/", "a*", "a?", "a[b]", "a\\"])
def test_a_prefix_that_redis_would_misread_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigurationError, match="prefix"):
        open_backend("redis://h", {"prefix": prefix})


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("redis://h/x", {}, "database"),
        ("redis://h/-1", {}, "database"),
        ("redis://h", {"db": True}, "database"),
        ("redis://h:99999", {}, "port"),
        ("redis://h", {"ca": "ca.pem"}, "rediss://"),
        ("rediss://h", {"ca": "/no/such/ca.pem"}, "ca=, cert= and key= must be PEM files"),
        ("rediss://h", {"key": "key.pem"}, "key= needs cert="),
        ("redis://h", {"password": 5}, "password must be text"),
        ("unix://", {}, "absolute path"),
        ("unix://host/path", {}, "absolute path"),
        ("redis://h", {"client": "redis"}, "redis.Redis"),
        ("redis://h", {"client": []}, r"not builtins\.list$"),
        ("redis://h", {"client": redis.asyncio.Redis()}, "blocking client"),
        ("rediss://", {"client": redis.Redis()}, "without TLS: make it with ssl=True"),
        ("rediss://", {"client": redis.Redis(unix_socket_path="/s")}, "without TLS"),
        ("redis://", {"client": redis.Redis(), "db": 1}, "one or the other"),
        ("redis://", {"client": MANAGED}, r"give redis\+sentinel://"),
        ("redis://h", {"client": redis.Redis(host="c")}, "redis://c:6379/0, not to the server of the URL"),
        ("redis://c/1", {"client": redis.Redis(host="c")}, "give redis://"),
    ],
)
def test_an_invalid_configuration_is_refused_before_any_request(
    url: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_backend(url, options)


def test_a_possible_rest_of_a_password_is_not_shown_as_a_database() -> None:
    with pytest.raises(ConfigurationError, match="%2F") as caught:
        open_backend("redis://user:12/s3cret@h/0", {})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "options", "shown"),
    [
        ("redis://", {}, "redis://localhost:6379/0"),
        ("redis://h/3", {}, "redis://h:6379/3"),
        ("redis://h:1/3", {"db": "4"}, "redis://h:1/4"),
        ("redis://u:p%40ss@[::1]:7/0", {}, "redis://[::1]:7/0"),
        ("rediss://h", {"username": "u", "password": "p@ss"}, "rediss://h:6379/0"),
        ("unix:///run/redis%20x.sock", {"db": 2}, "unix:///run/redis x.sock"),
        ("redis://", {"client": redis.Redis(host="c", port=2, db=5, password="p@ss")}, "redis://c:2/5"),
        ("redis://", {"client": redis.Redis(unix_socket_path="/s")}, "unix:///s"),
        ("rediss://", {"client": redis.Redis(host="c", ssl=True)}, "rediss://c:6379/0"),
        ("redis://c/1", {"client": redis.Redis(host="c", db=1)}, "redis://c:6379/1"),
    ],
)
def test_an_address_is_shown_without_its_secrets(url: str, options: dict[str, object], shown: str) -> None:
    backend = open_backend(url, options)
    assert isinstance(backend, RedisBackend)
    assert repr(backend) == f"<RedisBackend {shown}>"
    assert "p@ss" not in repr(vars(backend)) + repr(backend._endpoint)


def test_the_capabilities_name_the_scheme_of_the_url() -> None:
    assert [open_backend(url, {}).scheme for url in ("redis://h", "rediss://h", "unix:///s")] == [
        "redis",
        "rediss",
        "unix",
    ]


def test_the_takeover_bound_follows_the_ttl_of_the_client() -> None:
    bounds = [open_backend("redis://h", {"ttl": ttl}).capabilities.takeover_bound for ttl in (0.5, 3.0, 30.0)]
    assert bounds == pytest.approx([1.0 + 1.1 / 3, 3.0 + 1.1, 30.0 + 2.2])


def test_two_prefixes_in_two_databases_are_four_separate_places(connect: Connect) -> None:
    for db in (0, 1):
        for prefix in ("a/", "b/"):
            connect(prefix=prefix, db=db).take()


# a client object passed to connect()


@pytest.mark.parametrize(
    "settings", [{}, {"decode_responses": True}, {"protocol": 3}, {"db": 2}, {"max_connections": 1}]
)
def test_a_client_object_passed_to_connect_is_used_and_stays_open(
    server: RedisServer, settings: dict[str, Any]
) -> None:
    with redis.Redis(port=server.port, **settings) as client:
        ours = Ours("redis://", client=client)
        held = ours.take()
        ours.watch(held)
        assert client.get("multilock/a") in (held[0].owner, held[0].owner.encode())
        client.delete("multilock/a")
        ours.ear.hears("gone", held[0].id, LossReason.TAKEN)
        ours.close()
        assert client.ping() is True


def test_a_fake_redis_is_refused_at_once_with_the_remedy() -> None:
    theirs = type("FakeConnection", (redis.Connection,), {"__module__": "fakeredis._connection"})
    pool = redis.ConnectionPool(connection_class=theirs)
    for connect in (multilock.connect, multilock.connect_async):
        with pytest.raises(multilock.ConfigurationError, match=r"is a FakeRedis.* use memory:// in a test"):
            connect("redis://", client=redis.Redis(connection_pool=pool))


def test_the_retries_of_a_client_object_passed_to_connect_are_not_used(server: RedisServer) -> None:
    with redis.Redis(host="127.0.0.1", port=1) as client:  # by default, redis-py retries ten times
        ours = Ours("redis://", client=client)
        with pytest.raises(BackendUnavailable):
            ours.take()
        ours.close()


def test_the_credentials_of_a_client_object_passed_to_connect_are_used(server: RedisServer, bare: Bare) -> None:
    class Vault(redis.CredentialProvider):
        def get_credentials(self) -> tuple[str, str]:
            return "app", "secret"

    bare.acl_setuser("app", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all"], reset=True)
    with redis.Redis(port=server.port, credential_provider=Vault()) as client:
        ours = Ours("redis://", client=client)
        ours.take()
        ours.close()


def test_connecting_searches_no_installed_packages(
    server: RedisServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[str] = []

    def version(package: str) -> str:
        searched.append(package)
        return "1"

    monkeypatch.setattr(metadata, "version", version)
    connect(server.url).take()
    assert searched == []


def test_a_unix_socket_can_be_used(tmp_path: Path) -> None:
    with RedisServer("--unixsocket", "redis.sock") as server:
        folder = server._folder
        assert folder is not None
        ours = Ours(f"unix://{folder.name}/redis.sock", db="1")
        held = ours.take()
        ours.watch(held)
        ours.close()


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


@pytest.fixture
def tls(certificates: Path) -> Iterator[str]:
    files = {"cert-file": "cert.pem", "key-file": "key.pem", "ca-cert-file": "cert.pem"}
    options = [part for name, file in files.items() for part in (f"--tls-{name}", str(certificates / file))]
    port = str(free_port())
    with RedisServer("--tls-port", port, *options):
        yield f"rediss://localhost:{port}/0"


def test_asyncio_over_tls_sends_its_requests_on_threads(tls: str, certificates: Path) -> None:
    files = {"ca": "cert.pem", "cert": "cert.pem", "key": "key.pem"}

    async def main() -> None:
        options: dict[str, Any] = {name: str(certificates / file) for name, file in files.items()}
        async with multilock.connect_async(tls, **options) as client:
            for _ in range(3):
                assert await (await client.lock("a").acquire(timeout=5)).release()

    asyncio.run(main())


def test_an_encrypted_key_file_is_refused_without_a_prompt(certificates: Path, tmp_path: Path) -> None:
    key = tmp_path / "secret.pem"
    make = ["openssl", "pkey", "-aes128", "-passout", "pass:x", "-in", str(certificates / "key.pem"), "-out", str(key)]
    subprocess.run(make, check=True, capture_output=True)
    with pytest.raises(ConfigurationError, match="PEM files"):
        open_backend("rediss://h", {"cert": str(certificates / "cert.pem"), "key": str(key)})


def test_tls_works_with_a_ca_and_a_client_certificate(tls: str, certificates: Path) -> None:
    files = {"ca": "cert.pem", "cert": "cert.pem", "key": "key.pem"}
    options: dict[str, Any] = {name: str(certificates / file) for name, file in files.items()}
    us, them = (Ours(tls, within=10.0, **options) for _ in range(2))  # a busy machine needs seconds for a handshake
    held = us.take()
    us.watch(held)
    waiter = them.wait()
    us.release(held[0])
    them.ear.hears("wake", waiter.id)
    held = them.take(waiter)
    them.watch(held)
    assert all(them.renew(held))
    us.backend.force_release("a", 1)
    them.ear.hears("gone", held[0].id, LossReason.TAKEN)
    us.close()
    them.close()


def test_an_unknown_certificate_is_rejected(tls: str) -> None:
    ours = Ours(tls)
    with pytest.raises(BackendRejected, match="not trusted"):
        ours.take()
    ours.close()


# several addresses


@pytest.mark.parametrize("url", ["redis://a:1,b:2/0", "redis://a,b", "rediss://u:p@[::1]:1,[::2]:2/0"])
def test_a_url_with_one_address_is_sufficient(url: str) -> None:
    secure = "s" if url.startswith("rediss") else ""
    ways = rf"takes one address.*redlock{secure}://.*redis{secure}\+cluster://.*redis{secure}\+sentinel://\?$"
    with pytest.raises(ConfigurationError, match=ways):
        open_backend(url, {})


def test_a_comma_in_a_password_does_not_begin_another_address() -> None:
    assert open_backend("redis://u:a,b@h:1/0", {})


def test_a_password_in_place_of_the_database_is_not_shown() -> None:
    for url, options in (("redis://h/s3cr3t", {}), ("redis://h", {"db": "s3cr3t"})):
        with pytest.raises(ConfigurationError, match="the database must be a number") as caught:
            open_backend(url, options)
        assert "s3cr3t" not in str(caught.value)
