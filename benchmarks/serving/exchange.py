"""One request and its streamed answer, at a small part of the cost of a general HTTP client.

The client shares its processors with the server: what it needs per token is missing there.
"""

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

JSON = dict[str, Any]
decode = msgspec.json.Decoder(JSON).decode
encode = msgspec.json.Encoder().encode


class Answer(asyncio.Protocol):
    """Gives `on_event` each server-sent event in the moment in which it arrives."""

    def __init__(self, request: bytes, on_event: Callable[[JSON], None]) -> None:
        self._request = request
        self._on_event = on_event
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""  # of a line that is not whole
        self._refusal = b""
        self.is_over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, ValueError) as error:
            self._end(ValueError(str(error.__context__ or error)))

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error)

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._refusal += body
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                self._on_event(decode(data))

    def on_message_complete(self) -> None:
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self.is_over.done():
            return
        status = self._parser.get_status_code()
        if status not in (0, 200):
            error = ValueError(f"{status} {self._refusal.decode(errors='replace')}")
        if error is None:
            self.is_over.set_result(None)
        else:
            self.is_over.set_exception(error)


async def post(url: str, key: str, body: JSON, on_event: Callable[[JSON], None]) -> None:
    """Sends `body` to `url` (http only) and returns once the answer is whole.

    Raises:
        OSError: if there is no connection, or it breaks.
        ValueError: if the answer is a refusal, or cannot be read.
    """
    parts = urlsplit(url)
    content = encode(body)
    lines = [
        f"POST {parts.path} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        *([f"Authorization: Bearer {key}"] if key else []),
        "Connection: close",
    ]
    request = "\r\n".join(lines).encode() + b"\r\n\r\n" + content
    loop = asyncio.get_running_loop()
    transport, answer = await loop.create_connection(
        lambda: Answer(request, on_event), parts.hostname, parts.port or 80
    )
    try:
        await answer.is_over
    finally:
        transport.close()
