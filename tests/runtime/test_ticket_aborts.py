"""Aborts at every state of a request, in every queue that may hold it there: a table, with real processes.

Each case brings one request into a state and keeps it there by holding whoever has it; then the request is aborted, and it is gone at
once although nobody has been let go. Afterwards nothing is held, and the same prompt gives the same text.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from forebay import LLM
from forebay.frontend.generation import Generation, collect
from tests.frontend.tiny_text import write_random_weights, write_text_model
from tests.runtime.faulty_ranks import HIT, SETTINGS, Served, greedy, make_prompts, serving, until
from tests.serving import command_line, oldest_first

THE_PLANNER = -1
LONG = 40  # tokens of an answer


class Scene:
    """One case on a server. What it counts is counted from the case's beginning."""

    def __init__(self, served: Served, hits: list[list[int]], misses: list[list[int]]) -> None:
        self.served = served
        self.hit, *self.other_hits = hits
        self.misses = misses
        self._tickets = dict(served.snapshot.tickets)
        self._obeyed: dict[str, int] = {}

    def order(self, **orders: list[int]) -> None:
        self._obeyed |= {what: len(self.served.obeyed(what)) for what in orders}
        self.served.order(**orders)

    def send(self, prompt: list[int]) -> Generation:
        host = self.served.llm._host
        return host.call(host.submit(prompt, greedy(LONG)))

    def abort(self, generation: Generation) -> None:
        self.served.llm._host._loop.call_soon_threadsafe(generation.close)

    def obeyed(self, what: str, times: int = 1) -> None:
        until(
            lambda: len(self.served.obeyed(what)) - self._obeyed[what] >= times, f"{times} x {what}"
        )

    def tickets(self, outcome: str) -> int:
        return self.served.snapshot.tickets.get(outcome, 0) - self._tickets.get(outcome, 0)

    def counted(self, outcome: str, times: int = 1) -> None:
        until(lambda: self.tickets(outcome) >= times, f"{times} x {outcome}")

    def stands(self, running: int, waiting: int) -> None:
        until(
            lambda: (
                (self.served.snapshot.running, self.served.snapshot.waiting) == (running, waiting)
            ),
            f"{running} run, {waiting} wait",
        )

    def take_the_slot(self) -> Generation:
        """Another request runs, and its plan stays where it is."""
        self.order(hold_plan=[1])
        other = self.send(self.misses[0])
        self.obeyed("hold_plan")
        return other


Reach = Callable[[Scene, ExitStack], tuple[list[Generation], list[Generation]]]
"""Brings requests into the state; those to be aborted, and those that must come to a good end."""


@dataclass(frozen=True)
class Case:
    """``leaves``: (running, waiting) once the request is gone, with everything still held; ``hits``: stored prompts that it
    uses; ``planner``: what that takes as given (`fault_injection`); ``stops``: a rank stands still, and may be given up for it."""

    state: str
    holder: str
    reach: Reach
    leaves: tuple[int, int] = (0, 0)
    hits: int = 1
    stops: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    planner: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.state}, {self.holder}".replace(" ", "-")


def unread(scene: Scene, stack: ExitStack) -> tuple[list[Generation], list[Generation]]:
    children = [
        child
        for child in psutil.Process().children()
        if "planner_process" in " ".join(command_line(child))
    ]
    planner = oldest_first(children)[-1]
    planner.send_signal(signal.SIGSTOP)
    try:
        victim = scene.send(scene.hit)
        scene.abort(victim)
    finally:
        planner.send_signal(signal.SIGCONT)
    return [], []


def asking(scene: Scene, stack: ExitStack) -> tuple[list[Generation], list[Generation]]:
    scene.order(hold_query=[THE_PLANNER])
    victim = scene.send(scene.hit)
    scene.obeyed("hold_query")
    scene.stands(0, 1)
    return [victim], []


def asked_late(scene: Scene, stack: ExitStack) -> tuple[list[Generation], list[Generation]]:
    other = scene.take_the_slot()
    scene.order(hold_plan=[1], hold_query=[THE_PLANNER])
    victim = scene.send(scene.hit)
    scene.counted("query_late")
    return [victim], [other]


def asking_again(scene: Scene, stack: ExitStack) -> tuple[list[Generation], list[Generation]]:
    scene.order(hold_store=[1], hold_decode=[0])
    other = scene.send(scene.misses[0])
    scene.obeyed("hold_store")
    scene.obeyed("hold_decode")
    victim = scene.send(scene.misses[1])
    scene.counted("miss", 3)  # the other's, and its own twice
    return [victim], [other]


