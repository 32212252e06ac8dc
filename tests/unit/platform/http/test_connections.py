"""Who is let in, and who must go."""

import pytest

from loraplex.platform.http.connections import ConnectionLimits, Connections

pytestmark = pytest.mark.anyio


class Client:
    def __init__(self, address: str = "a", waiting_since: float | None = 0.0) -> None:
        self.address = address
        self.waiting_since = waiting_since
        self.has_ended = False

    def check(self, now: float) -> None:
        pass

    def end(self) -> None:
        self.has_ended = True


async def test_a_full_server_ends_the_connection_that_has_waited_longest() -> None:
    connections = Connections(ConnectionLimits(max_connections=3))
    old, oldest, busy = Client(waiting_since=2.0), Client(waiting_since=1.0), Client("b", None)
    for client in (old, oldest, busy):
        assert connections.admit(client) is None

    assert connections.admit(Client("c")) is None

    assert [client.has_ended for client in (old, oldest, busy)] == [False, True, False]
    assert len(connections) == 3


async def test_a_server_that_is_full_of_requests_lets_nobody_in() -> None:
    connections = Connections(ConnectionLimits(max_connections=2))
    for client in (Client(waiting_since=None), Client(waiting_since=None)):
        assert connections.admit(client) is None

    refusal = connections.admit(Client())

    assert refusal is not None
    assert refusal.status == 503


async def test_an_address_has_its_own_limit() -> None:
    connections = Connections(ConnectionLimits(max_per_address=1))
    first = Client("a")

    assert connections.admit(first) is None
    assert connections.admit(Client("a")) is not None
    assert connections.admit(Client("b")) is None
    connections.forget(first)
    assert connections.admit(Client("a")) is None
