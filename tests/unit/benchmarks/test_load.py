"""The load generator counts what a server really did, and says so when it did something else."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

LOAD = Path(__file__).parents[3] / "benchmarks" / "serving" / "load.py"


class Completions(BaseHTTPRequestHandler):
    """Streams as many empty tokens as were asked for; the model "short" stops one earlier."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] == "missing":
            return self.send_error(404)
        tokens = body["max_tokens"] - (body["model"] == "short")
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        events = [{"choices": [{"text": ""}], "usage": None}] * tokens
        events.append({"choices": [], "usage": usage})
        self.send_response(200)
        self.end_headers()
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Completions) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def load(url: str, models: str) -> dict[str, Any]:
    sizes = ("--requests=6", "--concurrency=3", "--shared=5", "--unique=2", "--output=4")
    command = (sys.executable, LOAD, "--url", url, "--models", models, *sizes)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def test_every_request_is_counted(url: str) -> None:
    record = load(url, "base,a000,a001")

    counted = {name: record[name] for name in ("models", "requests", "prompt", "errors")}
    assert counted == {"models": 3, "requests": 6, "prompt": 7, "errors": 0}
    assert record["cached_tokens"] == 6 * 3


def test_a_server_that_generates_fewer_tokens_is_an_error(url: str) -> None:
    record = load(url, "base,short")

    assert record["errors"] == 3
    assert "got (7, 3)" in record["first_error"][0]


def test_a_refused_request_is_an_error(url: str) -> None:
    record = load(url, "base,missing")

    assert record["errors"] == 3
    assert "404" in record["first_error"][0]
