"""The parser of HTTP responses: where each response ends, and to which request it belongs."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import io
import re
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilock import BackendUnavailable
from multilock.testing.conformance.spi import Ear
from multilock_consul.wire import HEAD_MAX, Reading, Response
from tests.backends.consul.conftest import WITHIN, Connect, Open, take
from tests.servers_consul import ConsulServer

ANSWERS = {
    b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Consul-Index: 7\r\n\r\n"abc"': (200, b'"abc"'),
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n": (404, b""),
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\n\r\n": (
        200,
        b"abc0123456789",
    ),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nTrailer: x\r\n\r\n": (200, b"a"),
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na": (200, b"a"),
    b"HTTP/1.1 204 No Content\r\n\r\n": (204, b""),
}
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
NO_ANSWERS = {
    "not HTTP": b"SSH-2.0-x\r\n\r\n",
    "a head without an end": b"x" * 70_000,
    "interim answers without an end": b"HTTP/1.1 103 Early Hints\r\n\r\n" * 4000,
    "no status": b"HTTP/1.1 abc\r\n\r\n",
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    "no end told": OK + b"\r\nabc",
    "a length below nothing": OK + b"Content-Length: -5\r\n\r\n",
    "a length that is none": OK + b"Content-Length: 1_0\r\n\r\n",
    "two lengths": OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "more than any answer": OK + b"Content-Length: 99999999999\r\n\r\n",
    "two ends": OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    "an unknown coding": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    "a chunk below nothing": CHUNKED + b"-6\r\nabc\r\n0\r\n\r\n",
    "a chunk that is none": CHUNKED + b"0x5\r\nabcde\r\n0\r\n\r\n",
    "a chunk of another size": CHUNKED + b"2\r\nabc\r\n0\r\n\r\n",
    "a chunk without a size": CHUNKED + b"1" * 70_000,
    "chunks beyond any answer": CHUNKED + b"fffffffffff\r\nabc",
    "trailers without an end": CHUNKED + b"0\r\n" + b"a: b\r\n" * 20_000,
    "a line that is not a header": OK + b"Content-Length: 1\r\nabc\r\n\r\na",
    "a folded header": OK + b"Content-Length: 1\r\n x\r\n\r\na",
    "a bare line feed": OK + b"X: a\nContent-Length: 1\r\n\r\na",
    "a second answer": OK + b"Content-Length: 1\r\n\r\na" + OK,
}


def feed(wire: bytes, size: int = 65536) -> Response | None:
    """Feed the bytes to the parser in pieces of this size, and return the response."""
    reading = Reading()
    for start in range(0, len(wire), size):
        response = reading.feed(wire[start : start + size])
        if response is not None:
            assert start + size >= len(wire), "the answer was taken for whole before its end"
            return response
    return None


@pytest.mark.parametrize("wire", ANSWERS, ids=range(len(ANSWERS)))
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_response_is_complete_only_with_its_last_byte(wire: bytes, size: int) -> None:
    assert feed(wire[:-1], size) is None
    response = feed(wire, size)
    assert response is not None
    assert (response.status, response.body) == ANSWERS[wire]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", NO_ANSWERS)
def test_a_response_without_a_clear_end_is_refused(what: str) -> None:
    with pytest.raises(ValueError):
        feed(NO_ANSWERS[what])


@pytest.mark.parametrize(
    ("head", "closes"),
    [
        (b"HTTP/1.1 200 OK\r\n", False),
        (b"HTTP/1.1 200 OK\r\nConnection: keep-alive, Close\r\n", True),
        (b"HTTP/1.0 200 OK\r\n", True),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", False),
    ],
)
def test_a_response_states_whether_its_connection_ends(head: bytes, closes: bool) -> None:
    response = feed(head + b"Content-Length: 0\r\n\r\n")
    assert response is not None
    assert response.closes is closes


# ---- against http.client

TEXT = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20).map(str.encode)


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """Generate the bytes of a possible reply of a server to one request."""
    body = draw(st.binary(max_size=200))
    names = st.sampled_from([b"X-Consul-Index", b"Date", b"Vary", b"x-a_b.c"])
    headers = [b"%b:%b" % header for header in draw(st.lists(st.tuples(names, TEXT), max_size=4))]
    if draw(st.booleans()):
        headers.append(b"Content-Length: %d" % len(body))
    else:
        headers.append(b"Transfer-Encoding: chunked")
        cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=5)))
        parts = [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
        extension = draw(st.sampled_from([b"", b";a=b"]))
        chunks = [b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts if part]
        body = b"".join(chunks) + b"0\r\n" + draw(st.sampled_from([b"", b"T: x\r\n"])) + b"\r\n"
    interim = b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n" * draw(st.integers(0, 2))
    status = draw(st.sampled_from([b"200 OK", b"404 Not Found", b"409", b"500 Internal Server Error"]))
    return interim + b"\r\n".join([b"HTTP/1.1 " + status, *draw(st.permutations(headers)), b"", b""]) + body


class Socket(io.BytesIO):
    def makefile(self, mode: str) -> Socket:
        return self


def reference(wire: bytes) -> tuple[int, bytes] | None:
    """Read the bytes with the standard library. Return None if it refuses the bytes or finds them incomplete."""
    answer = http.client.HTTPResponse(Socket(wire))  # type: ignore[arg-type]
    try:
        answer.begin()
        return answer.status, answer.read()
    except (http.client.HTTPException, ValueError, OSError):
        return None


@given(answers(), st.integers(1, 300))
def test_responses_are_parsed_as_the_standard_library_parses_them(wire: bytes, size: int) -> None:
    response = feed(wire, size)
    assert response is not None
    assert (response.status, response.body) == reference(wire)
    answer = http.client.HTTPResponse(Socket(wire))  # type: ignore[arg-type]
    answer.begin()
    names = {name.lower() for name in answer.headers}
    assert response.headers == {
        name: ", ".join(value.strip() for value in answer.headers.get_all(name, [])) for name in names
    }


@given(answers(), st.data())
def test_damaged_bytes_are_refused_or_parsed_as_the_standard_library_parses_them(
    wire: bytes, data: st.DataObject
) -> None:
    """For any bytes, the parser terminates, and raises no exception except ValueError."""
    wrong = bytearray(wire)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(wrong)))
        removed = data.draw(st.integers(0, 3))
        wrong[at : at + removed] = data.draw(st.sampled_from([b"", b"-", b"0", b"\n", b"\r\n", b" ", b"\0", b"f"]))
    whole, pieces = outcome(bytes(wrong), 65536), outcome(bytes(wrong), data.draw(st.integers(1, 50)))
    if isinstance(whole, Response):
        assert reference(bytes(wrong)) == (whole.status, whole.body)
        assert pieces == whole or isinstance(pieces, ValueError)


def outcome(wire: bytes, size: int) -> Response | ValueError | None:
    try:
        reading = Reading()
        response = None
        for start in range(0, len(wire), size):
            if response is not None:
                return ValueError("more than one answer")
            response = reading.feed(wire[start : start + size])
        return response
    except ValueError as error:
        return error


@given(st.binary(max_size=400))
def test_parsing_ends_for_any_input(data: bytes) -> None:
    outcome(data, 7)
    outcome(CHUNKED + data, 7)
    outcome(OK + data, 7)


def test_a_response_header_may_be_as_long_as_a_server_sends_it() -> None:
    response = feed(OK + b"X: " + b"x" * (HEAD_MAX - 1000) + b"\r\nContent-Length: 0\r\n\r\n", 4096)
    assert response is not None


# ---- the request to which a reply belongs


class _Pass(http.server.BaseHTTPRequestHandler):
    """Forward each request to the server, and change its reply as the test requires."""

    protocol_version = "HTTP/1.1"
    server: Front

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.port)
        with contextlib.closing(upstream), contextlib.suppress(OSError):  # the client may have closed the connection
            upstream.request(self.command, self.path, body)
            answer = upstream.getresponse()
            said = self.server.choose(self.command + self.path, answer.status, answer.read())
            self.wfile.write(self.server.interim)
            self.send_response(said[0])
            self.send_header("X-Consul-Index", answer.headers.get("X-Consul-Index", "1"))
            self.send_header("Content-Length", str(len(said[1])))
            self.end_headers()
            self.wfile.write(said[1])

    do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Front(http.server.ThreadingHTTPServer):
    """A proxy that adds to the server's replies, or replaces them."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Pass)
        self.port = port
        self.interim = b""
        self.repeats: re.Pattern[str] | None = None
        self.said: tuple[int, bytes] | None = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"consul://127.0.0.1:{self.server_port}"

    def choose(self, asked: str, status: int, body: bytes) -> tuple[int, bytes]:
        """Give each request that matches ``repeats`` the reply to the first such request."""
        if self.repeats is None or not self.repeats.match(asked):
            return status, body
        self.said = self.said or (status, body)
        return self.said

    def repeat(self, asked: str) -> None:
        self.repeats, self.said = re.compile(asked), None

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error: the client has closed its connection."""


@pytest.fixture
def front(server: ConsulServer) -> Iterator[Front]:
    with Front(server.port) as front:
        yield front
        front.shutdown()


def test_an_interim_response_of_a_proxy_is_skipped(server: ConsulServer, front: Front, connect: Connect) -> None:
    front.interim = b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n"
    with connect(server.url).lock("taken").acquire():
        client = connect(front.url)
        with client.lock("free").acquire() as lease:
            lease.renew()
            assert client.lock("taken").try_acquire() is None
            assert not client.lock("never").is_locked()


def test_a_grant_of_another_lock_is_refused(server: ConsulServer, front: Front, open_: Open, ear: Ear) -> None:
    other, ours = open_(server.url), open_(front.url)
    take(other, ear.claim("taken"))
    front.repeat("PUT/v1/txn")
    take(ours, ear.claim("free"))
    with pytest.raises(BackendUnavailable, match="not a reply of Consul"):
        ours.attempt(ear.claim("taken"), False, WITHIN)


def test_a_grant_of_another_session_is_refused(server: ConsulServer, front: Front, open_: Open, ear: Ear) -> None:
    first, second = open_(front.url), open_(front.url)
    front.repeat("PUT/v1/txn")
    take(first, ear.claim("job"))
    with pytest.raises(BackendUnavailable, match="another session"):
        second.attempt(ear.claim("job"), False, WITHIN)


def test_a_renewal_of_another_session_proves_nothing(server: ConsulServer, front: Front, open_: Open, ear: Ear) -> None:
    backend = open_(front.url)
    claims = [ear.claim(f"job-{ttl:g}", ttl=ttl) for ttl in (3.0, 4.0)]
    first, second = [take(backend, claim) for claim in claims]
    front.repeat("PUT/v1/session/renew")
    assert list(backend.renew(first.group, [], WITHIN)) == []
    server.ask("PUT", f"session/destroy/{second.key}")
    with pytest.raises(BackendUnavailable, match="this reply belongs to another request"):
        backend.renew(second.group, [(claims[1], second)], WITHIN)


def test_details_of_another_session_are_not_taken_for_those_of_our_session(
    server: ConsulServer, front: Front, open_: Open, ear: Ear
) -> None:
    backend = open_(front.url)
    first, second = [take(backend, ear.claim(f"job-{ttl:g}", ttl=ttl)) for ttl in (3.0, 4.0)]
    front.repeat("GET/v1/session/info")
    assert backend._session_exists(str(first.key), WITHIN)
    with pytest.raises(BackendUnavailable, match="this reply belongs to another request"):
        backend._session_exists(str(second.key), WITHIN)


def test_details_of_another_key_are_not_shown(server: ConsulServer, front: Front, connect: Connect) -> None:
    connect(server.url).lock("taken").acquire()
    client = connect(front.url)
    front.repeat("GET/v1/kv/")
    assert client.inspect("taken")
    with pytest.raises(BackendUnavailable, match="not a reply of Consul"):
        client.inspect("free")


def test_a_release_counts_only_if_the_response_names_its_key(
    server: ConsulServer, front: Front, open_: Open, ear: Ear
) -> None:
    backend = open_(front.url)
    claims = [ear.claim("first"), ear.claim("second")]
    grants = [take(backend, claim) for claim in claims]
    front.repeat("PUT/v1/txn")
    assert backend.release(claims[0], grants[0], False, WITHIN).ours
    with pytest.raises(BackendUnavailable, match="not a reply of Consul"):
        backend.release(claims[1], grants[1], False, WITHIN)
