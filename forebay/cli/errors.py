"""How a command says that its user was mistaken."""


class UserError(Exception):
    """One line for stderr; exit status 2."""
