"""A network of one contender's own: a fault proxy before each host of a URL."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from multilock.testing.proxy import LOCAL, PORTS, Direction, FaultProxy, Traffic

__all__ = ["Network", "has_network"]


def has_network(url: str) -> bool:
    """Whether what this URL names is reached over TCP."""
    return urlsplit(url).scheme not in LOCAL


class Network:
    """All hosts of ``url``, each behind a proxy; `url` leads through them. What is done is done to all."""

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
        for proxy in self.proxies:
            proxy.black_hole(direction)

    def delay(self, seconds: float, direction: Direction = "both") -> None:
        for proxy in self.proxies:
            proxy.delay(seconds, direction)

    def half_open(self) -> None:
        for proxy in self.proxies:
            proxy.half_open()

    def cut(self) -> None:
        for proxy in self.proxies:
            proxy.cut()

    def heal(self) -> None:
        for proxy in self.proxies:
            proxy.heal()

    def connections(self) -> int:
        return sum(len(proxy.connections) for proxy in self.proxies)

    def traffic(self) -> Traffic:
        total = Traffic()
        for each in [proxy.traffic for proxy in self.proxies]:
            total.up_in += each.up_in
            total.up_pieces += each.up_pieces
            total.up_out += each.up_out
            total.down_in += each.down_in
            total.down_out += each.down_out
        return total

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()


def _host(text: str, usual: int | None) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    port = parts.port or usual
    if port is None:
        raise ValueError(f"no usual port is known for {text!r}: name it in the URL")
    return parts.hostname or "127.0.0.1", port
