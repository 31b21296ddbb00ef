"""Faults between one client and its servers: a fault proxy in front of each host of a URL."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from multilock.testing.proxy import LOCAL, PORTS, Direction, Fault, FaultProxy, Traffic

__all__ = ["Network", "has_network", "why_no_network"]

# Schemes with these endings: their first server gives the client other addresses, so the client bypasses every proxy.
TOLD = ("+sentinel", "+cluster")


def has_network(url: str) -> bool:
    """Return whether the servers of this URL are reached over TCP."""
    return urlsplit(url).scheme not in LOCAL


def why_no_network(url: str) -> str:
    """Return why `Network` cannot be used with this URL, or an empty text if it can."""
    scheme = urlsplit(url).scheme
    if scheme in LOCAL:
        return f"{scheme}:// uses no network"
    if scheme.endswith(TOLD):
        return f"{scheme}:// gives its clients other addresses, so they bypass every proxy"
    return ""


class Network:
    """A `FaultProxy` in front of each host of ``url``. The attribute ``url`` is the URL of these proxies. A fault
    applies to all of them.

    The address in the option ``listen`` of PostgreSQL gets a proxy too. A server with TLS needs a certificate that
    covers 127.0.0.1.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        login, at, hosts = parts.netloc.rpartition("@")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        where = [*hosts.split(","), *([options["listen"]] if "listen" in options else [])]
        self.proxies: list[FaultProxy] = []
        try:
            for host in where:
                name, port = _host(host, PORTS.get(parts.scheme))
                self.proxies.append(FaultProxy(name, port))
        except BaseException:
            self.close()
            raise
        through = [f"{proxy.host}:{proxy.port}" for proxy in self.proxies]
        if "listen" in options:
            options["listen"] = through.pop()
            parts = parts._replace(query=urlencode(options))
        self.url = urlunsplit(parts._replace(netloc=f"{login}{at}{','.join(through)}"))

    def black_hole(self, direction: Direction = "both") -> None:
        """Let nothing pass in this direction. `heal` delivers what was held back."""
        for proxy in self.proxies:
            proxy.black_hole(direction)

    def delay(self, seconds: float, direction: Direction = "both") -> None:
        """Deliver everything ``seconds`` later, in order."""
        for proxy in self.proxies:
            proxy.delay(seconds, direction)

    def half_open(self) -> None:
        """Make the servers vanish from every present connection without notifying the client."""
        for proxy in self.proxies:
            proxy.half_open()

    def cut(self) -> None:
        """Reset every connection. New ones are accepted."""
        for proxy in self.proxies:
            proxy.cut()

    def refuse(self) -> None:
        """Refuse new connections until `heal`. Existing connections stay open."""
        for proxy in self.proxies:
            proxy.refuse()

    def drop_reply_after(self, requests: int = 0, containing: bytes = b"") -> Fault:
        """Let ``requests`` requests pass. The next one is executed, but its reply is lost and its connection is cut.

        Only requests that contain the bytes ``containing`` count. The proxy counts each piece that arrives as one
        request. The clients of etcd and ZooKeeper also send requests of their own, so use ``containing`` to choose the
        right one. The fault happens once, at the host that receives the last counted request. Call ``wait(seconds)`` of
        the returned fault to wait for it.
        """
        first, *others = self.proxies
        fault = first.drop_reply(containing, nth=requests + 1)
        for proxy in others:
            proxy.share(fault)
        return fault

    def heal(self) -> None:
        """End all faults. Connections that were cut stay cut."""
        for proxy in self.proxies:
            proxy.heal()

    def connections(self) -> int:
        """Return how many connections there are now."""
        return sum(len(proxy.connections) for proxy in self.proxies)

    def traffic(self) -> Traffic:
        """Return the bytes and pieces counted so far, summed over all hosts."""
        total = Traffic()
        for each in [proxy.traffic for proxy in self.proxies]:
            total.up_in += each.up_in
            total.up_pieces += each.up_pieces
            total.up_out += each.up_out
            total.down_in += each.down_in
            total.down_out += each.down_out
        return total

    def close(self) -> None:
        """Cut everything. A second call has no effect."""
        for proxy in self.proxies:
            proxy.close()


def _host(text: str, usual: int | None) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    port = parts.port or usual
    if port is None:
        raise ValueError(f"the default port for {text!r} is not known: give one in the URL")
    return parts.hostname or "127.0.0.1", port
