"""The wire format is a promise: golden bytes fail when it changes without a new protocol version."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core import messages as m
from forebay.core.sampling import SamplingParams

PLAN = m.Plan(
    epoch=1,
    number=7,
    openings=(m.Opening(2, "a", SamplingParams(seed=3, max_tokens=4), (0,), 5),),
    remaps=(m.Remap(1, 0, 9),),
    pieces=(m.Piece(2, 0, m.pack_tokens([1, 2]), (4,), 0, True),),
    digest=b"12345678",
)
SUBMIT = m.Submit(
    "a", m.pack_tokens([1, 258]), SamplingParams(seed=3, max_tokens=4), (0,), b"s", True, 1
)
DONE = m.PlanDone(1, 3, 7, (m.Sample(2, 5, m.TokenLogprobs(-0.5, (5,), (-0.5,))),), 0.25)
GOLDEN = {
    "Submit": (
        SUBMIT,
        "0298a65375626d6974a161c4080100000002010000de0002aa6d61785f746f6b656e7304a473656564039100c40173c301",
    ),
    "Plan": (
        PLAN,
        "0299a4506c616e0107919702a161de0002aa6d61785f746f6b656e7304a47365656403910005"
        "00c400919301000991960200c4080100000002000000910400c3c408313233343536373890c0",
    ),
    "PlanDone": (
        DONE,
        "0298a8506c616e446f6e650103079194020593cbbfe0000000000000910591cbbfe0000000000000a0cb3fd00000000000009090",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_frames_stay_what_they_are(name: str) -> None:
    message, golden = GOLDEN[name]
    assert m.encode(message).hex() == golden


@pytest.mark.parametrize("name", GOLDEN)
def test_what_was_written_is_read_back(name: str) -> None:
    decoders = {
        "Submit": m.decode_to_planner,
        "Plan": m.decode_to_worker,
        "PlanDone": m.decode_from_worker,
    }
    message, golden = GOLDEN[name]
    assert decoders[name](bytes.fromhex(golden)) == message


def test_a_frame_of_another_version_is_refused_by_number() -> None:
    frame = bytes([m.PROTOCOL_VERSION + 1]) + m.encode(PLAN)[1:]
    with pytest.raises(m.MessageError, match=f"version {m.PROTOCOL_VERSION + 1}"):
        m.decode_to_worker(frame)


def test_a_message_of_another_channel_is_refused() -> None:
    with pytest.raises(m.MessageError, match="not a message of this channel"):
        m.decode_to_planner(m.encode(PLAN))


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_message_error(data: bytes) -> None:
    for decode in (
        m.decode_to_planner,
        m.decode_to_frontend,
        m.decode_to_worker,
        m.decode_from_worker,
    ):
        try:
            decode(data)
        except m.MessageError:
            continue


@given(st.data())
def test_a_damaged_plan_is_another_plan_or_an_error(data: st.DataObject) -> None:
    frame = bytearray(m.encode(PLAN))
    index = data.draw(st.integers(0, len(frame) - 1))
    frame[index] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(m.MessageError):
        m.decode_to_worker(bytes(frame))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_tokens_survive_packing(tokens: list[int]) -> None:
    assert m.unpack_tokens(m.pack_tokens(tokens)).tolist() == tokens


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_outside_uint32_is_an_error(token: int) -> None:
    with pytest.raises(OverflowError):
        m.pack_tokens([token])
