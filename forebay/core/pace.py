"""How long a plan should take: one number, measured as plans retire. Used to notice a stuck rank, not to schedule."""

SMOOTHING = 0.2
DEFAULT_S_PER_TOKEN = 0.01
PASS_WORK = 16  # what a pass over all weights costs, however few tokens there are to run


class Pace:
    """Seconds per unit of work, an exponential moving average; the unit is a prefill token without context."""

    def __init__(self, s_per_token: float = DEFAULT_S_PER_TOKEN) -> None:
        self._s_per_unit = max(s_per_token, 1e-9)

    def predict(self, work: float) -> float:
        return self._s_per_unit * work

    def observe(self, work: float, seconds: float) -> None:
        self._s_per_unit += SMOOTHING * (seconds / max(work, 1.0) - self._s_per_unit)


def work_of(tokens: int, context: int) -> float:
    """Units of a piece of ``tokens`` after ``context`` tokens: attention makes a token dearer by its context.

    A decode reads all weights for one token, which is why each piece costs at least `PASS_WORK`.
    """
    return (tokens if tokens > PASS_WORK else PASS_WORK) * (1.0 + context / 4096)
