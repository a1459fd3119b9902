"""What keeps an engine from starting, as its user is told."""


class StartError(Exception):
    """The engine cannot start: one line with what was given, what is allowed, what to do."""
