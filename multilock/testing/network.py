"""A network of its own between one client and its servers: a fault proxy before each host of a URL."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from multilock.testing.proxy import LOCAL, PORTS, Direction, Fault, FaultProxy, Traffic

__all__ = ["Network", "has_network", "why_no_network"]

# Where a client goes on to addresses that the first server it asks tells it, past every proxy before that.
TOLD = ("redis+sentinel", "redis+cluster")


def has_network(url: str) -> bool:
    """Whether what this URL names is reached over TCP."""
    return urlsplit(url).scheme not in LOCAL


def why_no_network(url: str) -> str:
    """Why no `Network` can stand before this URL; empty: it can."""
    scheme = urlsplit(url).scheme
    if scheme in LOCAL:
        return f"{scheme}:// has no network that could fail"
    if scheme in TOLD:
        return f"{scheme}:// tells its clients other addresses, past every proxy"
    return ""


class Network:
    """All hosts of ``url``, each behind a `FaultProxy`; `url` leads through them. What is done is done to all.

    A server with TLS needs a certificate that covers 127.0.0.1.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        login, at, hosts = parts.netloc.rpartition("@")
        self.proxies: list[FaultProxy] = []
        try:
            for host in hosts.split(","):
                name, port = _host(host, PORTS.get(parts.scheme))
                self.proxies.append(FaultProxy(name, port))
        except BaseException:
            self.close()
            raise
        through = ",".join(f"{proxy.host}:{proxy.port}" for proxy in self.proxies)
        self.url = urlunsplit(parts._replace(netloc=f"{login}{at}{through}"))

    def black_hole(self, direction: Direction = "both") -> None:
        """Let nothing through, and say nothing; `heal` delivers what waited."""
        for proxy in self.proxies:
            proxy.black_hole(direction)

    def delay(self, seconds: float, direction: Direction = "both") -> None:
        """Everything arrives ``seconds`` later, in order."""
        for proxy in self.proxies:
            proxy.delay(seconds, direction)

    def half_open(self) -> None:
        """The servers are gone from every present connection, and the client never hears of it."""
        for proxy in self.proxies:
            proxy.half_open()

    def cut(self) -> None:
        """Reset every connection; new ones are served."""
        for proxy in self.proxies:
            proxy.cut()

    def refuse(self) -> None:
        """New connections are refused until `heal`; the present ones stay."""
        for proxy in self.proxies:
            proxy.refuse()

    def drop_reply_after(self, requests: int = 0, containing: bytes = b"") -> Fault:
        """Answer so many more requests; the one after them is executed, its reply is lost, its connection cut.

        Only requests that contain these bytes count. A request is what arrives in one piece: etcd's and ZooKeeper's
        clients also send what nobody asked them to, so say there which one is meant. Once, whichever host it meets;
        ``wait(seconds)`` of what is returned waits for it.
        """
        first, *others = self.proxies
        fault = first.drop_reply(containing, nth=requests + 1)
        for proxy in others:
            proxy.share(fault)
        return fault

    def heal(self) -> None:
        """End all of it, but for what was cut."""
        for proxy in self.proxies:
            proxy.heal()

    def connections(self) -> int:
        """How many there are now."""
        return sum(len(proxy.connections) for proxy in self.proxies)

    def traffic(self) -> Traffic:
        """What has passed so far, over all of them."""
        total = Traffic()
        for each in [proxy.traffic for proxy in self.proxies]:
            total.up_in += each.up_in
            total.up_pieces += each.up_pieces
            total.up_out += each.up_out
            total.down_in += each.down_in
            total.down_out += each.down_out
        return total

    def close(self) -> None:
        """Cut everything. Twice is harmless."""
        for proxy in self.proxies:
            proxy.close()


def _host(text: str, usual: int | None) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    port = parts.port or usual
    if port is None:
        raise ValueError(f"no usual port is known for {text!r}: name it in the URL")
    return parts.hostname or "127.0.0.1", port
