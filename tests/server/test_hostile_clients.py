"""Clients that are slow, greedy or gone harm nobody but themselves."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from support.server import KEY, METRICS_TOKEN, Server, running_server

pytestmark = pytest.mark.server

MAX_PER_ADDRESS = 24
MAX_QUEUE = 24  # of which the one tenant may have 18
LONG = {"model": "base", "prompt": "Hello", "max_tokens": 2000, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 2}


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory, serve_options: list[str]) -> Iterator[Server]:
    """A server with little patience."""
    options = [
        "--request-timeout=1",
        "--send-timeout=1",
        "--keep-alive-timeout=1",
        "--max-unread=64KiB",
        f"--metrics-token={METRICS_TOKEN}",
        f"--max-queue={MAX_QUEUE}",
        f"--max-connections-per-address={MAX_PER_ADDRESS}",
    ]
    with running_server(tmp_path_factory.mktemp("home"), *serve_options, *options) as server:
        yield server


def connect(server: Server) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def post(body: object) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def read_to_end(connection: socket.socket) -> bytes:
    """Until the server closes it."""
    content = b""
    try:
        while piece := connection.recv(2**16):
            content += piece
    except ConnectionResetError:
        pass
    return content


def wait_running(server: Server, count: int) -> None:
    deadline = time.monotonic() + 60
    while server.metric("vllm:num_requests_running") < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_served(server: Server) -> bool:
    with server.http() as http:
        return http.post("/v1/completions", json=SHORT).status_code == 200


@pytest.mark.parametrize("at_once", [True, False])
def test_pipelined_requests_end_with_their_connection(strict: Server, at_once: bool) -> None:
    before = strict.metric("vllm:generation_tokens_total")
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(strict)) for _ in range(4)]
        for connection in connections:
            connection.sendall(post(LONG) * (2 if at_once else 1))
        wait_running(strict, 4)
        for connection in connections:
            connection.sendall(b"" if at_once else post(LONG))

    strict.wait_idle()

    assert strict.metric("vllm:generation_tokens_total") - before < 4 * 2000
    assert is_served(strict)


def test_pipelined_requests_are_answered_one_after_the_other(strict: Server) -> None:
    with connect(strict) as connection:
        connection.sendall(post(SHORT) * 2)
        connection.sendall(post(SHORT))
        content = read_to_end(connection)

    assert content.count(b"HTTP/1.1 200 OK") == 3


def test_more_than_may_be_pipelined_ends_the_connection(strict: Server) -> None:
    with connect(strict) as connection:
        connection.sendall(post(LONG))
        wait_running(strict, 1)
        try:
            for _ in range(64):
                connection.sendall(post({**SHORT, "user": "x" * 10_000}))
        except OSError:
            pass
        assert b"HTTP/1.1 200" not in read_to_end(connection)

    strict.wait_idle()


@pytest.mark.parametrize(
    "part",
    [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: x\r\n", post(LONG)[:-1]],
    ids=["nothing", "path", "head", "body"],
)
def test_a_request_that_stays_incomplete_is_ended(strict: Server, part: bytes) -> None:
    with connect(strict) as connection:
        connection.sendall(part)
        content = read_to_end(connection)

    assert content.startswith(b"HTTP/1.1 408 ")
    assert json.loads(content.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


def test_a_request_that_comes_byte_by_byte_is_ended(strict: Server) -> None:
    started = time.monotonic()
    with connect(strict) as connection:
        try:
            for byte in b"GET /health HTTP/1.1\r\nX: " + b"y" * 1000:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
        except OSError:
            pass

    assert time.monotonic() - started < 25


def test_a_connection_without_requests_is_closed(strict: Server) -> None:
    with connect(strict) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")

        assert read_to_end(connection).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nX: " + b"y" * 100_000,
        b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 50_000,
        b"GET /" + b"y" * 100_000,
        post(LONG)
        .replace(b"Content-Length: ", b"Transfer-Encoding: chunked\r\nX: ")
        .partition(b"{")[0]
        + b"1;"
        + b"y" * 500_000,
    ],
    ids=["value", "lines", "path", "chunk"],
)
def test_a_head_has_a_largest_size(strict: Server, head: bytes) -> None:
    with connect(strict) as connection:
        for start in range(0, len(head), 10_000):
            try:
                connection.sendall(head[start : start + 10_000])
            except OSError:
                break
            time.sleep(0.001)
        content = read_to_end(connection)

    assert content.startswith(b"HTTP/1.1 431 ")
    assert b"head_too_large" in content


@pytest.mark.parametrize(
    "content",
    [
        b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000,
        post(LONG)
        .replace(b"Content-Length: ", b"Transfer-Encoding: chunked\r\nX: ")
        .partition(b"{")[0]
        + b"1\r\n \r\n" * 100_000,
    ],
    ids=["requests", "chunks"],
)
def test_what_is_cut_too_small_is_not_taken(strict: Server, content: bytes) -> None:
    with connect(strict) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(content)
        received = read_to_end(connection)

    assert received.count(b"HTTP/1.1 200 OK") < 1000
    assert is_served(strict)


def test_a_body_that_is_sent_after_the_answer_comes_to_an_end(strict: Server) -> None:
    with connect(strict) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 10000000000\r\n\r\n")

        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(b" " * (200 * 2**20))


def test_an_address_has_a_largest_number_of_connections(strict: Server) -> None:
    with ExitStack() as stack:
        open_ones = [stack.enter_context(connect(strict)) for _ in range(MAX_PER_ADDRESS)]
        with connect(strict) as one_more:
            content = read_to_end(one_more)

    assert content.startswith(b"HTTP/1.1 503 ")
    assert b"too_many_connections" in content
    assert len(open_ones) == MAX_PER_ADDRESS
    deadline = time.monotonic() + 30
    while not answers(strict):
        assert time.monotonic() < deadline


def answers(server: Server) -> bool:
    return httpx.get(f"{server.url}/health").status_code == 200


def test_a_stream_that_nobody_reads_is_ended(strict: Server) -> None:
    before = strict.metric("vllm:generation_tokens_total")
    body = {**LONG, "stream": True, "n": 8, "logprobs": 20}
    with connect(strict) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        connection.sendall(post(body))
        wait_running(strict, 8)

        strict.wait_idle(timeout=120)

        assert strict.metric("vllm:generation_tokens_total") - before < 8 * 2000


def test_a_stream_that_is_read_late_is_whole(strict: Server) -> None:
    body = {**LONG, "stream": True, "max_tokens": 200}
    with connect(strict) as connection:
        connection.sendall(post(body))
        wait_running(strict, 1)
        strict.wait_idle()
        content = read_to_end(connection)

    assert content.count(b'"finish_reason":"length"') == 1
    assert b"data: [DONE]" in content


def test_what_would_wait_too_long_is_refused_for_now(strict: Server) -> None:
    with ExitStack() as stack:
        for n in (16, 2):
            connection = stack.enter_context(connect(strict))
            connection.sendall(post({**LONG, "n": n}))
            wait_running(strict, 16)
        deadline = time.monotonic() + 30
        while not strict.metric("vllm:num_requests_waiting"):
            assert time.monotonic() < deadline
        with strict.http() as http:
            full = http.post("/v1/completions", json=SHORT)

    assert full.status_code == 429
    assert full.json()["error"]["code"] == "too_many_requests"
    assert int(full.headers["retry-after"]) >= 1
    strict.wait_idle()
    with strict.http() as http:
        too_many = http.post("/v1/completions", json={**SHORT, "n": 19})
    assert too_many.status_code == 400
    assert is_served(strict)


@pytest.mark.parametrize("headers", [{}, {"authorization": f"Bearer {KEY}"}])
def test_metrics_need_their_token(strict: Server, headers: dict[str, str]) -> None:
    assert httpx.get(f"{strict.url}/metrics", headers=headers).status_code == 401
