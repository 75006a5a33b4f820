"""Exception for recipes that cannot be rehearsed."""

from superpod.errors import UserError


class RehearsalError(UserError):
    """The recipe cannot be rehearsed as requested; the hint gives the next step."""
