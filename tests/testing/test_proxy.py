"""Each method of the fault proxy causes its fault."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from multilock.testing.proxy import FaultProxy

SILENCE = 0.15  # seconds without a byte that count as silence


class Echo:
    """Send each received piece back, and record it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.seen: list[bytes] = []
        self.arrived = threading.Condition()
        self.ended = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def wait(self, ready: Callable[[], bool]) -> None:
        with self.arrived:
            assert self.arrived.wait_for(ready, 5.0)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # this ends accept(); close() alone does not
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1000):
                    with self.arrived:
                        self.seen.append(data)
                        self.arrived.notify_all()
                    connection.sendall(data)
            except OSError:
                pass
        with self.arrived:
            self.ended += 1
            self.arrived.notify_all()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.stop()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy(*echo.listener.getsockname()) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[socket.socket]:
    with connect(proxy) as client:
        yield client


def connect(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection((proxy.host, proxy.port), timeout=5.0)


def ask(client: socket.socket, text: bytes) -> bytes:
    client.sendall(text)
    return client.recv(1000)


def says_nothing(client: socket.socket) -> bool:
    client.settimeout(SILENCE)
    try:
        return client.recv(1000) == b"never"
    except TimeoutError:
        return True
    finally:
        client.settimeout(5.0)


def test_a_healthy_proxy_passes_bytes_and_the_end_both_ways(client: socket.socket, echo: Echo) -> None:
    assert ask(client, b"hello") == b"hello"
    client.close()
    echo.wait(lambda: echo.ended == 1)


def test_large_data_arrives_whole_and_in_order(client: socket.socket) -> None:
    sent = b"".join(b"%07d\n" % n for n in range(100_000))
    threading.Thread(target=client.sendall, args=(sent,), daemon=True).start()
    got = bytearray()
    while len(got) < len(sent):
        got += client.recv(100_000)
    assert bytes(got) == sent


def test_a_cut_connection_is_reset_and_a_new_one_works(proxy: FaultProxy, client: socket.socket) -> None:
    ask(client, b"1")
    proxy.cut()
    with pytest.raises(ConnectionError):
        client.recv(10)
    with connect(proxy) as again:
        assert ask(again, b"2") == b"2"


def test_one_connection_is_cut_and_the_other_lives(proxy: FaultProxy, client: socket.socket) -> None:
    ask(client, b"1")
    (first,) = proxy.connections
    with connect(proxy) as other:
        ask(other, b"2")
        first.cut()
        with pytest.raises(ConnectionError):
            client.recv(10)
        assert ask(other, b"3") == b"3"


@pytest.mark.parametrize("direction", ["up", "down", "both"])
def test_a_black_hole_is_silent_and_delivers_when_it_heals(
    proxy: FaultProxy, client: socket.socket, echo: Echo, direction: str
) -> None:
    ask(client, b"1")
    proxy.black_hole(direction)  # type: ignore[arg-type]
    client.sendall(b"2")
    if direction == "down":
        echo.wait(lambda: b"2" in echo.seen)
    assert says_nothing(client)
    assert (b"2" in echo.seen) == (direction == "down")
    proxy.heal()
    assert client.recv(10) == b"2"


def test_a_black_hole_for_new_connections_leaves_the_present_ones_alone(
    proxy: FaultProxy, client: socket.socket
) -> None:
    ask(client, b"1")
    proxy.black_hole(which="new")
    assert ask(client, b"2") == b"2"
    with connect(proxy) as new:
        new.sendall(b"3")
        assert says_nothing(new)


def test_delayed_bytes_arrive_late_and_in_order(proxy: FaultProxy, client: socket.socket) -> None:
    proxy.delay(1.0, "down")
    client.sendall(b"1")
    assert says_nothing(client)
    assert client.recv(10) == b"1"


def test_a_refusing_proxy_refuses_until_it_accepts_again(proxy: FaultProxy, client: socket.socket) -> None:
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    assert ask(client, b"1") == b"1"
    proxy.accept()
    with connect(proxy) as again:
        assert ask(again, b"2") == b"2"


def test_a_dropped_reply_was_executed_and_the_connection_is_cut(
    proxy: FaultProxy, client: socket.socket, echo: Echo
) -> None:
    lost = proxy.drop_reply(b"take", nth=2)
    assert ask(client, b"take 1") == b"take 1"
    client.sendall(b"take 2")
    with pytest.raises(ConnectionError):
        client.recv(10)
    lost.wait(5.0)
    assert b"take 2" in echo.seen


def test_a_dropped_reply_can_leave_the_connection_open_and_silent(
    proxy: FaultProxy, client: socket.socket, echo: Echo
) -> None:
    lost = proxy.drop_reply(then="hold")
    client.sendall(b"1")
    lost.wait(5.0)
    assert echo.seen == [b"1"]
    assert says_nothing(client)


def test_a_held_request_is_executed_when_released_although_its_client_is_gone(
    proxy: FaultProxy, client: socket.socket, echo: Echo
) -> None:
    held = proxy.hold_request(b"late")
    client.sendall(b"late")
    held.wait(5.0)
    client.close()
    with connect(proxy) as other:
        assert ask(other, b"first") == b"first"
    assert echo.seen == [b"first"]
    held.release()
    echo.wait(lambda: echo.seen == [b"first", b"late"])


def test_a_fault_that_does_not_occur_is_a_timeout(proxy: FaultProxy) -> None:
    with pytest.raises(TimeoutError, match="no fault within"):
        proxy.drop_reply(b"nothing").wait(0.01)


def test_a_client_of_a_dead_server_receives_nothing(proxy: FaultProxy, client: socket.socket, echo: Echo) -> None:
    ask(client, b"1")
    proxy.half_open("server")
    echo.wait(lambda: echo.ended == 1)
    client.sendall(b"2")
    assert says_nothing(client)
    assert echo.seen == [b"1"]


def test_a_server_of_a_dead_client_receives_nothing(proxy: FaultProxy, client: socket.socket, echo: Echo) -> None:
    ask(client, b"1")
    proxy.half_open("client")
    with pytest.raises(ConnectionError):
        client.recv(10)
    assert echo.ended == 0


def test_a_server_that_is_down_resets_the_client(proxy: FaultProxy, echo: Echo) -> None:
    echo.stop()
    with pytest.raises(ConnectionError), connect(proxy) as client:
        client.recv(10)


def test_the_url_leads_through_the_proxy_and_keeps_the_rest() -> None:
    with FaultProxy.before("redis://user:word@127.0.0.1:6379/2?ttl=3") as proxy:
        assert proxy.url == f"redis://user:word@127.0.0.1:{proxy.port}/2?ttl=3"
        assert proxy.port != 6379


def test_a_closed_proxy_leaves_no_thread_and_refuses_connections(echo: Echo) -> None:
    proxy = FaultProxy(*echo.listener.getsockname())
    proxy.close()
    proxy.close()
    assert not proxy._thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    for act in (proxy.cut, proxy.heal, proxy.drop_reply, lambda: proxy.connections):
        with pytest.raises(RuntimeError, match="proxy is closed"):
            act()


@pytest.mark.parametrize(
    ("scheme", "port"),
    [
        ("redis", 6379),
        ("rediss", 6379),
        ("consul", 8500),
        ("consuls", 8501),
        ("etcd", 2379),
        ("etcds", 2379),
        ("zookeeper", 2181),
        ("zk", 2181),
    ],
)
def test_a_url_without_a_port_means_the_default_port_of_its_backend(scheme: str, port: int) -> None:
    with FaultProxy.before(f"{scheme}://server") as proxy:
        assert repr(proxy) == f"<FaultProxy 127.0.0.1:{proxy.port} before server:{port}>"
        assert proxy.url == f"{scheme}://127.0.0.1:{proxy.port}"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://x", "does not use TCP"),
        ("sqlite:////tmp/x.db", "does not use TCP"),
        ("unix:///tmp/x.sock", "does not use TCP"),
        ("mine://127.0.0.1", "give one in the URL"),
        ("etcd://me:hush@127.0.0.1:1,127.0.0.1:2", "make one proxy for each"),
    ],
)
def test_a_url_that_no_proxy_can_serve_raises_an_error(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        FaultProxy.before(url)
    assert "hush" not in str(caught.value)


def test_an_unknown_scheme_may_name_its_port() -> None:
    with FaultProxy.before("mine://127.0.0.1:1234") as proxy:
        assert proxy.url == f"mine://127.0.0.1:{proxy.port}"
    with FaultProxy.before("mine://127.0.0.1", 1234) as proxy:
        assert proxy.url == f"mine://127.0.0.1:{proxy.port}"


@pytest.mark.parametrize(
    "act",
    [
        lambda proxy: proxy.black_hole("sideways"),
        lambda proxy: proxy.black_hole(which="old"),
        lambda proxy: proxy.delay(1, "sideways"),
        lambda proxy: proxy.delay(1, which="old"),
        lambda proxy: proxy.delay(-1),
        lambda proxy: proxy.delay(float("nan")),
        lambda proxy: proxy.half_open("both"),
        lambda proxy: proxy.drop_reply(then="heal"),
        lambda proxy: proxy.drop_reply(nth=0),
        lambda proxy: proxy.hold_request(nth=0),
    ],
)
def test_wrong_arguments_are_reported_even_without_a_connection(
    proxy: FaultProxy, act: Callable[[FaultProxy], object]
) -> None:
    with pytest.raises(ValueError):
        act(proxy)


def test_wrong_arguments_are_reported_for_one_connection_too(proxy: FaultProxy, client: socket.socket) -> None:
    ask(client, b"1")
    (first,) = proxy.connections
    for act in (first.black_hole, first.half_open):
        with pytest.raises(ValueError, match="sideways"):
            act("sideways")  # type: ignore[arg-type]
    assert ask(client, b"2") == b"2"


def test_a_request_is_recognised_by_bytes(proxy: FaultProxy, client: socket.socket) -> None:
    with pytest.raises(TypeError, match="bytes"):
        proxy.drop_reply("EVALSHA")  # type: ignore[arg-type]
    assert ask(client, b"1") == b"1"


def test_the_traffic_record_shows_received_and_forwarded_bytes(proxy: FaultProxy, client: socket.socket) -> None:
    client.sendall(b"ab")
    assert client.recv(2) == b"ab"
    before = proxy.traffic
    assert (before.up_in, before.up_out, before.down_in, before.down_out) == (2, 2, 2, 2)
    proxy.black_hole("down")
    client.sendall(b"cde")
    while (seen := proxy.traffic).down_in < 5:
        pass
    assert (seen.up_in, seen.up_out, seen.down_out) == (5, 5, 2)
    proxy.heal()
    assert client.recv(3) == b"cde"
