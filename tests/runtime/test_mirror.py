"""The mirror against a dumb twin, and against plans that no planner should send."""

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.digest import ZERO, PlanDigest
from forebay.core.messages import Opening, Piece, Plan, Remap, pack_tokens
from forebay.core.sampling import SamplingParams
from forebay.runtime.mirror import Limits, Mirror, PlanError

LIMITS = Limits(slots=3, pages=50, page_size=4, table_pages=10, plan_tokens=64, vocab_size=100)


@dataclass
class Twin:
    """A planner's view of the slots, as plain as can be; makes random legal plans."""

    random: random.Random
    digest: bytes = ZERO
    number: int = 0
    tables: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)

    def plan(self) -> Plan:
        self.number += self.random.randint(1, 2)
        digest = PlanDigest(self.digest, self.number)
        slots = self.random.sample(range(LIMITS.slots), self.random.randint(1, LIMITS.slots))
        openings = tuple(self.open(slot) for slot in slots if self.must_open(slot))
        remaps = tuple(
            self.remap(slot, digest)
            for slot in slots
            if self.tables[slot] and self.random.random() < 0.3
        )
        pieces = tuple(self.piece(slot, digest) for slot in slots)
        self.digest = digest.value
        return Plan(1, self.number, openings, remaps, pieces, self.digest)

    def must_open(self, slot: int) -> bool:
        room = LIMITS.table_pages * LIMITS.page_size - self.lengths.get(slot, 0)
        return slot not in self.tables or room < 12 or self.random.random() < 0.1

    def open(self, slot: int) -> Opening:
        self.tables[slot] = []
        self.outputs[slot] = self.random.choice([0, 5])
        self.lengths[slot] = self.random.choice(
            [0, 3, 8]
        )  # a cached prefix; the first piece brings its pages
        return Opening(slot, f"r{slot}", SamplingParams(), (), 8, self.outputs[slot])

    def remap(self, slot: int, digest: PlanDigest) -> Remap:
        remap = Remap(
            slot, self.random.randrange(len(self.tables[slot])), self.random.randrange(LIMITS.pages)
        )
        self.tables[slot][remap.index] = remap.page
        digest.remap(slot, remap.index, remap.page)
        return remap

    def piece(self, slot: int, digest: PlanDigest) -> Piece:
        start, count = self.lengths[slot], self.random.randint(1, 9)
        stop = start + count
        missing = -(-stop // LIMITS.page_size) - len(self.tables[slot])
        pages = tuple(self.random.randrange(LIMITS.pages) for _ in range(max(0, missing)))
        self.tables[slot] += pages
        self.lengths[slot] = stop
        sample = self.random.random() < 0.5
        self.outputs[slot] += sample
        tokens = pack_tokens(self.random.randrange(LIMITS.vocab_size) for _ in range(count))
        write_from = self.random.choice([start, stop])
        digest.piece(slot, start, tokens, pages, len(self.tables[slot]), write_from, sample)
        return Piece(slot, start, tokens, pages, write_from, sample)


def mirror_and_twin(seed: int, plans: int) -> tuple[Mirror, Twin]:
    mirror, twin = Mirror(LIMITS), Twin(random.Random(seed))
    for _ in range(plans):
        mirror.apply(twin.plan())
    return mirror, twin


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_it_stands_as_the_twin_does(seed: int, plans: int) -> None:
    mirror, twin = Mirror(LIMITS), Twin(random.Random(seed))
    for _ in range(plans):
        before = dict(twin.outputs)
        plan = twin.plan()
        opened = {opening.slot: opening.outputs for opening in plan.openings}
        steps = mirror.apply(plan)
        assert [
            (s.slot, s.start, pack_tokens(s.tokens.tolist()), s.write_from, s.sample) for s in steps
        ] == [(p.slot, p.start, p.tokens, p.write_from, p.sample) for p in plan.pieces]
        assert all(step.output_index == {**before, **opened}[step.slot] for step in steps)
        for slot, table in twin.tables.items():
            assert mirror.table(slot).tolist() == table
            assert mirror.lengths[slot] == twin.lengths[slot]
        assert mirror.digest == twin.digest


@given(st.integers(0, 2**32), st.integers(0, 10), st.data())
def test_one_changed_field_never_passes(seed: int, plans: int, data: st.DataObject) -> None:
    mirror, twin = mirror_and_twin(seed, plans)
    plan = twin.plan()
    index = data.draw(st.integers(0, len(plan.pieces) - 1))
    piece = plan.pieces[index]
    name = data.draw(st.sampled_from(["slot", "start", "tokens", "pages", "write_from", "sample"]))
    changes: dict[str, Any] = {
        "slot": (piece.slot + 1) % LIMITS.slots,
        "start": piece.start + 1,
        "tokens": bytes([piece.tokens[0] ^ 1]) + piece.tokens[1:],
        "pages": (*piece.pages, 1),
        "write_from": piece.write_from + 1,
        "sample": not piece.sample,
    }
    changed = msgspec.structs.replace(piece, **{name: changes[name]})
    pieces = (*plan.pieces[:index], changed, *plan.pieces[index + 1 :])
    with pytest.raises(PlanError, match=f"plan {plan.number} "):
        mirror.apply(msgspec.structs.replace(plan, pieces=pieces))


@given(st.integers(0, 2**32), st.integers(1, 10))
def test_a_missed_or_doubled_plan_shows_at_the_next_one(seed: int, plans: int) -> None:
    mirror, twin = mirror_and_twin(seed, plans)
    missed = twin.plan()
    with pytest.raises(PlanError):
        mirror.apply(twin.plan())
    mirror, twin = mirror_and_twin(seed, plans)
    mirror.apply(missed)
    with pytest.raises(PlanError, match="came after plan"):
        mirror.apply(missed)


def plan(
    *pieces: Piece,
    openings: tuple[Opening, ...] = (Opening(0, "r", SamplingParams(), (), 4),),
    remaps: tuple[Remap, ...] = (),
) -> Plan:
    return Plan(1, 1, openings, remaps, pieces, ZERO)


GOOD = Piece(
    slot=0, start=0, tokens=pack_tokens([1, 2, 3, 4, 5]), pages=(7, 8), write_from=0, sample=True
)
replace = msgspec.structs.replace


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (plan(), "at least one piece"),
        (plan(GOOD, GOOD), "slot 0 goes on at 0|one per slot"),
        (plan(GOOD, openings=()), "slot 0 was never opened"),
        (plan(replace(GOOD, slot=1)), "slot 1 was never opened"),
        (plan(replace(GOOD, slot=3)), "slots 0 to 2 exist"),
        (
            plan(
                GOOD,
                openings=(
                    Opening(0, "r", SamplingParams(), (), 4),
                    Opening(1, "s", SamplingParams(), (), 4),
                ),
            ),
            "has no piece",
        ),
        (plan(replace(GOOD, pages=(7,))), "1 pages of 4 for 5 positions"),
        (plan(replace(GOOD, pages=(7, 50))), "page 50; pages 0 to 49 exist"),
        (plan(replace(GOOD, pages=tuple(range(11)))), "at most 10 are allowed"),
        (plan(replace(GOOD, write_from=6)), "writes from 6"),
        (plan(replace(GOOD, tokens=b"")), "largest token is none"),
        (plan(replace(GOOD, tokens=pack_tokens([100]))), "largest token is 100; ids below 100"),
        (plan(replace(GOOD, tokens=b"abc")), "a multiple of 4"),
        (plan(GOOD, remaps=(Remap(0, 0, 3),)), "remap of entry 0; slot 0 has 0 pages"),
        (plan(GOOD), "plan 1 is the first to differ from the planner's: digest"),
    ],
)
def test_an_illegal_plan_is_refused_with_one_line(bad: Plan, says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        Mirror(LIMITS).apply(bad)
    assert "\n" not in str(caught.value) and "plan 1 " in str(caught.value)


def test_more_tokens_than_a_plan_may_have_are_refused() -> None:
    with pytest.raises(PlanError, match="5 tokens; at most 4 are allowed"):
        Mirror(dataclasses.replace(LIMITS, plan_tokens=4)).apply(plan(GOOD))
