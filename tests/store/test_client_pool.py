"""A client's pool of connections: as many as calls meet, and no longer than they are needed."""

import socket
import time

import pytest

from forebay.store.client import holders
from forebay.store.client.channel import Channel
from forebay.store.client.holders import Pool


def test_connections_of_a_crowd_are_closed_once_one_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[socket.socket, socket.socket]] = []

    def connect(_: float) -> Channel:
        made.append(socket.socketpair())
        return Channel(made[-1][0])

    pool, deadline = Pool(connect), time.monotonic() + 10
    with pool.lease(deadline), pool.lease(deadline), pool.lease(deadline):
        assert len(made) == 3
    with pool.lease(deadline) as used:
        pass
    assert all(ours.fileno() >= 0 for ours, _ in made), "they may meet again in a moment"
    monkeypatch.setattr(holders, "IDLE_S", 0.0)
    with pool.lease(deadline) as again:
        assert again is used, "the one that was used last is used next"
    assert [ours.fileno() >= 0 for ours, _ in made].count(True) == 1
    with pool.lease(deadline) as still:
        assert still is used and len(made) == 3
    pool.close()
    assert all(ours.fileno() < 0 for ours, _ in made)
    for _, theirs in made:
        theirs.close()
