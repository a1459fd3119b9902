"""What host pages are for: which pages may leave a tier, and what keeps them there.

CACHE      a tier of its own: a host page stays until it is evicted, least recently used first
STAGING    a page is in host memory only while a transfer moves it
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Residency:
    """``outlives_transfers``: a host page stays when nothing moves it, so a page that is wanted
    elsewhere needs no pin meanwhile, and one is saved though the store has it.
    ``frees_device``: a device page may go before its descendants when its node has a host page.
    ``follows_parent``: a host page is worth nothing without its parent's."""

    outlives_transfers: bool
    frees_device: bool
    follows_parent: bool


CACHE = Residency(outlives_transfers=True, frees_device=True, follows_parent=True)
STAGING = Residency(outlives_transfers=False, frees_device=False, follows_parent=False)
