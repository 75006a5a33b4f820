"""The user's mistakes, apart from our bugs."""


class UserError(Exception):
    """Something the user can mend: the CLI prints it without a traceback and exits with code 2.

    Say the rule, the numbers that broke it, and the next move, in that order.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def did_you_mean(word: str, known: list[str]) -> str:
    """A hint naming the closest known words, or the empty string when none is close."""
    import difflib

    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else ""


def readable(text: str) -> str:
    """Text of others without the codes that steer a terminal; lines stay lines."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text.replace("\t", " "))
