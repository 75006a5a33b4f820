"""Convert the JSON value of a row to a sample. The keys of the row determine its format, called kind in the code.

The keys are those of OpenAI's chats, ShareGPT, Alpaca, and TRL's prompts and completions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from superpod.errors import UserError, did_you_mean

ROLES = ("system", "user", "assistant", "tool")
OPTIONAL_KEYS = {"instruction": ("input",)}
ROLE_ALIASES = {
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
"""Role in ShareGPT, Gemma or older OpenAI chats -> role in chat templates."""
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
"""Kind -> required keys of a row. A row of two kinds is rejected, except that "instruction" may include "input"."""
STANDARD_KEYS = ("messages", "conversations", "prompt", "completion", "response", "instruction", "input", "output",
                 "question", "answer", "text", "system", "tools", "role", "content")  # fmt: skip
"""Keys that --key can rename; the last two are keys of a message."""
_KEPT_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")
"""Keys of a message that chat templates read, besides role and content."""

Message = Mapping[str, object]


@dataclass(frozen=True)
class Sample:
    """The messages of a chat, or a text whose first `prompt` characters are masked in the loss.

    `masked` are the indices of assistant messages that are masked in the loss. `file` and `line` are for errors.
    """

    line: int
    text: str = ""
    prompt: int = 0
    messages: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    masked: tuple[int, ...] = ()
    file: str = field(default="", compare=False)

    @property
    def where(self) -> str:
        """File and line, for error messages."""
        return f"{self.file}:{self.line}" if self.file else f"line {self.line}"


class Keys:
    """The keys of rows: standard keys, some of them renamed by options `NAME=KEY`.

    Rows without the renamed keys, for example in another file, are read with the standard keys.
    """

    def __init__(self, renames: Sequence[str] = ()) -> None:
        """Parse options `NAME=KEY`. Raises UserError if one is invalid, or if no kind has all renamed keys."""
        self._keys: dict[str, str] = {}
        for text in renames:
            name, _, key = text.partition("=")
            if name not in STANDARD_KEYS or not key:
                hint = did_you_mean(name, list(STANDARD_KEYS)) or f"NAME must be one of {', '.join(STANDARD_KEYS)}"
                raise UserError(f"--key {text!r} is not NAME=KEY", hint)
            if name in self._keys:
                raise UserError(f"--key {name} is given twice", "pass it once")
            self._keys[name] = key
        self._kinds = self._select_kinds()

    def _select_kinds(self) -> dict[str, tuple[str, ...]]:
        """Return the kinds that have all renamed keys, or all kinds if no key is renamed."""
        replaced_keys = set(self._keys) - {"role", "content", "system", "tools"}
        if not replaced_keys:
            return dict(KINDS)
        kinds = {
            kind: keys
            for kind, keys in KINDS.items()
            if replaced_keys & set(keys) and replaced_keys <= {*keys, *OPTIONAL_KEYS.get(kind, ())}
        }
        if not kinds:
            raise UserError(
                f"--key renames {', '.join(sorted(replaced_keys))}, but no sample format has all of these keys",
                f"sample formats: {'; '.join(' and '.join(keys) for keys in KINDS.values())}",
            )
        return kinds

    def key(self, name: str) -> str:
        """Return the key of rows for a standard key, such as "prompt"."""
        return self._keys.get(name, name)

    @property
    def columns(self) -> frozenset[str]:
        """All keys that may be read from a row."""
        return frozenset(self.key(name) for name in (*STANDARD_KEYS, "history", "chosen", "rejected") if name != "role")

    def find_kind(self, row: Mapping[str, object]) -> str:
        """Return the kind of a row, such as "messages". Raises ValueError unless its keys match exactly one kind."""
        kinds = self._find_kinds(row, self._kinds) or self._find_kinds(row, KINDS)
        if "instruction" in kinds:
            kinds = [kind for kind in kinds if kind != "input"]
        if len(kinds) == 1:
            return kinds[0]
        if {"chosen", "rejected"} <= row.keys():
            raise ValueError("has a chosen and a rejected answer, but preference training is not supported")
        problem = f"has the keys {', '.join(map(repr, list(row)[:8])) or 'none'}"
        raise ValueError(f"{problem}, which belong to several sample formats" if kinds else problem)

    def _find_kinds(self, row: Mapping[str, object], kinds: Mapping[str, Sequence[str]]) -> list[str]:
        return [kind for kind, keys in kinds.items() if all(self.key(key) in row for key in keys)]


def convert_row(number: int, row: object, keys: Keys, system: str = "") -> tuple[str, Sample]:
    """Convert a row to a sample, and return (kind, sample).

    Args:
        number: number of the row in its file.
        row: JSON value of the row.
        keys: keys of rows.
        system: system message for chats that have none; "" for none.

    Raises:
        ValueError: the row has no known format or invalid values.
    """
    if not isinstance(row, dict):
        raise ValueError(f"not a JSON object but {type_name(row)}")
    kind = keys.find_kind(row)
    if kind in ("prompt", "response", "text") and not isinstance(row[keys.key(KINDS[kind][0])], list):
        return kind, _convert_text(number, row, kind, keys)
    chat = _convert_chat(number, row, kind, keys)
    if system and chat.messages[0]["role"] != "system":
        masked = tuple(at + 1 for at in chat.masked)
        chat = replace(chat, messages=({"role": "system", "content": system}, *chat.messages), masked=masked)
    return kind, chat


def _convert_text(number: int, row: Mapping[str, object], kind: str, keys: Keys) -> Sample:
    texts = [_require_text(row[keys.key(name)], keys.key(name)) for name in KINDS[kind]]
    prompt = texts[0] if len(texts) == 2 else ""  # a plain text has no prompt
    if not texts[-1].strip():
        raise ValueError(f"{keys.key(KINDS[kind][-1])} is empty, so there is nothing to train on")
    return Sample(number, prompt + texts[-1], len(prompt))


def _convert_chat(number: int, row: Mapping[str, object], kind: str, keys: Keys) -> Sample:
    masked: list[int] = []
    if kind in ("messages", "conversations"):
        messages = _convert_messages(row[keys.key(kind)], keys.key(kind), keys, masked)
    elif kind in ("prompt", "response"):  # TRL: both are lists of messages
        prompt, answer = (keys.key(name) for name in KINDS[kind])
        messages = _convert_messages(row[prompt], prompt, keys, masked)
        masked = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        masked_answers: list[int] = []
        offset = len(messages)
        messages += _convert_messages(row[answer], answer, keys, masked_answers)
        masked += [offset + at for at in masked_answers]
    else:
        messages = _convert_turns(row, kind, keys)
    system = row.get(keys.key("system"))
    if system and isinstance(system, str) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _require_text(system, keys.key("system"))})
        masked = [at + 1 for at in masked]
    _require_system_first(messages, keys.key(kind) if kind in row else kind)
    if not any(_is_answer(message) for at, message in enumerate(messages) if at not in masked):
        raise ValueError("no assistant message has content and a weight other than 0, so there is nothing to train on")
    return Sample(
        number, messages=tuple(messages), tools=_parse_tools(row.get(keys.key("tools"))), masked=tuple(masked)
    )


def _is_answer(message: Message) -> bool:
    """Return whether a message is of the assistant, and has content or tool calls."""
    if message["role"] != "assistant":
        return False
    return bool(str(message.get("content") or "").strip() or message.get("tool_calls"))


def _convert_turns(row: Mapping[str, object], kind: str, keys: Keys) -> list[Message]:
    """Return the messages of a row with a question and an answer, after those of its history if it has one."""
    question_key, answer_key = (keys.key(name) for name in KINDS[kind])
    question, answer = _require_text(row[question_key], question_key), _require_text(row[answer_key], answer_key)
    if not answer.strip():
        raise ValueError(f"{answer_key} is empty, so there is nothing to train on")
    input_text = row.get(keys.key("input")) if kind == "instruction" else None
    if input_text:
        question += "\n\n" + _require_text(input_text, keys.key("input"))
    history = row.get("history") or []
    if not isinstance(history, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in history):
        raise ValueError("history is not a list of pairs of a question and an answer")
    texts = [_require_text(text, f"history[{at}]") for at, pair in enumerate(history) for text in pair]
    roles = ("user", "assistant") * (len(history) + 1)
    return [{"role": role, "content": text} for role, text in zip(roles, (*texts, question, answer), strict=True)]


def _convert_messages(value: object, key: str, keys: Keys, masked: list[int]) -> list[Message]:
    """Return messages as chat templates require them, and append the indices of those with weight 0 to `masked`."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} is {type_name(value)}, not a list of messages")
    messages: list[Message] = []
    for at, message in enumerate(value):
        location = f"{key}[{at}]"
        if not isinstance(message, dict):
            raise ValueError(f"{location} is {type_name(message)}, not an object")
        messages.append(_convert_message(message, location, keys))
        if _get_loss_weight(message, location) == 0:
            masked.append(at)
    return messages


