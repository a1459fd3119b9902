"""A question and its answer in one call into C (`Channel.exchange`), with and without looking for the answer over and over."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from forebay.store.client.channel import Channel, ChannelError
from forebay.store.wire.frames import decode_master_to_client, encode
from forebay.store.wire.messages import AskStats, Codes

ANSWER = encode(Codes(1, b"\0"))


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def _ask(channel: Channel, hurry: bool, seconds: float = 10.0) -> Codes:
    answer = channel.ask(
        AskStats(1), decode_master_to_client, time.monotonic() + seconds, hurry=hurry
    )
    assert isinstance(answer, Codes)
    return answer


@pytest.mark.parametrize("hurry", [False, True])
def test_an_answer_is_had_at_once_and_after_looking_in_vain(
    ends: tuple[Channel, socket.socket], hurry: bool
) -> None:
    channel, peer = ends
    question = encode(AskStats(1))
    peer.sendall(ANSWER)
    assert _ask(channel, hurry).codes == b"\0"
    peer.recv(len(question), socket.MSG_WAITALL)

    def answer_late() -> None:
        for _ in range(300):  # more than the most answers that are let come without looking
            peer.recv(len(question), socket.MSG_WAITALL)
            until = time.monotonic() + 100e-6  # longer than anybody looks
            while time.monotonic() < until:
                pass
            peer.sendall(ANSWER)

    thread = threading.Thread(target=answer_late)
    thread.start()
    for _ in range(300):
        assert _ask(channel, hurry).codes == b"\0"
    thread.join()


@pytest.mark.parametrize("hurry", [False, True])
def test_no_answer_is_a_time_out_and_a_closed_peer_an_error(
    ends: tuple[Channel, socket.socket], hurry: bool
) -> None:
    channel, peer = ends
    with pytest.raises(TimeoutError):
        _ask(channel, hurry, 0.05)
    peer.close()
    with pytest.raises(ChannelError):
        _ask(channel, hurry)
