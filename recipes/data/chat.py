"""Turn a sample into token ids, and mark those that the model is to learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from superpod.errors import UserError
from superpod.recipes.data.samples import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The chat template for a tokenizer without one. Exported models carry it, so that prompts look as in training."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of a sample; `learnt[i]` is whether the loss counts the prediction of `ids[i]` from those before it."""

    line: int
    ids: list[int]
    learnt: list[bool]


def load(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, with a chat template: its own, or `PLAIN`.

    Raises:
        UserError: none loads, it has no tokenizer.json (only that gives each token's place in the text), or no
            end-of-sequence token.
    """
    from superpod.recipes.data import tokenizer

    loaded = tokenizer.pretrained(folder)
    if not loaded.is_fast:
        raise UserError(f"the tokenizer of {folder} has no tokenizer.json", "save it as a fast tokenizer first")
    return ready(loaded, folder)


def ready(tokenizer: PreTrainedTokenizerBase, whose: str) -> PreTrainedTokenizerBase:
    """The tokenizer, with `PLAIN` as its chat template if it has none. `whose` names it in messages.

    Raises:
        UserError: it has no end-of-sequence token.
    """
    if len(tokenizer) == 0 or tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {whose} has no end-of-sequence token", "set its eos_token")
    tokenizer.chat_template = tokenizer.chat_template or PLAIN
    return tokenizer


def encode(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """Token ids of a sample, and which of them are learnt.

    A prompt teaches its completion, a chat the assistant's turns with the tokens that end them, plain text everything.
    Text and completions end with the end-of-sequence token. A token that spans the end of the prompt and the start of
    the completion is learnt.
    """
    if sample.messages:
        text, spans = _render(sample, tokenizer)
        ids, learnt = _ids(text, spans, tokenizer)
        return Encoded(sample.line, ids, learnt)
    ids, learnt = _ids(sample.text, [(sample.prompt, len(sample.text))], tokenizer)
    # A chat template writes this token itself.
    begin = [cast("int", tokenizer.bos_token_id)] if _adds_bos(tokenizer) else []
    end = cast("int", tokenizer.eos_token_id)  # `ready` refuses a tokenizer without one
    return Encoded(sample.line, [*begin, *ids, end], [False for _ in begin] + [*learnt, True])


def _render(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[tuple[int, int]]]:
    """The whole chat as text, and [begin, end) in characters of each assistant turn in it.

    A turn lies between the chat rendered up to it and rendered just past it, both of which begin the whole. A template
    may rewrite a turn once another follows (Qwen3 drops earlier thoughts); such a chat teaches its last answer only.
    """
    messages = list(sample.messages)
    whole = _apply_template(sample, tokenizer, messages, False)
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    spans = []
    for at in answers:
        before = _apply_template(sample, tokenizer, messages[:at], True)
        after = _apply_template(sample, tokenizer, messages[: at + 1], False)
        if whole.startswith(before) and whole.startswith(after):
            spans.append((len(before), len(after)))
        elif at == answers[-1]:
            raise UserError(
                f"line {sample.line}: the tokenizer's chat template does not begin answers with its generation prompt",
                "fix chat_template, or give prompts and completions",
            )
    return whole, spans


def _apply_template(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], open_answer: bool
) -> str:
    """The messages as the model sees them; with `open_answer`, up to where the assistant's next turn begins."""
    from jinja2 import TemplateError

    if not messages:
        return ""
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_answer)
        return str(text)
    except TemplateError as error:  # Mistral's and Gemma's refuse some orders of roles
        raise UserError(f"line {sample.line}: the chat template refuses it: {error}", "fix the line") from None


def _ids(text: str, spans: list[tuple[int, int]], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Token ids of a text, and for each whether it overlaps one of the spans."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False).data
    learnt = [any(begin < high and low < end for begin, end in spans) for low, high in encoding["offset_mapping"]]
    return encoding["input_ids"], learnt


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    # Found by trying: tokenizers keep this in different settings.
    first = tokenizer("a", verbose=False).data["input_ids"][:1]
    return tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