def _convert_message(message: Mapping[str, object], where: str, keys: Keys) -> Message:
    is_share_gpt = "from" in message and keys.key("role") not in message
    role = message.get("from" if is_share_gpt else keys.key("role"))
    content = message.get("value" if is_share_gpt else keys.key("content"))
    name = ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
    if role == "function_call":  # in ShareGPT: a tool call as text
        name = "assistant"
    if name not in ROLES:
        raise ValueError(f"{where}: role {role!r} must be one of {', '.join(ROLES)}")
    other_keys = {key: message[key] for key in _KEPT_KEYS if message.get(key)}
    calls = _parse_tool_calls(message, where)
    if calls:
        other_keys["tool_calls"] = calls
    if content is None and other_keys.get("tool_calls"):
        return {"role": name, "content": "", **other_keys}
    return {"role": name, "content": _get_content(content, where), **other_keys}


def _get_content(content: object, where: str) -> str:
    """Return the content of a message as text; in OpenAI chats it may be a list of text parts."""
    if not isinstance(content, list):
        return _require_text(content, f"{where}: content")
    parts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind != "text":
            raise ValueError(f"{where}: content[{at}] is {kind or type_name(part)}, but only text is supported")
        parts.append(_require_text(part.get("text"), f"{where}: content[{at}]"))
    return "".join(parts)


