"""From the value of a row to a sample: which keys make which kind, and what is wrong with a row that is none.

The names are those of OpenAI's chats, of ShareGPT, of Alpaca and of TRL's prompts and completions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from superpod.errors import UserError, did_you_mean

ROLES = ("system", "user", "assistant", "tool")
OTHER_ROLES = {
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
"""Roles of OpenAI's older chats, of ShareGPT's and of Gemma's, and what chat templates call them."""
KINDS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt": ("prompt", "completion"),
    "response": ("prompt", "response"),
    "input": ("input", "output"),
    "question": ("question", "answer"),
    "text": ("text",),
}
"""Kind -> the keys that a row must have. Two kinds whose keys a row has are refused, but Alpaca's holds the third's."""
NAMES = ("messages", "conversations", "prompt", "completion", "response", "instruction", "input", "output", "question",
         "answer", "text", "system", "tools", "role", "content")  # fmt: skip
"""What --key gives another key for; the last two are keys of a message."""
_KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")
"""Keys of a message, besides role and content, that chat templates read."""

Message = Mapping[str, object]


@dataclass(frozen=True)
class Sample:
    """One row: the messages of a chat, or a text of which everything after the first `prompt` characters is learnt.

    `muted` are places in `messages` of answers that are not learnt; `file` names the file in messages to the user.
    """

    line: int
    text: str = ""
    prompt: int = 0
    messages: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    muted: tuple[int, ...] = ()
    file: str = field(default="", compare=False)

    @property
    def where(self) -> str:
        """File and line, for a message."""
        return f"{self.file}:{self.line}" if self.file else f"line {self.line}"


class Keys:
    """Under which keys a row has what; `NAME=KEY` names another key than the usual one, and so the kind.

    Rows without such a key, of another file, are read by the usual ones.
    """

    def __init__(self, given: Sequence[str] = ()) -> None:
        self._keys: dict[str, str] = {}
        for text in given:
            name, _, key = text.partition("=")
            if name not in NAMES or not key:
                known = did_you_mean(name, list(NAMES)) or f"NAME is one of {', '.join(NAMES)}"
                raise UserError(f"--key {text!r} is not NAME=KEY", known)
            if name in self._keys:
                raise UserError(f"--key {name} is given twice", "a row has one key for it")
            self._keys[name] = key
        self._kinds = self._kinds_of()

    def _kinds_of(self) -> dict[str, tuple[str, ...]]:
        """The kinds that a row may be of: all, or those of which a key was named."""
        named = set(self._keys) - {"role", "content", "system", "tools"}
        kinds = {kind: keys for kind, keys in KINDS.items() if named & set(keys)} if named else dict(KINDS)
        whole = {kind: keys for kind, keys in kinds.items() if named <= {*keys, *_optional(kind)}}
        if not whole:
            raise UserError(
                f"--key names {', '.join(sorted(named))}, which no kind of sample has together",
                f"kinds: {'; '.join(' and '.join(keys) for keys in KINDS.values())}",
            )
        return whole

    def of(self, name: str) -> str:
        """The key for a name of `NAMES`."""
        return self._keys.get(name, name)

    @property
    def columns(self) -> frozenset[str]:
        """Every key that a row is read by."""
        return frozenset(self.of(name) for name in (*NAMES, "history", "chosen", "rejected") if name != "role")

    def kind(self, row: Mapping[str, object]) -> str:
        """The kind of a row; ValueError unless it is of one."""
        for known in (self._kinds, KINDS):
            if kinds := [kind for kind, keys in known.items() if all(self.of(key) in row for key in keys)]:
                break
        if "instruction" in kinds:
            kinds = [kind for kind in kinds if kind != "input"]
        if len(kinds) == 1:
            return kinds[0]
        if {"chosen", "rejected"} <= row.keys():
            raise ValueError("holds a chosen and a rejected answer; preferences are not learnt here")
        more = " of more than one kind" if kinds else ""
        raise ValueError(f"has the keys {', '.join(map(repr, list(row)[:8])) or 'none'}{more}")


def _optional(kind: str) -> tuple[str, ...]:
    return ("input",) if kind == "instruction" else ()


def sample(number: int, row: object, keys: Keys, system: str = "") -> tuple[str, Sample]:
    """The kind of a row and its sample; `system` begins chats without a system message.

    Raises:
        ValueError: what is wrong with the row.
    """
    if not isinstance(row, dict):
        raise ValueError(f"not a JSON object but {in_words(row)}")
    kind = keys.kind(row)
    if kind in ("prompt", "response", "text") and not isinstance(row[keys.of(KINDS[kind][0])], list):
        return kind, _text_sample(number, row, kind, keys)
    made = _chat(number, row, kind, keys)
    if system and made.messages[0]["role"] != "system":
        muted = tuple(at + 1 for at in made.muted)
        made = replace(made, messages=({"role": "system", "content": system}, *made.messages), muted=muted)
    return kind, made


def _text_sample(number: int, row: Mapping[str, object], kind: str, keys: Keys) -> Sample:
    names = KINDS[kind]
    prompt, answer = ("", *(_text(row[keys.of(name)], keys.of(name)) for name in names))[-2:]  # plain text: no prompt
    if not answer.strip():
        raise ValueError(f"{keys.of(names[-1])} is empty: there is nothing to learn")
    return Sample(number, prompt + answer, len(prompt))