def fetching(*ranks: int) -> Reach:
    def reach(scene: Scene, stack: ExitStack) -> tuple[list[Generation], list[Generation]]:
        scene.order(hold_fetch=list(ranks))
        victim = scene.send(scene.hit)
        scene.obeyed("hold_fetch", len(ranks))
        scene.stands(0, 1)
        return [victim], []

    return reach


def ticket_unread(scene: Scene, stack: ExitStack) -> tuple[list[Generation], list[Generation]]:
    rank = scene.served.ranks[-1]
    rank.send_signal(signal.SIGSTOP)
    stack.callback(rank.send_signal, signal.SIGCONT)
    victim = scene.send(scene.hit)
    scene.counted("issued")
    return [victim], []


def ticket_behind(scene: Scene, stack: ExitStack) -> tuple[list[Generation], list[Generation]]:
    """Both fetch threads of the rank are held by others' tickets."""
    scene.order(hold_fetch=[1])
    others = [scene.send(prompt) for prompt in scene.other_hits]
    scene.obeyed("hold_fetch", 2)
    victim = scene.send(scene.hit)
    scene.counted("issued", 3)
    return [victim], others


def not_taken(scene: Scene, stack: ExitStack) -> tuple[list[Generation], list[Generation]]:
    """By the staged route: the first stage is at another's plan, and looks at no ticket meanwhile."""
    scene.order(hold_plan=[0])
    other = scene.send(scene.misses[0])
    scene.obeyed("hold_plan")
    victim = scene.send(scene.hit)
    scene.counted("issued", 2)  # the other's, which was a miss, and its own
    scene.stands(1, 1)
    return [victim], [other]


def joined(scene: Scene, stack: ExitStack) -> tuple[list[Generation], list[Generation]]:
    scene.order(hold_fetch=[1])
    first = scene.send(scene.hit)
    scene.obeyed("hold_fetch")
    victim = scene.send([*scene.hit[:HIT], 3])
    scene.counted("joined")
    return [victim], [first]


def first_user(scene: Scene, stack: ExitStack) -> tuple[list[Generation], list[Generation]]:
    [joiner], [first] = joined(scene, stack)
    return [first], [joiner]


def all_users(scene: Scene, stack: ExitStack) -> tuple[list[Generation], list[Generation]]:
    [joiner], [first] = joined(scene, stack)
    return [first, joiner], []


def ready(scene: Scene, stack: ExitStack) -> tuple[list[Generation], list[Generation]]:
    other = scene.take_the_slot()
    victim = scene.send(scene.hit)
    scene.counted("complete")
    scene.stands(1, 1)
    return [victim], [other]


def running(*orders: str, rank: int, is_hit: bool = True) -> Reach:
    """It stays in the first of ``orders``, on ``rank``; the others, on rank 0, keep it from going on."""

    def reach(scene: Scene, stack: ExitStack) -> tuple[list[Generation], list[Generation]]:
        scene.order(**{order: [rank if order == orders[0] else 0] for order in orders})
        victim = scene.send(scene.hit if is_hit else scene.misses[0])
        for order in orders:
            scene.obeyed(order)
        scene.stands(1, 0)
        return [victim], []

    return reach


def retracted(scene: Scene, stack: ExitStack) -> tuple[list[Generation], list[Generation]]:
    """Two whose answers do not fit together: one gives way, and the other's next plan is held."""
    scene.order(hold_once_retracted=[0])
    both = [scene.send(prompt) for prompt in scene.misses]
    scene.obeyed("hold_once_retracted")
    scene.stands(1, 1)
    gone = [
        generation
        for generation in both
        if f"{generation.work.request_id}-0" in scene.served.retracted
    ]
    assert len(gone) == 1
    return gone, [generation for generation in both if generation not in gone]


