"""The error of a rehearsal."""

from superpod.errors import UserError


class RehearsalError(UserError):
    """The recipe cannot be rehearsed as requested, which is the user's mistake; the hint gives the next step."""
