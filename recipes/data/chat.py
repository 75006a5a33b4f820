"""From a sample to token ids, and to which of them the model is to learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from superpod.errors import UserError
from superpod.recipes.data.samples import Sample

PLAIN = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The chat template of a tokenizer that has none. It goes with the exported model, so that it is asked as it learnt."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of a sample; `learnt[i]` says whether the model is to predict `ids[i]` from those before it."""

    line: int
    ids: list[int]
    learnt: list[bool]


def load(folder: str) -> Any:
    """The tokenizer of a Hugging Face folder, with a chat template: its own, or `PLAIN`.

    Raises:
        UserError: none loads, it has no tokenizer.json (which alone says where in the text a token stands), or no
            end-of-sequence token.
    """
    from superpod.recipes.data import tokenizer

    found = tokenizer.pretrained(folder)
    if not found.is_fast:
        raise UserError(f"the tokenizer of {folder} has no tokenizer.json", "save it as a fast tokenizer first")
    return ready(found, folder)


def ready(tokenizer: Any, whose: str) -> Any:
    """A tokenizer that ends its answers, with a chat template: its own, or `PLAIN`.

    Raises:
        UserError: it has no end-of-sequence token.
    """
    if len(tokenizer) == 0 or tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {whose} has no end-of-sequence token", "set its eos_token")
    tokenizer.chat_template = tokenizer.chat_template or PLAIN
    return tokenizer


def encode(sample: Sample, tokenizer: Any) -> Encoded:
    """Token ids and what is learnt of them.

    Of a prompt and its completion the completion, of a chat what the assistant says up to the end of its turn, of plain
    text all. Text and completions end with the end-of-sequence token. A token that reaches from the prompt into the
    completion is learnt.
    """
    if sample.messages:
        text, spans = _render(sample, tokenizer)
        ids, learnt = _ids(text, spans, tokenizer)
        return Encoded(sample.line, ids, learnt)
    ids, learnt = _ids(sample.text, [(sample.prompt, len(sample.text))], tokenizer)
    begin = [tokenizer.bos_token_id] if _adds_bos(tokenizer) else []
    return Encoded(sample.line, [*begin, *ids, tokenizer.eos_token_id], [False for _ in begin] + [*learnt, True])


def _render(sample: Sample, tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """The whole chat, and from where to where the assistant speaks in it.

    A template may write a turn otherwise once another follows (Qwen3 leaves out earlier thoughts); such a chat teaches
    its last answer only.
    """
    messages = list(sample.messages)
    whole = _written(sample, tokenizer, messages, False)
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    spans = []
    for at in answers:
        before = _written(sample, tokenizer, messages[:at], True)
        after = _written(sample, tokenizer, messages[: at + 1], False)
        if whole.startswith(before) and whole.startswith(after):
            spans.append((len(before), len(after)))
        elif at == answers[-1]:
            raise UserError(
                f"line {sample.line}: the tokenizer's chat template does not begin an answer as it asks for one",
                "mend chat_template, or give prompts and completions",
            )
    return whole, spans


def _written(sample: Sample, tokenizer: Any, messages: list[dict[str, str]], ask: bool) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask) if messages else ""
    except TemplateError as error:  # Mistral's and Gemma's refuse some orders of roles
        raise UserError(f"line {sample.line}: the chat template refuses it: {error}", "mend the line") from None


def _ids(text: str, spans: list[tuple[int, int]], tokenizer: Any) -> tuple[list[int], list[bool]]:
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    learnt = [any(begin < high and low < end for begin, end in spans) for low, high in found["offset_mapping"]]
    return found["input_ids"], learnt


def _adds_bos(tokenizer: Any) -> bool:
    first = tokenizer("a", verbose=False)["input_ids"][:1]
    return tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
