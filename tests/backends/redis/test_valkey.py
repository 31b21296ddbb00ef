"""Valkey under its own name: in the scheme of a URL, in messages, and with clients of valkey-py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
import valkey.asyncio

import multilock
from multilock.errors import ConfigurationError
from multilock_redis import open_backend
from multilock_redis.wire import refusal
from tests.backends.redis.kit import Bare
from tests.servers import RedisServer

LIBRARY: Any = valkey  # some functions of valkey-py have no types
MANAGED = LIBRARY.Sentinel([("s", 1)], sentinel_kwargs={"password": "p@ss"}).master_for("m", password="p@ss", db=2)
SECURED = LIBRARY.Sentinel([("s", 1)], sentinel_kwargs={"ssl": True}).master_for("m", ssl=True)


@pytest.mark.parametrize(
    ("url", "options", "shown"),
    [
        ("valkey://u:p%40ss@h/3", {}, "<RedisBackend valkey://h:6379/3>"),
        ("valkeys://h", {"tls_verify": False}, "<RedisBackend valkeys://h:6379/0>"),
        ("valkey+sentinel://u:p%40ss@a,b/m", {}, "<RedisBackend valkey+sentinel://a:26379,b:26379/m/0>"),
        ("valkeys+cluster://u:p%40ss@a,b:1", {}, "<ClusterBackend valkeys+cluster://a:6379,b:1>"),
        ("valkey://", {"client": valkey.Valkey(host="c", password="p@ss")}, "<RedisBackend valkey://c:6379/0>"),
        ("valkey://", {"client": redis.Redis(host="c")}, "<RedisBackend valkey://c:6379/0>"),
        ("redis://", {"client": valkey.Valkey(host="c")}, "<RedisBackend redis://c:6379/0>"),
        ("valkeys://", {"client": valkey.Valkey(host="c", ssl=True)}, "<RedisBackend valkeys://c:6379/0>"),
        ("valkey://", {"client": LIBRARY.from_url("unix:///s")}, "<RedisBackend unix:///s>"),
        ("valkey+sentinel://", {"client": MANAGED}, "<RedisBackend valkey+sentinel://s:1/m/2>"),
        ("valkeys+sentinel://", {"client": SECURED}, "<RedisBackend valkeys+sentinel://s:1/m/0>"),
        ("redlock://", {"client": [valkey.Valkey(host=h) for h in "abc"]}, "<RedlockBackend redis://a:6379/0, .*>"),
    ],
)
def test_a_place_is_shown_with_the_scheme_of_the_user(url: str, options: dict[str, object], shown: str) -> None:
    backend = open_backend(url, options)
    assert backend.scheme == url.partition(":")[0]
    assert repr(backend) == shown or (".*" in shown and repr(backend).startswith(shown[:-5]))
    assert "p@ss" not in repr(vars(backend))


class Own(valkey.Connection):
    """A connection class of the user."""


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("valkey://h", {"ca": "ca.pem"}, r"only valkeys://"),
        ("valkey+cluster://h", {"tls_verify": "no"}, r"only valkeys\+cluster://"),
        ("valkeys://h", {"tls_verify": "perhaps"}, "tls_verify must be true or false"),
        ("valkey://a,b", {}, r"redlock:// .*valkey\+cluster:// or valkey\+sentinel://"),
        ("valkey://", {"client": valkey.asyncio.Valkey()}, "blocking client"),
        ("valkeys://", {"client": valkey.Valkey()}, "give valkey:// as the URL"),
        ("valkey://", {"client": MANAGED}, r"give valkey\+sentinel://"),
        ("valkeys+sentinel://", {"client": MANAGED}, r"give valkey\+sentinel://"),
        ("valkey+cluster://", {"client": valkey.Valkey()}, "give valkey://"),
        ("valkey+sentinel://", {"client": valkey.Valkey()}, "give valkey://"),
        ("valkey://", {"client": valkey.Valkey(connection_pool=valkey.ConnectionPool(connection_class=Own))}, "by Own"),
    ],
)
def test_an_error_names_the_schemes_of_the_user(url: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_backend(url, options)


@pytest.mark.parametrize("word", ["READONLY", "MOVED 1 h:1", "ERR unknown command"])
def test_the_remedy_for_a_refusal_names_the_schemes_of_the_user(word: str) -> None:
    assert "valkey+" in str(refusal(word, "valkey://h:6379/0"))
    assert "redis" not in str(refusal(word, "valkey://h:6379/0"))
    assert "valkey" not in str(refusal(word, "redis://h:6379/0"))


@pytest.mark.parametrize("settings", [{}, {"decode_responses": True, "protocol": 3}, {"db": 2}])
def test_a_client_of_valkey_py_is_used_by_both_faces_and_stays_open(
    server: RedisServer, settings: dict[str, Any]
) -> None:
    async def in_asyncio() -> None:
        async with multilock.connect_async("valkey://", client=theirs) as client:
            async with client.lock("n") as lease:
                assert theirs.get("multilock/n") in (lease.owner, lease.owner.encode())
            assert await client.lock("m").try_acquire() is None

    with valkey.Valkey(port=server.port, **settings) as theirs:
        with multilock.connect("valkey://", client=theirs) as client:
            held = client.lock("m").acquire(timeout=5)
            held.renew()
            asyncio.run(in_asyncio())
            assert held.release()
        assert theirs.ping() is True


def test_the_login_and_connect_function_of_a_valkey_client_are_used(server: RedisServer, bare: Bare) -> None:
    class Vault(valkey.CredentialProvider):
        def get_credentials(self) -> tuple[str, str]:
            return "app", "secret"

    def on_connect(connection: Any) -> None:
        connected.append(connection)
        connection.on_connect()

    connected: list[object] = []
    bare.acl_setuser("app", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all"], reset=True)
    pool = valkey.ConnectionPool(port=server.port, credential_provider=Vault(), valkey_connect_func=on_connect)
    with valkey.Valkey(connection_pool=pool) as theirs, multilock.connect("valkey://", client=theirs) as client:
        assert client.lock("n").acquire(timeout=5).release()
    assert connected