STAGED = {"fetch_route": "staged"}
TABLE = [
    Case("submitted", "the planner has not read it", unread),
    Case("a miss that asks again", "the waiting queue", asking_again, leaves=(1, 0)),
    Case("fetching", "the first stage", fetching(0)),
    Case("fetching", "the last stage", fetching(1)),
    Case("fetching", "all ranks", fetching(0, 1)),
    Case("fetching", "a rank has not read its ticket", ticket_unread, stops=True),
    Case("fetching", "behind others' tickets", ticket_behind, leaves=(0, 2), hits=3),
    Case("fetching, having joined", "the last stage", joined, leaves=(0, 1)),
    Case("fetching, joined by another", "the last stage", first_user, leaves=(0, 1)),
    Case("fetching, with all who joined", "the last stage", all_users),
    Case("ready", "the waiting queue", ready, leaves=(1, 0)),
    Case("loading", "the first stage", running("hold_load", rank=0)),
    Case("loading", "the last stage", running("hold_load", rank=1)),
    Case("prefilling", "the first stage", running("hold_plan", rank=0, is_hit=False)),
    Case("prefilling", "the last stage", running("hold_plan", rank=1, is_hit=False)),
    Case("decoding", "the first stage", running("hold_decode", rank=0)),
    Case("decoding", "the last stage", running("hold_decode", rank=1)),
    Case(
        "being saved",
        "the first stage's copies",
        running("hold_backup", "hold_decode", rank=0, is_hit=False),
    ),
    Case(
        "being saved",
        "the last stage's copies",
        running("hold_backup", "hold_decode", rank=1, is_hit=False),
    ),
    Case(
        "being stored",
        "the first stage's writes",
        running("hold_store", "hold_decode", rank=0, is_hit=False),
    ),
    Case(
        "being stored",
        "the last stage's writes",
        running("hold_store", "hold_decode", rank=1, is_hit=False),
    ),
    Case("asking", "the store", asking),
    Case("asked too late", "the store", asked_late, leaves=(1, 0), planner={"QUERY_S": 0.1}),
    Case(
        "walking down the stages",
        "the first stage's forward",
        not_taken,
        leaves=(1, 0),
        settings=STAGED,
    ),
    Case("walking down the stages", "the first stage", fetching(0), settings=STAGED),
    Case("walking back", "the last stage", fetching(1), settings=STAGED),
    Case(
        "retracted",
        "the waiting queue",
        retracted,
        leaves=(1, 0),
        settings={"max_running": 2, "device_memory": "56KiB"},
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_text_model(path)
    return write_random_weights(path)


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[LLM]:
    """Says what is right."""
    with LLM(str(model), **(SETTINGS | {"host_memory": 1, "store": "none"})) as llm:
        yield llm


@dataclass
class Stage:
    """A server that is kept while cases want the same, with stored prompts that no case has used."""

    served: Served
    hits: list[list[int]]
    misses: Iterator[list[int]]


@pytest.fixture(scope="module")
def stage_for(
    model: Path, plain: LLM, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Case, str], Stage]]:
    """The server for a case; the table's order keeps equal ones together."""
    kept = ExitStack()
    wanted: Any = None
    stage: Stage | None = None

    def find(case: Case, variant: str) -> Stage:
        nonlocal wanted, stage
        if stage is None or wanted != (case.settings, case.planner, variant):
            kept.close()
            wanted = (case.settings, case.planner, variant)
            settings = {"pp": 2, "max_running": 1} | VARIANTS[variant] | case.settings
            served = kept.enter_context(
                serving(model, plain, tmp_path_factory.mktemp("server"), settings, case.planner)
            )
            same = [
                other
                for other in TABLE
                if (other.settings, other.planner) == (case.settings, case.planner)
            ]
            hits = make_prompts(sum(other.hits for other in same), seed=31)
            served.prime(hits)
            stage = Stage(served, hits, iter(make_prompts(2 * len(same), seed=32)))
        return stage

    with kept:
        yield find


VARIANTS: dict[str, dict[str, Any]] = {"cache": {}, "staging": {"host_mode": "staging"}}


@pytest.mark.parametrize("variant", ["cache", pytest.param("staging", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_an_abort_leaves_nothing(
    case: Case, variant: str, stage_for: Callable[[Case, str], Stage]
) -> None:
    stage = stage_for(case, variant)
    served = stage.served
    restarts = served.snapshot.worker_restarts
    scene = Scene(
        served,
        [stage.hits.pop() for _ in range(case.hits)],
        [next(stage.misses), next(stage.misses)],
    )
    with ExitStack() as held:
        held.callback(served.order)
        victims, others = case.reach(scene, held)
        for victim in victims:
            scene.abort(victim)
        scene.stands(*case.leaves)
    for other in others:
        (result,) = served.llm._host.call(collect(other))
        (expected,) = served.plain.generate([other.work.prompts[0].tokens], greedy(LONG))
        assert result.tokens == expected.outputs[0].token_ids
    served.check_baseline()
    assert case.stops or served.snapshot.worker_restarts == restarts
    served.check([scene.hit])
