"""How late the usual engine loop learns that a copy is done, and how late Forebay does.

The usual loop of an engine whose scheduler shares a process with its forward passes does four things in turn:

    1. check events     acks of copies that have ended count from now on
    2. build batch      a load from host memory is issued for the pages that the batch needs
    3. launch           the forward pass goes to the device's queue; the load's pages are waited for there, layer by layer
    4. process          wait for the *previous* batch's result; only now are its new pages known to be complete, and a write to host
                        memory is issued for them

So nothing is ever learned but in step 1. With two batches in flight, a load's ack is consumed one iteration after the load was issued,
and a write's three iterations after its batch was launched: one until the batch's result is processed, one while the copy runs, since
step 1 comes at once, and one until the loop comes round to step 1 again. Forebay's planner does not wait for forwards: a load needs no
ack, since the plan that it rides with answers for it, and a backup starts on each rank after its own forward and is acknowledged by a
message that is taken when it comes.
"""

from dataclasses import dataclass

from forebay.core.messages import Plan, PlanDone, TransferDone
from forebay.sim.cluster import make_cluster
from forebay.sim.replay import Job, Options, Replay
from forebay.sim.trace import TraceRequest

ITERATIONS = 12
FORWARD_S = 0.1
COPY_S = 0.02


@dataclass(frozen=True, slots=True)
class Lag:
    """``load``: iterations (for Forebay: plans built) from a load's issue until it counts as done; ``write``: from the launch of a
    batch until its pages' write does; ``write_wait``: from the end of the batch's last forward until then, in forwards."""

    load: int
    write: int
    write_wait: float


class ReferenceLoop:
    """The four steps in virtual time: every batch is one forward pass of ``forward_s`` on a device that runs them in order, with one
    load and one write, each of ``copy_s``."""

    def __init__(self, forward_s: float = FORWARD_S, copy_s: float = COPY_S) -> None:
        self._forward_s, self._copy_s = forward_s, copy_s
        self.now = 0.0
        self._device_free_at = 0.0
        self._ends: list[float] = []  # of each batch's forward pass
        self._loads: dict[int, float] = {}  # batch -> end of its load
        self._writes: dict[int, float] = {}
        self.load_acks: dict[
            int, tuple[int, float]
        ] = {}  # batch -> iteration and time at which step 1 found it done
        self.write_acks: dict[int, tuple[int, float]] = {}

    def run(self, iterations: int = ITERATIONS) -> Lag:
        for iteration in range(iterations):
            self._check_events(iteration)
            self._build(iteration)
            self._launch()
            if iteration:
                self._process(iteration - 1)
        batch = iterations // 2  # one of the steady ones
        load, write = self.load_acks[batch], self.write_acks[batch]
        return Lag(
            load[0] - batch, write[0] - batch, (write[1] - self._ends[batch]) / self._forward_s
        )

    def _check_events(self, iteration: int) -> None:
        for pending, acks in ((self._loads, self.load_acks), (self._writes, self.write_acks)):
            for batch in [batch for batch, end in pending.items() if end <= self.now]:
                del pending[batch]
                acks[batch] = (iteration, self.now)

    def _build(self, batch: int) -> None:
        self._loads[batch] = self.now + self._copy_s

    def _launch(self) -> None:
        start = max(self.now, self._device_free_at)
        self._device_free_at = start + self._forward_s
        self._ends.append(self._device_free_at)

    def _process(self, previous: int) -> None:
        self.now = max(self.now, self._ends[previous])
        self._writes[previous] = self.now + self._copy_s


def forebay_lag(forward_s: float = FORWARD_S, copy_s: float = COPY_S) -> Lag:
    """The same two figures for the planner that ships, on two stages whose every forward takes ``forward_s``, one page a plan.

    A load counts as done when its plan retires; a write, when the last rank's acknowledgement is there.
    """
    page = 64
    table = {
        "model": {"kv_bytes_per_token": 2 * round(copy_s * 1e9 / page), "layers": 2},
        "engine": {
            "pp": 2,
            "page_size": page,
            "chunk_size": page,
            "max_running": 1,
            "device_memory": "8GiB",
            "host_memory": "8GiB",
        },
        "forward": {"stage_s": forward_s, "linear_s": 0.0},
        "copy": {"to_device_gb_s": 1.0, "to_host_gb_s": 1.0},
    }
    prompt = TraceRequest(0.0, page * ITERATIONS, 1, (0,) * -(-page * ITERATIONS // 512)).prompt
    replay = Replay(
        make_cluster(table, {}, "two stages"),
        [Job(0.0, page * ITERATIONS, 1, prompt)],
        Options(journal=True),
    )
    replay.run()
    newest = 0
    plan_of: dict[int, int] = {}
    retired: dict[int, tuple[int, float]] = {}
    saved: dict[int, tuple[int, float]] = {}
    for at, word in replay.measures.journal:
        match word:
            case Plan():
                newest = word.number
                if word.backup is not None:
                    plan_of[word.backup.transfer] = word.number
            case PlanDone():
                retired[word.number] = (newest, at)  # the last rank's word is the one that stays
            case TransferDone():
                saved[plan_of[word.transfer]] = (newest, at)
    plan = ITERATIONS // 2
    load, write = retired[plan], saved[plan]
    return Lag(load[0] - plan, write[0] - plan, (write[1] - load[1]) / forward_s)
