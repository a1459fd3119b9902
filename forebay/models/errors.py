"""The one error that model files can cause."""


class ModelError(Exception):
    """A model that cannot be served as asked.

    The message is one line: what was given, what is allowed, and what to do.
    """
