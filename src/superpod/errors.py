"""User errors, as opposed to internal errors, and helpers for their messages."""


class UserError(Exception):
    """An error that the user can correct. The command line prints it without a traceback, and exits with code 2.

    The message states the rule and the values that broke it; the hint states the next step.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if needed: '1 node', '1,024 nodes'."""
    plural = "" if number == 1 else "s"
    return f"{number:,} {noun}{plural}"


def cut(text: str, max_length: int = 100) -> str:
    """Return a user's text in quotes, for a message on one line; truncated to `max_length` characters."""
    if len(text) <= max_length:
        return repr(text)
    return f"{text[:max_length]!r}... ({len(text):,} characters)"


def did_you_mean(word: str, candidates: list[str]) -> str:
    """Return a hint with the up to 3 `candidates` that are most similar to `word`; "" if none is similar."""
    import difflib

    if len(word) > 200:  # longer than any name, and the search takes quadratic time
        return ""
    close = difflib.get_close_matches(word, dict.fromkeys(candidates), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else ""


def readable(text: str) -> str:
    """Return `text` with "?" in place of control characters, such as escape sequences; line breaks are kept."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text.replace("\t", " "))
