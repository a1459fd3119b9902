"""What `frontend.connection` needs of uvicorn, which only starts and ends connections: a release that changes it fails here."""

import inspect

import uvicorn
from uvicorn.server import ServerState

from forebay.frontend.connection import Connection


def test_a_protocol_class_is_made_with_these_arguments() -> None:
    source = inspect.getsource(uvicorn.Server.startup)
    for argument in ("config", "server_state", "app_state", "_loop"):
        assert argument in inspect.signature(Connection).parameters
        assert f"{argument}=" in source


def test_the_servers_state_has_what_connections_keep_there() -> None:
    state = ServerState()
    assert (state.total_requests, state.connections, state.tasks) == (0, set(), set())
    assert state.default_headers == []


def test_the_end_of_a_server_ends_its_connections() -> None:
    source = inspect.getsource(uvicorn.Server.shutdown)
    assert ".shutdown()" in source and "server_state.connections" in source
    assert "server_state.tasks" in source
