"""What `bench ttft` measures: arms (a route, maybe with a host mode of its own), groups, and the blocks in which they take turns.

    round 1:  group miss: ticket, staged    group mixed: staged, ticket    group hit: ticket, staged
    round 2:  the same the other way round ...

Both arms are asked the same prompts in the same order, under cache salts of their own: nothing is shared by chance.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from forebay.settings import FetchRoute, HostMode, Settings


class TtftError(Exception):
    """The measurement cannot be made as asked: one line with what was given, what is allowed, what to do."""


class Group(StrEnum):
    """Which requests have their prefix in the store: none, every other one, all."""

    MISS = "miss"
    MIXED = "mixed"
    HIT = "hit"

    def is_hit(self, index: int) -> bool:
        return self is Group.HIT or (self is Group.MIXED and index % 2 == 0)


@dataclass(frozen=True, slots=True)
class Arm:
    """One server of the comparison. ``host_mode`` None: as the common settings say."""

    route: FetchRoute
    host_mode: HostMode | None = None

    @property
    def name(self) -> str:
        return (
            self.route.value
            if self.host_mode is None
            else f"{self.route.value}:{self.host_mode.value}"
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """The load. Tokens and requests; ``requests`` are those of one group and arm, spread over ``rounds``.

    ``concurrency`` requests are in flight at a time, unless there is a ``rate`` (requests a second) or a ``utilisation`` (share of
    the measured capacity): then they arrive at random times (Poisson) whatever is in flight.
    """

    input_len: int
    output_len: int
    requests: int
    concurrency: int
    rounds: int
    rate: float | None = None
    utilisation: float | None = None

    @property
    def is_open(self) -> bool:
        return self.rate is not None or self.utilisation is not None


@dataclass(frozen=True, slots=True)
class Experiment:
    """All that was asked for. ``settings`` are common to all arms."""

    model: str
    settings: Settings
    arms: tuple[Arm, ...]
    groups: tuple[Group, ...]
    shape: Shape
    seed: int


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: ``prompt`` as token ids. ``at_s``: when it is sent, from the block's start, in an open load."""

    index: int
    prompt: list[int]
    is_hit: bool
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Block:
    """What one arm is asked without a break."""

    round: int
    group: Group
    arm: Arm
    asks: tuple[Ask, ...]


def parse_arms(text: str) -> tuple[Arm, ...]:
    """``ticket,staged`` or ``ticket:staging,staged:cache``. Raises ``TtftError``."""
    arms = [_parse_arm(word.strip()) for word in text.split(",")]
    if len(set(arms)) != len(arms):
        raise TtftError(f"--routes is {text!r}: one is named twice; name each once")
    return tuple(arms)


def _parse_arm(word: str) -> Arm:
    route, _, mode = word.partition(":")
    try:
        return Arm(FetchRoute(route), HostMode(mode) if mode else None)
    except ValueError:
        raise TtftError(
            f"--routes names {word!r}; allowed: {', '.join(FetchRoute)}, each maybe with a host mode ({', '.join(HostMode)}), "
            "as in ticket:staging"
        ) from None


def parse_groups(text: str) -> tuple[Group, ...]:
    """``miss,mixed,hit`` or some of these. Raises ``TtftError``."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in [member.value for member in Group]:
            raise TtftError(f"--groups names {word!r}; allowed: {', '.join(Group)}")
    if len(set(words)) != len(words):
        raise TtftError(f"--groups is {text!r}: one is named twice; name each once")
    return tuple(Group(word) for word in words)


def check(experiment: Experiment, max_context: int) -> None:
    """Raises ``TtftError`` for what cannot give a valid result."""
    shape, settings = experiment.shape, experiment.settings
    for name, value in (
        ("--input-len", shape.input_len),
        ("--output-len", shape.output_len),
        ("--concurrency", shape.concurrency),
        ("--repeat", shape.rounds),
    ):
        if value < 1:
            raise TtftError(f"{name} is {value}; it must be at least 1")
    least = shape.rounds * (2 if Group.MIXED in experiment.groups else 1)
    if shape.requests < least or shape.requests % least:
        raise TtftError(
            f"--requests is {shape.requests}; groups {', '.join(experiment.groups)} over --repeat {shape.rounds} rounds "
            f"need a multiple of {least}"
        )
    if shape.input_len + shape.output_len > max_context:
        raise TtftError(
            f"--input-len and --output-len are {shape.input_len + shape.output_len} tokens together; the context is {max_context}; "
            "give less, or another --max-context"
        )
    _check_hits(experiment)
    if shape.rate is not None and shape.utilisation is not None:
        raise TtftError(
            "--rate and --utilisation are given; give one of them, or none for --concurrency"
        )
    if shape.rate is not None and shape.rate <= 0:
        raise TtftError(f"--rate is {shape.rate}; it must be above 0 requests a second")
    if shape.utilisation is not None and not 0 < shape.utilisation < 1:
        raise TtftError(
            f"--utilisation is {shape.utilisation}; it must be above 0 and below 1, a share of the measured capacity"
        )
    if settings.max_running + settings.max_waiting < shape.concurrency:
        raise TtftError(
            f"--concurrency is {shape.concurrency}; --max-running and --max-waiting let in fewer; give more of them"
        )


def _check_hits(experiment: Experiment) -> None:
    settings, tokens = experiment.settings, experiment.shape.input_len
    if experiment.groups == (Group.MISS,):
        return
    pages = (tokens - 1) // settings.page_size * settings.page_size
    if not pages:
        raise TtftError(
            f"--input-len is {tokens}: no full page of {settings.page_size} tokens could be stored; give more, or less --page-size"
        )
    if pages < settings.fetch_threshold:
        raise TtftError(
            f"--input-len is {tokens}: its {pages} tokens in full pages are below --fetch-threshold {settings.fetch_threshold}, "
            "so nothing would be fetched; give more, or a lower threshold"
        )


def blocks(
    experiment: Experiment, first_token: int, vocab_size: int, done_rounds: int = 0
) -> Iterator[list[Block]]:
    """Round by round, the blocks of all groups and arms in the order in which they are measured."""
    each = experiment.shape.requests // experiment.shape.rounds
    for number in range(done_rounds, experiment.shape.rounds):
        found: list[Block] = []
        for place, group in enumerate(experiment.groups):
            asks = draw(
                f"{experiment.seed}/{number}/{group}",
                group,
                each,
                experiment.shape.input_len,
                first_token,
                vocab_size,
            )
            turns = (
                experiment.arms if (number + place) % 2 == 0 else tuple(reversed(experiment.arms))
            )
            found += [Block(number, group, arm, asks) for arm in turns]
        yield found


def draw(
    seed: str, group: Group, count: int, tokens: int, first_token: int, vocab_size: int
) -> tuple[Ask, ...]:
    """``count`` requests with random prompts."""
    dice = random.Random(seed)
    return tuple(
        Ask(
            index,
            [dice.randrange(first_token, vocab_size) for _ in range(tokens)],
            group.is_hit(index),
        )
        for index in range(count)
    )


def arrivals(asks: Sequence[Ask], rate: float, seed: str) -> tuple[Ask, ...]:
    """The same requests at the times of a Poisson process of ``rate`` a second."""
    dice = random.Random(f"{seed}/arrivals")
    at_s = 0.0
    timed = []
    for ask in asks:
        timed.append(Ask(ask.index, ask.prompt, ask.is_hit, at_s))
        at_s += dice.expovariate(rate)
    return tuple(timed)
