"""One plan on one rank: from the mirror's steps to hidden states for the next stage, or to sampled tokens.

plan --> mirror --> steps --> batch --.
             tokens, or hidden states --+--> forward --> hidden states --> next stage
                 of the stage before                 `-> logits --> samples
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forebay.core.messages import Plan, Sample, Scores
from forebay.core.spans import SpanKind
from forebay.models.batch import SequenceWork, StageBatch, build_batch
from forebay.models.kv import KVPool
from forebay.models.llama import Stage
from forebay.observe.events import SpanRing
from forebay.runtime.copy_engine import CopyEngine, LoadGate
from forebay.runtime.mirror import Limits, Mirror, Step
from forebay.runtime.sampler import Sampler
from forebay.runtime.scorer import PromptScorer
from forebay.runtime.stage_link import Activation, StageReceiver, StageSender

NS = 1e-9
AroundForward = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a plan came to on this rank. ``samples``: empty on all ranks but the sampling one.
    ``tainted`` as in `PlanDone`."""

    samples: tuple[Sample, ...]
    forward_s: float
    scores: tuple[Scores, ...] = ()
    tainted: tuple[int, ...] = ()


class Executor:
    """Runs plans in order. ``receiver`` is None on the first stage, ``sender`` on the last, ``sampler`` on all but one rank.

    ``ring``: where spans go; ``around_forward``: entered around every forward pass.
    """

    def __init__(
        self,
        stage: Stage,
        stage_number: int,
        pool: KVPool,
        limits: Limits,
        ring: SpanRing,
        device: torch.device,
        copier: CopyEngine,
        receiver: StageReceiver | None,
        sender: StageSender | None,
        sampler: Sampler | None,
        around_forward: AroundForward = nullcontext,
    ) -> None:
        self.limits = limits
        self._mirror = Mirror(limits)
        self._stage = stage
        self._stage_number = stage_number
        self._pool = pool
        self._ring = ring
        self._around_forward = around_forward
        self._device = device
        self._copier = copier
        self._receiver = receiver
        self._sender = sender
        self._sampler = sampler
        self._scorer = PromptScorer(device)

    @torch.inference_mode()
    def run(self, plan: Plan) -> Outcome:
        """Apply ``plan``, run this rank's layers over it, pass the result on. When it returns, no page of it is in use here.

        Raises ``PlanError`` if the plan does not fit, ``LinkError`` if a neighbour is gone or runs something else, and
        ``RuntimeError`` if the device fails.
        """
        began = time.monotonic_ns()
        gate = self._copier.load(plan)
        steps = self._mirror.apply(plan)
        batch = self._batch(steps)
        self._ring.record(SpanKind.APPLY, began, plan.number, len(steps))
        activation = Activation(plan.epoch, plan.number, batch.rows, plan.digest)
        inputs = self._inputs(steps, activation)
        began = time.monotonic_ns()
        with self._around_forward():
            output = self._stage.forward(
                inputs,
                batch,
                self._pool,
                None if gate is None else self._waiting(plan.number, gate),
            )
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        ended = time.monotonic_ns()
        self._ring.record(
            SpanKind.FORWARD, began, plan.number, batch.rows, self._stage_number, end_ns=ended
        )
        if self._sender is not None:
            self._sender.send(activation, output)
        if plan.backup is not None:
            self._copier.back_up(plan.backup)
        samples, scores = self._sample(plan, steps, output)
        return Outcome(samples, (ended - began) * NS, scores, _tainted(batch))

    def settle(self) -> None:
        """Wait until the next stage has all that was sent to it."""
        if self._sender is not None:
            self._sender.settle()

    def clear_pages(self) -> None:
        """Zeros again in the pages that the mirror names; no plan may follow."""
        pages = torch.from_numpy(
            np.unique(
                np.concatenate([self._mirror.table(slot) for slot in range(self.limits.slots)])
            )
        )
        self._pool.clear(pages)

    def _waiting(self, plan: int, gate: LoadGate) -> Callable[[int], None]:
        """What a forward pass calls before each layer when pages of it may still be on their way."""

        def wait(layer: int) -> None:
            if not gate.is_open(layer):
                began = time.monotonic_ns()
                gate.wait(layer)
                self._ring.record(SpanKind.LOAD_WAIT, began, plan, part=layer)

        return wait

    def _batch(self, steps: list[Step]) -> StageBatch:
        work = [
            SequenceWork(
                len(step.tokens),
                step.start,
                self._mirror.table(step.slot),
                step.write_from,
                step.sample,
                step.score is not None,
            )
            for step in steps
        ]
        return build_batch(work, self._pool.page_size, self._device)

    def _inputs(self, steps: list[Step], activation: Activation) -> Tensor:
        """Token ids (T,) int64 on the first stage, else the previous stage's hidden states (T, hidden)."""
        if self._receiver is None:
            tokens = np.concatenate([step.tokens for step in steps]).astype(np.int64)
            return torch.from_numpy(tokens).to(self._device)
        began = time.monotonic_ns()
        hidden = self._receiver.receive(activation)
        self._ring.record(SpanKind.RECEIVE, began, activation.plan, activation.tokens)
        return hidden

    def _sample(
        self, plan: Plan, steps: list[Step], logits: Tensor
    ) -> tuple[tuple[Sample, ...], tuple[Scores, ...]]:
        if self._sampler is None:
            return (), ()
        scores: tuple[Scores, ...] = ()
        if any([step.score is not None for step in steps]):
            scores, logits = self._score(steps, logits)
        for opening in plan.openings:
            self._sampler.open(opening)
        self._sampler.count(steps)
        asking = [step for step in steps if step.sample]
        if not asking:
            return (), scores
        began = time.monotonic_ns()
        chosen = self._sampler.sample(logits, asking)
        self._ring.record(SpanKind.SAMPLE, began, plan.number, len(asking))
        samples = tuple(
            Sample(step.slot, token, logprobs, self._sampler.failure(step.slot))
            for step, (token, logprobs) in zip(asking, chosen, strict=True)
        )
        return samples, scores

    def _score(self, steps: list[Step], logits: Tensor) -> tuple[tuple[Scores, ...], Tensor]:
        """Scores of the pieces that ask for them, and the logits of the rows that are sampled."""
        scores, sampled, start = [], [], 0
        for step in steps:
            stop = start + (len(step.tokens) if step.score is not None else step.sample)
            if step.score is not None:
                scores.append(self._scorer.score(step, logits[start:stop]))
            if step.sample:
                sampled.append(stop - 1)
            start = stop
        return tuple(scores), logits[torch.tensor(sampled, dtype=torch.int64, device=self._device)]


def _tainted(batch: StageBatch) -> tuple[int, ...]:
    """Pieces of which a row is not finite."""
    finite = batch.finite.cpu()
    if bool(finite.all()):
        return ()
    return tuple(
        index
        for index, span in enumerate(batch.spans)
        if not bool(finite[span.row_start : span.row_stop].all())
    )