def _chat(number: int, row: Mapping[str, object], kind: str, keys: Keys) -> Sample:
    muted: list[int] = []
    if kind in ("messages", "conversations"):
        messages = _messages(row[keys.of(kind)], keys.of(kind), keys, muted)
    elif kind in ("prompt", "response"):  # TRL: both are lists of messages
        prompt, answer = (keys.of(name) for name in KINDS[kind])
        messages = _messages(row[prompt], prompt, keys, muted)
        muted = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        offset, later = len(messages), list[int]()
        messages += _messages(row[answer], answer, keys, later)
        muted += [offset + at for at in later]
    else:
        messages = _turns(row, kind, keys)
    system = row.get(keys.of("system"))
    if system and isinstance(system, str) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _text(system, keys.of("system"))})
        muted = [at + 1 for at in muted]
    _check_order(messages, keys.of(kind) if kind in row else kind)
    learnt = [at for at, message in enumerate(messages) if at not in muted and _teaches(message)]
    if not learnt:
        raise ValueError("no assistant message with content that is learnt: there is nothing to learn")
    return Sample(number, messages=tuple(messages), tools=_tools(row.get(keys.of("tools"))), muted=tuple(muted))


def _teaches(message: Message) -> bool:
    return message["role"] == "assistant" and bool(
        str(message.get("content") or "").strip() or message.get("tool_calls")
    )


def _turns(row: Mapping[str, object], kind: str, keys: Keys) -> list[Message]:
    """A question and its answer, after Alpaca's input and history where there are."""
    asks, answers = (keys.of(name) for name in KINDS[kind])
    question, answer = _text(row[asks], asks), _text(row[answers], answers)
    if not answer.strip():
        raise ValueError(f"{answers} is empty: there is nothing to learn")
    if kind == "instruction" and (more := row.get(keys.of("input"))):
        question += "\n\n" + _text(more, keys.of("input"))
    history = row.get("history") or []
    if not isinstance(history, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in history):
        raise ValueError("history is not a list of pairs of question and answer")
    texts = [_text(text, f"history[{at}]") for at, pair in enumerate(history) for text in pair]
    roles = ("user", "assistant") * (len(history) + 1)
    return [{"role": role, "content": text} for role, text in zip(roles, (*texts, question, answer), strict=True)]


def _messages(value: object, key: str, keys: Keys, muted: list[int]) -> list[Message]:
    """The messages of a list, as chat templates read them; `muted` takes the places of answers of weight 0."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} is {in_words(value)}, not a list with messages in it")
    messages: list[Message] = []
    for at, message in enumerate(value):
        where = f"{key}[{at}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where} is {in_words(message)}, not an object")
        messages.append(_message(message, where, keys))
        if _weight(message, where) == 0:
            muted.append(at)
    return messages


def _message(message: Mapping[str, object], where: str, keys: Keys) -> Message:
    share_gpt = "from" in message and keys.of("role") not in message
    role = message.get("from" if share_gpt else keys.of("role"))
    content = message.get("value" if share_gpt else keys.of("content"))
    name = OTHER_ROLES.get(role, role) if isinstance(role, str) else role
    if role == "function_call":  # ShareGPT's: the call as the model writes it
        name = "assistant"
    if name not in ROLES:
        raise ValueError(f"{where}: role {role!r} is none of {', '.join(ROLES)}")
    more = {key: message[key] for key in _KEPT if message.get(key)}
    if calls := _tool_calls(message, where):
        more["tool_calls"] = calls
    if content is None and more.get("tool_calls"):
        return {"role": name, "content": "", **more}
    return {"role": name, "content": _content(content, where), **more}


def _content(content: object, where: str) -> str:
    """A text, or OpenAI's list of parts that are texts."""
    if not isinstance(content, list):
        return _text(content, f"{where}: content")
    parts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind != "text":
            raise ValueError(f"{where}: content[{at}] is {kind or in_words(part)}, and only text is learnt here")
        parts.append(_text(part.get("text"), f"{where}: content[{at}]"))
    return "".join(parts)


def _tool_calls(message: Mapping[str, object], where: str) -> list[dict[str, object]]:
    """The calls of a message; their arguments as an object, because templates write them as JSON."""
    calls = message.get("tool_calls") or []
    if older := message.get("function_call"):
        calls = [{"type": "function", "function": older}]
    if not isinstance(calls, list) or any(not isinstance(call, dict) for call in calls):
        raise ValueError(f"{where}: tool_calls is not a list of objects")
    made = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: a call names no function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise ValueError(f"{where}: the arguments of {function['name']} are not JSON") from None
        function = {**function, "arguments": arguments or {}}
        made.append(
            {**call, "function": function} if "function" in call else {"type": "function", "function": function}
        )
    return made


def _weight(message: Mapping[str, object], where: str) -> float:
    weight = message.get("weight", 1)
    if weight is None:
        return 1
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(f"{where}: weight {weight!r} is neither 0 nor 1")
    return float(weight)


def _tools(tools: object) -> tuple[Message, ...]:
    if not tools:
        return ()
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise ValueError("tools is a text that is not JSON") from None
    if not isinstance(tools, list) or any(not isinstance(tool, dict) for tool in tools):
        raise ValueError("tools is not a list of objects")
    return tuple(tools)


def _check_order(messages: Sequence[Message], key: str) -> None:
    for at, message in enumerate(messages):
        if message["role"] == "system" and at:
            raise ValueError(f"{key}[{at}]: a system message comes first")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is {in_words(value)}, not a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} holds half a surrogate pair, which is not a character") from None
    return value


def in_words(value: object) -> str:
    """What a JSON value is."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    if value in ([], {}, ""):
        return f"empty ({value!r})"
    return names.get(type(value), "a number")


HINT = (
    'a line is {"prompt": ..., "completion": ...}, {"text": ...}, or '
    '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}; '
    "--key NAME=KEY names other keys, docs/finetune.md has all kinds"
)