def _parse_tool_calls(message: Mapping[str, object], where: str) -> list[dict[str, object]]:
    """Return the tool calls of a message, with arguments as objects instead of JSON text."""
    calls = message.get("tool_calls") or []
    older_call = message.get("function_call")
    if older_call:
        calls = [{"type": "function", "function": older_call}]
    if not isinstance(calls, list) or any(not isinstance(call, dict) for call in calls):
        raise ValueError(f"{where}: tool_calls is not a list of objects")
    converted_calls = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: a tool call has no function name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise ValueError(f"{where}: the arguments of {function['name']} are not JSON") from None
        function = {**function, "arguments": arguments or {}}
        if "function" in call:
            converted_calls.append({**call, "function": function})
        else:
            converted_calls.append({"type": "function", "function": function})
    return converted_calls


def _get_loss_weight(message: Mapping[str, object], where: str) -> float:
    weight = message.get("weight", 1)
    if weight is None:
        return 1
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(f"{where}: weight {weight!r} is neither 0 nor 1")
    return float(weight)


def _parse_tools(tools: object) -> tuple[Message, ...]:
    if not tools:
        return ()
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise ValueError("tools is a string, but not JSON") from None
    if not isinstance(tools, list) or any(not isinstance(tool, dict) for tool in tools):
        raise ValueError("tools is not a list of objects")
    return tuple(tools)


def _require_system_first(messages: Sequence[Message], key: str) -> None:
    for at, message in enumerate(messages):
        if message["role"] == "system" and at:
            raise ValueError(f"{key}[{at}]: a system message must be the first message")


def _require_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is {type_name(value)}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} contains an unpaired surrogate, which is not a character") from None
    return value


def type_name(value: object) -> str:
    """Return the type of a JSON value for messages, such as "a list"."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    if value in ([], {}, ""):
        return f"empty ({value!r})"
    return names.get(type(value), "a number")


HINT = (
    'a line must be {"prompt": ..., "completion": ...}, {"text": ...}, or '
    '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}; '
    "--key NAME=KEY selects other keys; docs/finetune.md lists all sample formats"
)
