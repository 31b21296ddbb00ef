"""`Network` causes the same faults for one host and for several."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from multilock.testing import Network
from multilock.testing.network import why_no_network
from tests.testing.test_proxy import Echo


@pytest.fixture
def echoes() -> Iterator[list[Echo]]:
    servers = [Echo(), Echo()]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def network(echoes: list[Echo]) -> Iterator[Network]:
    hosts = ",".join("{}:{}".format(*server.listener.getsockname()) for server in echoes)
    network = Network(f"etcd://user:hush@{hosts}?ttl=5")
    yield network
    network.close()


@pytest.fixture
def clients(network: Network) -> Iterator[list[socket.socket]]:
    sockets = [socket.create_connection((proxy.host, proxy.port), timeout=10.0) for proxy in network.proxies]
    yield sockets
    for each in sockets:
        each.close()


def ask(client: socket.socket, text: bytes) -> bytes:
    client.sendall(text)
    return client.recv(100)


def test_the_url_leads_through_a_proxy_for_each_host_and_keeps_the_rest(network: Network) -> None:
    one, other = network.proxies
    assert network.url == f"etcd://user:hush@{one.host}:{one.port},{other.host}:{other.port}?ttl=5"
    assert "hush" not in repr(network)


def test_the_address_for_notifications_leads_through_a_proxy_too() -> None:
    with contextlib.closing(Network("postgresql://pooler:1/shop?listen=server&schema=x")) as network:
        one, other = network.proxies
        address = f"{other.host}%3A{other.port}"
        assert network.url == f"postgresql://{one.host}:{one.port}/shop?listen={address}&schema=x"


def test_one_reply_is_lost_whichever_host_the_request_goes_to(
    network: Network, clients: list[socket.socket], echoes: list[Echo]
) -> None:
    first, second = clients
    fault = network.drop_reply_after(2, b"lock")
    assert ask(first, b"lock 1") == b"lock 1"
    assert ask(second, b"ping") == b"ping"  # not counted: it does not contain b"lock"
    assert ask(second, b"lock 2") == b"lock 2"
    with pytest.raises(ConnectionResetError):
        ask(second, b"lock 3")
    fault.wait(10.0)
    echoes[1].wait(lambda: b"lock 3" in echoes[1].seen)  # the server executed the request
    assert ask(first, b"lock 4") == b"lock 4"


def test_a_fault_applies_to_all_hosts(network: Network, clients: list[socket.socket]) -> None:
    network.black_hole()
    for client in clients:
        client.sendall(b"hello")
    network.heal()
    assert [client.recv(100) for client in clients] == [b"hello", b"hello"]
    network.cut()
    for client in clients:
        with pytest.raises(ConnectionResetError):
            ask(client, b"hello")
    network.refuse()
    for proxy in network.proxies:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((proxy.host, proxy.port), timeout=10.0)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("memory://", "no network"),
        ("sqlite:////tmp/l.db", "no network"),
        ("redis+sentinel://h/name", "other addresses"),
        ("redis+cluster://h", "other addresses"),
        ("redis://h", ""),
        ("redlock://h1,h2,h3/0", ""),
    ],
)
def test_a_url_that_no_proxy_can_serve_is_reported(url: str, why: str) -> None:
    assert why in why_no_network(url)
    assert bool(why) == bool(why_no_network(url))
