"""The user's mistakes, apart from our bugs."""


class UserError(Exception):
    """Something the user can mend: the CLI prints it without a traceback and exits with code 2.

    Say the rule, the numbers that broke it, and the next move, in that order.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def counted(number: int, noun: str) -> str:
    """'1 node', '4 nodes', '1,024 nodes'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def cut(text: str, most: int = 100) -> str:
    """A user's text for a message, quoted on one line; of a long one its beginning."""
    return repr(text) if len(text) <= most else f"{text[:most]!r}... ({len(text):,} letters)"


def did_you_mean(word: str, known: list[str]) -> str:
    """A hint naming the closest known words, or the empty string when none is close."""
    import difflib

    if len(word) > 200:  # no name is; and the search takes the square of it
        return ""
    close = difflib.get_close_matches(word, dict.fromkeys(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else ""


def readable(text: str) -> str:
    """Text of others without the codes that steer a terminal; lines stay lines."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text.replace("\t", " "))
