"""The table of a request's life: what it allows, and that nothing else changes a state."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

import forebay.core
from forebay.core.lifecycle import TABLE, Cause, IllegalMove, Phase, RequestState, move

PLACES = [(state, phase) for state in RequestState for phase in Phase]
CORE = Path(forebay.core.__file__).parent


@dataclass
class Living:
    state: RequestState = RequestState.WAITING
    phase: Phase = Phase.NOT_ASKED


@pytest.mark.parametrize("cause", Cause)
def test_an_illegal_move_is_an_error_and_changes_nothing(cause: Cause) -> None:
    illegal = [place for place in PLACES if place not in TABLE[cause]]
    assert illegal, "some move is illegal for every cause"
    for state, phase in illegal:
        request = Living(state, phase)
        with pytest.raises(IllegalMove, match=cause.name):
            move(request, cause)
        assert (request.state, request.phase) == (state, phase)


def test_a_fetch_that_is_waited_for_ends_before_its_request_runs() -> None:
    request = Living()
    for cause in (Cause.QUERY, Cause.ANSWER, Cause.FETCH):
        move(request, cause)
    with pytest.raises(IllegalMove):
        move(request, Cause.ADMIT)
    for cause in (Cause.FETCHED, Cause.ADMIT, Cause.RETRACT, Cause.ADMIT, Cause.END):
        move(request, cause)
    assert request.state is RequestState.DONE


def test_a_request_that_is_done_never_moves_again() -> None:
    assert not [cause for cause in Cause for state, _ in TABLE[cause] if state is RequestState.DONE]


def test_every_place_that_a_request_can_come_to_is_reached_and_left() -> None:
    came, left = {(RequestState.WAITING, Phase.NOT_ASKED)}, set()
    while more := {
        after
        for steps in TABLE.values()
        for before, after in steps.items()
        if before in came and after not in came
    }:
        came |= more
    left = {before for steps in TABLE.values() for before in steps}
    assert {place for place in came if place[0] is not RequestState.DONE} <= left


def test_only_the_table_changes_a_state() -> None:
    """An object's own ``self.state`` is its beginning, or the planner's, of its grid."""
    writers = {
        f"{path.relative_to(CORE)}:{node.lineno}"
        for path in sorted(CORE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr in ("state", "phase")
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
        and path.name != "lifecycle.py"
    }
    assert not writers
