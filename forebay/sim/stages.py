"""The grid as a performance model: real messages in and out, seconds instead of bytes.

    plan ──control delay──> every stage      a stage starts plan n when it has finished n-1, the stage before has handed over its
    stage 0 ──hop──> stage 1 ──> ...         hidden states, and the first layer's loads are done; it ends no sooner than the loads'
    stage ──PlanDone, TransferDone──> planner      last layer lets it

The unit is a stage: its TP ranks compute in step (they meet at every layer) and are taken to read and write in step too. Stages work
strictly in the order of plans, so all of a plan's times are known when it is sent, unless stages share cores (`sim.shared_passes`).
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from forebay.core.batches import BatchSizes
from forebay.core.messages import (
    Backup,
    Cancel,
    FetchProgress,
    Plan,
    PlanDone,
    Sample,
    StagedReturn,
    StagedTaken,
    StagedTicket,
    Store,
    StoreDone,
    Ticket,
    TransferDone,
)
from forebay.core.transfers.policy import TICKETS_AT_ONCE
from forebay.sim.cluster import Cluster, StagedLook
from forebay.sim.cores import Cores
from forebay.sim.devices import Link
from forebay.sim.heap import EventHeap
from forebay.sim.shared_passes import Flight, SharedPasses
from forebay.sim.store_model import Read, StoreModel

Acknowledgement = PlanDone | TransferDone | FetchProgress | StagedTaken | StoreDone
Order = Ticket | Cancel | Store | StagedTicket | StagedReturn
Tell = Callable[[Sequence[Acknowledgement]], None]


class Pass(Struct, frozen=True):
    """One forward pass of one stage. ``taken``: from when the stage could do nothing else, waiting for hidden states included."""

    plan: int
    taken: float
    start: float
    end: float
    prefill_tokens: int
    decodes: int


class Watcher(Protocol):
    """Told of every pass as it is planned."""

    def passed(self, stage: int, one: Pass) -> None: ...


class Stage:
    """One pipeline stage: its compute, and its ranks' copy engines and NICs (each as fast as one rank's, since they work in step)."""

    def __init__(self, index: int, cluster: Cluster, randomness: random.Random) -> None:
        copy, network = cluster.copy, cluster.network
        self.index = index
        self.to_device = Link(copy.to_device_gb_s, copy.latency_s, copy.jitter, randomness)
        self.to_host = Link(copy.to_host_gb_s, copy.latency_s, copy.jitter, randomness)
        self.nic_in = Link(network.nic_gb_s, network.latency_s, network.jitter, randomness)
        self.nic_out = Link(network.nic_gb_s, network.latency_s, network.jitter, randomness)
        self.free_at = 0.0
        self.busy_s = 0.0
        self.passes: deque[Pass] = deque()
        self.plan_channel = (
            0.0  # when the newest message on each channel arrives: channels keep their order
        )
        self.order_channel = 0.0
        self.ack_channel = 0.0
        self.fetch_channel = 0.0
        self.tickets: deque[Ticket | StagedTicket] = deque()
        self.reading = 0
        self.cancelled: set[int] = set()
        self.returned: set[int] = set()  # staged fetches that all stages behind have answered
        self.read: dict[
            int, tuple[StagedTicket, int]
        ] = {}  # staged fetches whose reads are done, and pages
        self.stores: deque[Store] = deque()  # the first is under way


class StageGrid:
    """All stages of one replica. ``tell`` delivers what their ranks say.

    ``folded``: the planner knows one rank for each stage, as TP ranks speak at the same time, and hears of a plan and of a backup once,
    when the last stage's word is there.
    """

    def __init__(
        self,
        cluster: Cluster,
        folded: bool,
        heap: EventHeap,
        randomness: random.Random,
        store: StoreModel,
        tell: Tell,
        watcher: Watcher,
    ) -> None:
        self._cluster, self._heap, self._random, self._store = cluster, heap, randomness, store
        self._tell, self._watcher = tell, watcher
        self._folded = folded
        self._acks = 1 if folded else cluster.engine.tp
        self._block_bytes = cluster.block_bytes
        self._layers = max(cluster.model.layers // cluster.engine.pp, 1)
        network = cluster.network
        self._round_s = cluster.store.query_s + 4 * cluster.engine.pp * network.control_s * (
            1.0 + network.control_jitter
        )
        self._sizes = BatchSizes(cluster.block_bytes)
        self.stages = [Stage(index, cluster, randomness) for index in range(cluster.engine.pp)]
        forward, look = cluster.forward, cluster.engine.staged_look
        self.cores = Cores(heap, forward.cores, forward.contention)
        self._shared = (
            SharedPasses(
                heap, self.cores, look, len(self.stages), self._layers, self._load, self._shared_end
            )
            if forward.cores
            else None
        )
        self.activation_bytes = 0
        self._samples: dict[int, Sample] = {}
        self.token_of: Callable[[str], int] = lambda request_id: 0

    # ------------------------------------------------------------------------------------------ plans

    def send(self, plan: Plan, epoch: int) -> None:
        """Plan all of its passes, copies and acknowledgements."""
        now = self._heap.now
        for opening in plan.openings:
            self._samples[opening.slot] = Sample(opening.slot, self.token_of(opening.request_id))
        seconds, prefill_tokens, decodes = forward_s(self._cluster, plan)
        costs_s = []
        for stage in self.stages:
            stage.plan_channel = max(stage.plan_channel, now + self._control_s())
            costs_s.append(self._pass_s(seconds, stage is self.stages[-1]))
        flight = Flight(
            plan, epoch, costs_s, prefill_tokens, decodes, self._hop_s(prefill_tokens + decodes)
        )
        if self._shared is not None:
            self._shared.send(flight, [stage.plan_channel for stage in self.stages])
        else:
            self._plan_ahead(flight)

    def _plan_ahead(self, flight: Flight) -> None:
        """Every stage has cores of its own: nothing that happens meanwhile changes when a pass begins and ends."""
        handed_over = 0.0
        for stage, cost in zip(self.stages, flight.costs_s, strict=True):
            taken = max(stage.plan_channel, stage.free_at)
            start = max(taken, handed_over)
            end = start + cost
            if flight.plan.loads:
                first, last = self._load(stage.index, flight, stage.plan_channel)
                start = max(start, first)
                end = max(start + cost, last + cost / self._layers)
            (
                flight.taken_at[stage.index],
                flight.began_at[stage.index],
                flight.ended_at[stage.index],
            ) = taken, start, end
            self._note_pass(stage, flight)
            handed_over = end + flight.hop_s
        self._passed(flight)

    def _load(self, index: int, flight: Flight, at: float) -> tuple[float, float]:
        """Loads come layer by layer, from when the plan is known: compute begins with the first layer and ends with the last."""
        stage = self.stages[index]
        begun = max(at, stage.to_device.free_at)
        loaded = stage.to_device.move(at, len(flight.plan.loads) * self._block_bytes)
        return begun + (loaded - begun) / self._layers, loaded

    def _shared_end(self, index: int, flight: Flight) -> None:
        self._note_pass(self.stages[index], flight)
        if index == len(self.stages) - 1:
            self._passed(flight)

    def _note_pass(self, stage: Stage, flight: Flight) -> None:
        taken, start, end = (
            flight.taken_at[stage.index],
            flight.began_at[stage.index],
            flight.ended_at[stage.index],
        )
        stage.free_at = end
        stage.busy_s += end - start
        done = Pass(flight.plan.number, taken, start, end, flight.prefill_tokens, flight.decodes)
        while len(stage.passes) > 1 and stage.passes[1].end <= self._heap.now:
            stage.passes.popleft()
        stage.passes.append(done)
        self._watcher.passed(stage.index, done)

    def _passed(self, flight: Flight) -> None:
        """All ends are known: what comes of them."""
        self._acknowledge_plan(flight)
        if flight.plan.backup is not None:
            self._back_up(flight.plan.backup, flight)

    def _pass_s(self, model_s: float, is_last: bool) -> float:
        forward = self._cluster.forward
        seconds = (
            model_s / len(self.stages)
            + forward.stage_s
            + (forward.last_stage_s if is_last else 0.0)
        )
        if forward.jitter:
            seconds *= 1.0 + forward.jitter * (2.0 * self._random.random() - 1.0)
        return seconds

    def _hop_s(self, tokens: int) -> float:
        size = tokens * self._cluster.model.activation_bytes_per_token
        self.activation_bytes += size
        return self._cluster.network.hop_s + size / (self._cluster.network.stage_gb_s * 1e9)

    def _control_s(self) -> float:
        network = self._cluster.network
        if not network.control_jitter:
            return network.control_s
        return network.control_s * (
            1.0 + network.control_jitter * (2.0 * self._random.random() - 1.0)
        )

    def _acknowledge_plan(self, flight: Flight) -> None:
        """Every stage as its pass ends; folded, all of them with the last one, before which nothing can come of the others."""
        acks, plan, epoch = self._acks, flight.plan, flight.epoch
        folded: list[Acknowledgement] = []
        for stage in self.stages:
            is_last = stage is self.stages[-1]
            samples = (
                tuple([self._samples[piece.slot] for piece in plan.pieces if piece.sample])
                if is_last
                else ()
            )
            first = stage.index * acks
            pass_s = flight.ended_at[stage.index] - flight.began_at[stage.index]
            done = [
                PlanDone(epoch, first + rank, plan.number, () if rank else samples, pass_s)
                for rank in range(acks)
            ]
            stage.ack_channel = max(
                stage.ack_channel, flight.ended_at[stage.index] + self._control_s()
            )
            if self._folded:
                folded += done
            else:
                self._tell_at(stage.ack_channel, done)
        if folded:
            self._tell_at(max(stage.ack_channel for stage in self.stages), folded)

    def _back_up(self, backup: Backup, flight: Flight) -> None:
        acks, epoch, folded, last_at = self._acks, flight.epoch, [], 0.0
        for stage in self.stages:
            saved_at = (
                stage.to_host.move(
                    flight.ended_at[stage.index], len(backup.copies) * self._block_bytes
                )
                + self._control_s()
            )
            first = stage.index * acks
            done = [
                TransferDone(epoch, first + rank, backup.transfer, len(backup.copies))
                for rank in range(acks)
            ]
            if self._folded:
                folded += done
                last_at = max(last_at, saved_at)
            else:
                self._tell_at(saved_at, done)
        if folded:
            self._tell_at(last_at, folded)

    def _tell_at(self, at: float, messages: Sequence[Acknowledgement]) -> None:
        self._heap.at(max(at, self._heap.now), lambda: self._tell(messages))

    # ------------------------------------------------------------------------------------------ tickets and stores

    def order(self, order: Order) -> None:
        """On the ticket channel: taken by each stage's I/O side, whatever its compute loop does; staged orders go to their stage."""
        # A stage's ranks act as one here, and every order is for whole stages.
        stages = [
            stage
            for stage in self.stages
            if not order.ranks or stage.index * self._acks in order.ranks
        ]
        for stage in stages:
            stage.order_channel = max(stage.order_channel, self._heap.now + self._control_s())
            self._heap.at(stage.order_channel, lambda stage=stage: self._take(stage, order))  # type: ignore[misc]

    def _take(self, stage: Stage, order: Order) -> None:
        match order:
            case Cancel():
                stage.cancelled.add(order.transfer)
                self._look_later(stage, lambda: self._answer(stage, order.transfer))
            case Ticket():
                self._queue(stage, order)
            case StagedTicket():
                self._look_later(stage, lambda: self._learn(stage, order))
            case StagedReturn():
                stage.returned.add(order.transfer)
                self._look_later(stage, lambda: self._answer(stage, order.transfer))
            case Store():
                self._put(stage, order)

    # ------------------------------------------------------------------------------------------ the staged route

    def _look_later(self, stage: Stage, action: Callable[[], None]) -> None:
        """When the stage's compute loop looks next: between two forwards, or now if it has none."""
        if self._shared is not None:
            self._shared.look(stage.index, action)
        else:
            self._heap.at(self.next_look(stage, self._heap.now), action)

    def next_look(self, stage: Stage, now: float) -> float:
        """Now, if the stage's compute loop is free to look; else when it is (`StagedLook`)."""
        look = self._cluster.engine.staged_look
        passes = (self.stages[-1] if look is StagedLook.LOCKSTEP else stage).passes
        ended_at = max((one.end for one in passes if one.end <= now), default=-math.inf)
        current = next((one for one in passes if one.end > now), None)
        if (
            current is None
            or (look is StagedLook.FORWARD and current.start > now)
            or (look is StagedLook.PLAN and current.taken > now)
        ):
            return now
        if look is StagedLook.LOCKSTEP and now - ended_at <= self._round_s:
            return now  # a word that is on its way as an iteration begins still goes through all stages
        return current.end

    def _learn(self, stage: Stage, ticket: StagedTicket) -> None:
        first = stage.index * self._acks
        taken = [
            StagedTaken(ticket.epoch, first + rank, ticket.transfer) for rank in range(self._acks)
        ]
        self._say_on_fetch_channel(stage, taken)
        self._heap.after(self._cluster.store.query_s, lambda: self._asked(stage, ticket))

    def _asked(self, stage: Stage, ticket: StagedTicket) -> None:
        """The store's answer. The stage asked with the hint, since its reads may have to wait for their turn."""
        self._store.hint([page.hash for page in ticket.pages], stage.index)
        self._queue(stage, ticket)

    def _answer(self, stage: Stage, transfer: int) -> None:
        """The final word, once the reads are done and the stages behind have answered."""
        is_last = stage is self.stages[-1]
        if transfer in stage.read and (
            is_last or transfer in stage.returned or transfer in stage.cancelled
        ):
            ticket, done = stage.read.pop(transfer)
            stage.returned.discard(transfer)
            self._report(stage, ticket, done, True)

    # ------------------------------------------------------------------------------------------ reads and writes

    def _queue(self, stage: Stage, ticket: Ticket | StagedTicket) -> None:
        stage.tickets.append(ticket)
        self._next_ticket(stage)

    def _next_ticket(self, stage: Stage) -> None:
        if stage.tickets and stage.reading < TICKETS_AT_ONCE:
            stage.reading += 1
            self._fetch(stage, stage.tickets.popleft(), 0, self._sizes.first)

    def _fetch(self, stage: Stage, ticket: Ticket | StagedTicket, done: int, size: int) -> None:
        """The next batch of a ticket, of ``size`` pages; its end if there is none, it was cancelled, or a page is gone."""
        if done == len(ticket.pages) or ticket.transfer in stage.cancelled:
            self._end_ticket(stage, ticket, done)
            return
        wanted = [page.hash for page in ticket.pages[done : done + size]]
        read, asked_at = self.read(stage, wanted), self._heap.now
        self._heap.at(
            read.at, lambda: self._batch_done(stage, ticket, done, len(wanted), read, asked_at)
        )

    def read(self, stage: Stage, hashes: Sequence[bytes]) -> Read:
        """Those of the pages that are there, from the front, and when the stage's ranks have them: holders and NICs stream together."""
        read = self._store.get(hashes, stage.index)
        if read.keys:
            read.at = max(
                read.at, stage.nic_in.move(self._heap.now, len(read.keys) * self._block_bytes)
            )
        return read

    def _batch_done(
        self,
        stage: Stage,
        ticket: Ticket | StagedTicket,
        done: int,
        wanted: int,
        read: Read,
        asked_at: float,
    ) -> None:
        good = self._store.good(read)
        done += good
        if good < wanted:
            self._end_ticket(stage, ticket, done)
            return
        if done < len(ticket.pages) and isinstance(ticket, Ticket):
            self._report(stage, ticket, done, False)
        self._fetch(stage, ticket, done, self._sizes.following(good, self._heap.now - asked_at))

    def _end_ticket(self, stage: Stage, ticket: Ticket | StagedTicket, done: int) -> None:
        stage.reading -= 1
        if isinstance(ticket, StagedTicket):
            stage.read[ticket.transfer] = (ticket, done)
            self._look_later(stage, lambda: self._answer(stage, ticket.transfer))
        else:
            self._report(stage, ticket, done, True)
        self._next_ticket(stage)

    def _report(self, stage: Stage, ticket: Ticket | StagedTicket, done: int, final: bool) -> None:
        if final:
            stage.cancelled.discard(ticket.transfer)
        first = stage.index * self._acks
        found = done if isinstance(ticket, StagedTicket) else None  # its reads do not fail
        self._say_on_fetch_channel(
            stage,
            [
                FetchProgress(ticket.epoch, first + rank, ticket.transfer, done, final, found)
                for rank in range(self._acks)
            ],
        )

    def _say_on_fetch_channel(self, stage: Stage, messages: Sequence[Acknowledgement]) -> None:
        stage.fetch_channel = max(stage.fetch_channel, self._heap.now + self._control_s())
        self._heap.at(stage.fetch_channel, lambda: self._tell(messages))

    def _put(self, stage: Stage, order: Store) -> None:
        """One order after another on the stage's store thread; its pages are at their holders when it ends."""
        stage.stores.append(order)
        if len(stage.stores) == 1:
            self._next_store(stage)

    def _next_store(self, stage: Stage) -> None:
        order = stage.stores[0]
        self._store.put(
            [page.hash for page in order.pages],
            stage.index,
            stage.nic_out,
            lambda stored: self._put_done(stage, stored),
        )

    def _put_done(self, stage: Stage, stored: bytes) -> None:
        order = stage.stores.popleft()
        first = stage.index * self._acks
        done = [
            StoreDone(order.epoch, first + rank, order.transfer, stored)
            for rank in range(self._acks)
        ]
        self._heap.after(self._control_s(), lambda: self._tell(done))
        if stage.stores:
            self._heap.after(0.0, lambda: self._next_store(stage))


def forward_s(cluster: Cluster, plan: Plan) -> tuple[float, int, int]:
    """What a plan takes on all stages together, without what each stage adds; its prefill tokens; its decodes.

    A prompt's piece of x tokens after L costs t(L + x) - t(L) with t(l) = a l^2 + b l.
    """
    forward = cluster.forward
    quadratic = forward.quadratic_s
    tokens = context = decodes = 0
    seconds = 0.0
    for piece in plan.pieces:
        count = len(piece.tokens) >> 2
        if count == 1:
            decodes += 1
            context += piece.start
        else:
            tokens += count
            seconds += quadratic * count * (count + 2 * piece.start)
    seconds += (
        forward.linear_s * tokens + forward.decode_s * decodes + forward.decode_context_s * context
    )
    return seconds + forward.fixed_s, tokens, decodes
