"""Fine-tuning data as users bring it: one JSON object per line, of one of three kinds. Needs no library."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from superpod.errors import UserError
from superpod.recipes.data import paths

ROLES = ("system", "user", "assistant", "tool")
KINDS = (("prompt", "completion"), ("messages",), ("text",))
"""The keys that a line of each kind must have."""
SHOWN = 3
"""How many wrong lines a message names; it counts the others."""


@dataclass(frozen=True)
class Sample:
    """One line: the messages of a chat, or a text of which everything after the first `prompt` characters is learnt."""

    line: int
    text: str = ""
    prompt: int = 0
    messages: tuple[dict[str, str], ...] = ()


def read(path: Path) -> list[Sample]:
    """Every sample of a .jsonl file, in order; blank lines are skipped.

    Raises:
        UserError: no such file, no sample in it, or lines that are not samples: the first three with number and reason.
    """
    paths.check(str(path))
    wrong: list[str] = []
    samples: list[Sample] = []
    for number, text in _lines(path):
        try:
            samples.append(_sample(number, text))
        except ValueError as error:
            wrong.append(f"{path}:{number}: {error}")
    if wrong:
        more = f"\nand {len(wrong) - SHOWN} more lines" if len(wrong) > SHOWN else ""
        raise UserError("\n".join(wrong[:SHOWN]) + more, HINT)
    if not samples:
        raise UserError(f"{path} holds no sample", HINT)
    return samples


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open(path, "rb") as stream:
            yield from ((number, line) for number, line in enumerate(stream, 1) if line.strip())
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"{path} is not a file", "name a .jsonl file: a JSON object a line") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _sample(number: int, line: bytes) -> Sample:
    """The sample of a line; ValueError says what is wrong with it."""
    try:
        row = json.loads(line.decode("utf-8-sig"))  # editors on Windows begin a file with a byte-order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"not a JSON object but {_kind(row)}")
    kinds = [keys for keys in KINDS if set(keys) <= row.keys()]  # other keys are allowed, and ignored
    if len(kinds) != 1:
        more = " of more than one kind" if kinds else ""
        raise ValueError(f"has the keys {', '.join(map(repr, list(row)[:8])) or 'none'}{more}")
    if kinds[0] == ("messages",):
        if row.get("tools"):
            raise ValueError("tools are not put into the template; write them into the system message")
        return Sample(number, messages=_messages(row["messages"]))
    prompt, answer = ("", *(_text(row[key], key) for key in kinds[0]))[-2:]  # plain text has an empty prompt
    if not answer.strip():
        raise ValueError(f"{kinds[0][-1]} is empty: there is nothing to learn")
    return Sample(number, prompt + answer, len(prompt))


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is {_kind(value)}, not a text")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{where} holds half a surrogate pair, which is not a character")
    return value


def _messages(messages: object) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is {_kind(messages)}, not a list with messages in it")
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where} is {_kind(message)}, not an object")
        role = message.get("role")
        if role not in ROLES:
            raise ValueError(f"{where}: role {role!r} is none of {', '.join(ROLES)}")
        _text(message.get("content"), f"{where}: content")
        if role == "system" and at:
            raise ValueError(f"{where}: a system message comes first")
    if not any(message["role"] == "assistant" and message["content"].strip() for message in messages):
        raise ValueError("no assistant message with content: there is nothing to learn")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _kind(value: object) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    if value in ([], {}, ""):
        return f"empty ({value!r})"
    return names.get(type(value), "a number")


HINT = (
    'a line is {"prompt": ..., "completion": ...}, {"text": ...}, or '
    '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'
)
