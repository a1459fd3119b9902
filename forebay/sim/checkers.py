"""What must be true of a history, seen from outside: by what went to the grid and what came back to the client."""

from collections import defaultdict

from forebay.core.messages import FinishReason, Output, Plan, PlanDone, Submit
from forebay.core.planner import MAX_FAULTS_ALONE, MAX_LOSSES
from forebay.core.tree import PrefixTree

ENDED_EARLY = frozenset({FinishReason.ABORT, FinishReason.ERROR, FinishReason.TAINTED})
REJECTED = frozenset({FinishReason.REJECTED_FULL, FinishReason.REJECTED_TOO_LONG})


class FenceChecker:
    """Rule R5: no page is given out for writing while a plan in flight names it for another request."""

    def __init__(self, ranks: int, page_size: int) -> None:
        self._ranks = ranks
        self._page_size = page_size
        self._tables: dict[int, list[int]] = {}
        self._owner: dict[int, str] = {}
        self._named: dict[int, dict[int, str]] = {}  # plan -> page -> request
        self._acks: dict[int, int] = defaultdict(int)

    def plan_sent(self, plan: Plan) -> None:
        in_flight = list(self._named.values())
        named: dict[int, str] = {}
        for opening in plan.openings:
            self._tables[opening.slot] = []
            self._owner[opening.slot] = opening.request_id
        for copy in plan.loads:
            for pages in in_flight:
                assert copy.device not in pages, (
                    f"R5: plan {plan.number} loads into page {copy.device}, which is still in use"
                )
        for remap in plan.remaps:
            self._tables[remap.slot][remap.index] = remap.page
        for piece in plan.pieces:
            table, owner = self._tables[piece.slot], self._owner[piece.slot]
            first_new = len(table)
            table.extend(piece.pages)
            for index in range(max(first_new, -(-piece.write_from // self._page_size)), len(table)):
                for pages in in_flight:
                    other = pages.get(table[index], owner)
                    assert other == owner, (
                        f"R5: page {table[index]} goes to {owner} in plan {plan.number}, {other} still uses it"
                    )
            named.update((page, owner) for page in table)
        self._named[plan.number] = named

    def acknowledged(self, done: PlanDone) -> None:
        self._acks[done.number] += 1
        if self._acks[done.number] == self._ranks:
            self._named.pop(done.number, None)


class ClientChecker:
    """Every accepted request gets exactly its tokens, exactly once, and exactly one end."""

    def __init__(self, max_context: int) -> None:
        self._max_context = max_context
        self._wanted: dict[str, tuple[list[int], FinishReason]] = {}
        self._open: dict[str, None] = {}
        self._faults_before: dict[str, int] = {}
        self._blamed: dict[str, bool] = {}
        self._aborted: set[str] = set()
        self._tainted: set[str] = set()
        self._faults = 0
        self._losses = 0
        self._losses_before: dict[str, int] = {}
        self._restarts_in_a_row = 0
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.usage_seen: set[str] = set()

    def submitted(self, submit: Submit, wanted: list[int], reason: FinishReason) -> None:
        """``wanted``, ``reason``: what the request must come to if nothing goes wrong."""
        request_id = submit.request_id
        self._wanted[request_id] = (wanted, reason)
        self._open[request_id] = None
        self._faults_before[request_id] = self._faults
        self._losses_before[request_id] = self._losses
        self.tokens[request_id] = []

    def tainted(self, request_id: str) -> None:
        """Its numbers may come to NaN, and then it must end with an error."""
        self._tainted.add(request_id)

    def aborted(self, request_id: str) -> None:
        self._aborted.add(request_id)

    def grid_lost(self, *, faulted: bool) -> None:
        """``faulted``: by an error of a rank at its work, for which requests may be blamed."""
        self._faults += faulted
        self._losses += 1

    def restarted(self, most: int) -> None:
        """Rule R3: restarts that bring nobody a token or an end are at most ``most`` in a row, while anybody waits for one.

        And one more, which the planner may have heard of before it heard of the request.
        """
        self._restarts_in_a_row += bool(self._open)
        assert self._restarts_in_a_row <= most + 1, (
            f"{self._restarts_in_a_row} restarts in a row brought nobody a token"
        )

    def output(self, output: Output) -> None:
        request_id = output.request_id
        assert request_id in self._wanted, f"output for {request_id}, which nobody asked for"
        assert request_id not in self.finish, f"output for {request_id} after its end"
        assert len(output.logprobs) in (0, len(output.tokens)), (
            "log-probabilities without their tokens"
        )
        if output.usage is not None:
            assert output.tokens and request_id not in self.usage_seen, (
                f"usage of {request_id} comes with its first token, once"
            )
            self.usage_seen.add(request_id)
        if output.tokens:
            assert request_id in self.usage_seen, f"tokens of {request_id} before its usage"
        self._restarts_in_a_row = 0
        self.tokens[request_id] += output.tokens
        if output.finish is not None:
            self.finish[request_id] = output.finish
            faults, losses = (
                self._faults - self._faults_before[request_id],
                self._losses - self._losses_before[request_id],
            )
            self._blamed[request_id] = faults >= MAX_FAULTS_ALONE or losses >= MAX_LOSSES
            del self._open[request_id]

    def open(self) -> list[str]:
        """Requests that have not ended."""
        return list(self._open)

    def check(self, *, failed: bool, shrunk: bool) -> None:
        """At the end of a history. ``failed``: the grid has; ``shrunk``: a grid came back with fewer pages than before."""
        assert not self._open, f"requests {self.open()} never ended"
        for request_id, (wanted, wanted_reason) in self._wanted.items():
            got, reason = self.tokens[request_id], self.finish[request_id]
            if reason in REJECTED:
                assert not got or (shrunk and got == wanted[: len(got)]), (
                    f"{request_id} was rejected after tokens"
                )
            elif reason in ENDED_EARLY:
                assert got == wanted[: len(got)] and len(got) < len(wanted), (
                    f"{request_id} ended early with wrong tokens"
                )
                may_fail = (
                    request_id in self._tainted
                    if reason is FinishReason.TAINTED
                    else reason is FinishReason.ERROR and (failed or self._blamed[request_id])
                )
                assert may_fail or request_id in self._aborted, (
                    f"{request_id} ended with {reason} for no reason"
                )
            else:
                assert got == wanted and reason is wanted_reason, (
                    f"{request_id}: got {got} {reason}, not {wanted} {wanted_reason}"
                )


def check_stored(tree: PrefixTree, ever: set[tuple[bytes, int]], ranks: int) -> None:
    """Durability: what the planner believes to be stored has been, by every rank. (It may have been evicted since: a hint.)"""
    believed = [node.hash for node in tree if node.stored]
    for rank in range(ranks):
        wrong = [hash for hash in believed if (hash, rank) not in ever]
        assert not wrong, (
            f"{len(wrong)} pages are believed stored, and rank {rank} never stored them"
        )
