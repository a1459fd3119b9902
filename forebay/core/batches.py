"""How many pages one call to the store moves: for the ranks that make them, and for the simulator that says what they do."""

BATCH_BYTES = (
    8 << 20
)  # the first of a fetch, those that take longer than `BATCH_S`, and all of a STORE
MOST_BATCH_BYTES = 64 << 20
BATCH_S = 0.02  # of a fetch: how long a cancel, and the word of how far it is, may have to wait


class BatchSizes:
    """In pages of ``block_bytes``. ``first``: what a fetch begins with."""

    def __init__(self, block_bytes: int) -> None:
        self.first = max(BATCH_BYTES // block_bytes, 1)
        self._most = max(MOST_BATCH_BYTES // block_bytes, 1)

    def following(self, pages: int, seconds: float) -> int:
        """Pages that take about `BATCH_S` when the batch before, of ``pages``, took ``seconds``: each call costs a question to the
        store's master, and a slow store's progress is told often."""
        return min(max(int(pages * BATCH_S / max(seconds, 1e-9)), self.first), self._most)
