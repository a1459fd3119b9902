"""Which connections are taken out of the machine's pacing."""

import socket

from forebay.store.wire.loopback import UNPACED, send_unpaced


def test_both_ends_on_one_machine_are_not_paced() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connected,
    ):
        assert send_unpaced(connected)
        assert (
            connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            .rstrip(b"\0")
            .decode()
            in UNPACED
        )


def test_a_connection_to_elsewhere_keeps_what_the_machine_has() -> None:
    class Elsewhere(socket.socket):
        def getpeername(self) -> tuple[str, int]:
            return ("203.0.113.1", 1)

    with socket.create_server(("127.0.0.1", 0)) as listener, Elsewhere() as connected:
        connected.connect(listener.getsockname())
        before = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert not send_unpaced(connected)
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) == before


def test_unix_sockets_and_closed_ones_are_left_alone() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert not send_unpaced(one)
    with socket.socket() as unconnected:
        assert not send_unpaced(unconnected)
