"""What became of every stored page that was asked for: used, or unused for one reason. Counted in pages of one rank.

        wanted --fetched into the tree--> brought --a plan loads it--> used
           |                                 '--it goes before, or is computed meanwhile--> unused[reason]
           '--not fetched, or not to be reached--------------------------------------------> unused[reason]

*Wanted*: the store has said that it has the page, and the tree had it in neither tier then. (On the staged route: each page that host
memory was taken or lacking for, less what turns out not to be stored. A query that is never answered: all that it asked for.) A page
that is asked for anew after a refusal is wanted once; one that is fetched again because its tree was lost is wanted again.
At any time ``wanted == used + sum(unused) + brought`` and what is still under way (`Tickets.pages_under_way`): invariant I17.
"""

from collections import Counter
from dataclasses import dataclass, field

REASONS = (
    "failed",  # a rank could not read it
    "covered",  # the tree got it meanwhile
    "anchor_lost",  # the tree lost what it hangs on
    "best_effort",  # its request could run, and did not wait
    "timeout",
    "no_host_pages",
    "below_threshold",
    "slower_than_compute",
    "query_late",  # its request had been admitted when the store answered, or it never did
    "aborted",
    "evicted",  # fetched, and gone before anybody used it
    "grid_lost",
)


@dataclass(slots=True)
class FetchLedger:
    """``brought``: pages in the tree that no plan has loaded yet. ``unused``: pages by reason."""

    wanted: int = 0
    used: int = 0
    brought: int = 0
    unused: Counter[str] = field(default_factory=Counter)

    def leave(self, why: str, pages: int) -> None:
        """``pages`` that are counted as wanted already come to nothing."""
        assert why in REASONS
        if pages:
            self.unused[why] += pages

    def refuse(self, why: str, pages: int) -> None:
        """``pages`` turn out to have been wanted, and come to nothing."""
        self.wanted += pages
        self.leave(why, pages)

    def use(self) -> None:
        """A plan loads a page that was brought."""
        self.brought -= 1
        self.used += 1

    def lose(self, why: str, pages: int = 1) -> None:
        """``pages`` that were brought will not be used."""
        self.brought -= pages
        self.leave(why, pages)
