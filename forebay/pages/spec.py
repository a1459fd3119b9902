"""What a page holds for each layer: its planes, in the order of a block.

keys, values      of each key/value head, so tensor parallel ranks have some heads of each
a latent, ...     of all heads together, so every tensor parallel rank has it whole
"""

from dataclasses import dataclass
from enum import Enum


class Cut(Enum):
    """How tensor parallel ranks share a plane."""

    HEADS = "heads"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of numbers. ``elements``: of one token, and of one head where heads are cut.

    ``dtype``: as the numbers lie in memory, of ``item_bytes`` each. ``scale_bytes``: what one token
    (and head) has beside its numbers. ``window``: how many tokens back attention looks; None = all.
    """

    name: str
    elements: int
    dtype: str
    item_bytes: int
    scale_bytes: int = 0
    cut: Cut = Cut.HEADS
    window: int | None = None

    def first_needed(self, position: int) -> int:
        """The first token that the token at ``position`` looks at."""
        return 0 if self.window is None else max(position - self.window + 1, 0)


@dataclass(frozen=True, slots=True)
class KvSpec:
    """A page of ``page_size`` tokens. Every layer has all ``planes``."""

    page_size: int
    planes: tuple[Plane, ...]

    @classmethod
    def keys_and_values(
        cls, page_size: int, head_dim: int, dtype: str, item_bytes: int, scale_bytes: int = 0
    ) -> "KvSpec":
        """``scale_bytes``: of one token's vector of one head."""
        sides = [
            Plane(name, head_dim, dtype, item_bytes, scale_bytes) for name in ("keys", "values")
        ]
        return cls(page_size, tuple(sides))

    @property
    def numbers_bytes(self) -> tuple[int, ...]:
        """Of one layer's page in each plane, of one head where heads are cut."""
        return tuple(self.page_size * each.elements * each.item_bytes for each in self.planes)

    @property
    def scales_bytes(self) -> tuple[int, ...]:
        return tuple(self.page_size * each.scale_bytes for each in self.planes)

    def first_page(self, position: int) -> int:
        """The first page of a prefix that the token at ``position`` needs in any plane."""
        return min([each.first_needed(position) for each in self.planes]) // self.page_size
