"""Convert a sample to token ids and a loss mask."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from superpod.data.samples import chat_template
from superpod.data.samples.sample_kinds import Message, Sample
from superpod.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Chat template for tokenizers that have none. Exported models contain it, so that prompts look as in training."""

LEARN = ("answers", "last")
"""Values of `--learn`: train on all turns of the assistant, or only on the last."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of a sample; `loss_mask[i]` is whether the prediction of `ids[i]` counts in the loss."""

    line: int
    ids: Sequence[int]
    loss_mask: Sequence[bool | int]
    file: str = ""


class BadSampleError(UserError):
    """The chat template of the tokenizer cannot render a sample; `reason` is the message without file and line."""

    def __init__(self, sample: Sample, reason: str, hint: str) -> None:
        super().__init__(f"{sample.where}: {reason}", hint)
        self.reason = reason


def load(folder: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face folder, with its own chat template or `PLAIN`.

    Raises:
        UserError: the tokenizer cannot be loaded, has no end-of-sequence token, or has no tokenizer.json, which is
            needed to find the position of each token in the text.
    """
    from superpod.data.tokens import tokenizer

    loaded = tokenizer.load_pretrained(folder)
    if not loaded.is_fast:
        raise UserError(f"the tokenizer of {folder} has no tokenizer.json", "convert it to a fast tokenizer first")
    return prepare(loaded, folder)


def prepare(tokenizer: PreTrainedTokenizerBase, whose: str) -> PreTrainedTokenizerBase:
    """Set `PLAIN` as the chat template of a tokenizer that has none. `whose` is its name for messages.

    Raises:
        UserError: the tokenizer has no end-of-sequence token.
    """
    if len(tokenizer) == 0 or tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {whose} has no end-of-sequence token", "set its eos_token")
    tokenizer.chat_template = tokenizer.chat_template or PLAIN
    return tokenizer


def encode(sample: Sample, tokenizer: PreTrainedTokenizerBase, learn: str = LEARN[0]) -> Encoded:
    """Return the token ids and the loss mask of a sample.

    The loss counts the completion of a prompt, all of a plain text, and the turns of the assistant in a chat (only the
    last turn if `learn` is "last"), including the tokens that end a turn. Texts and completions end with the
    end-of-sequence token. A token that contains the end of a prompt and the start of its completion counts, too.

    Raises:
        BadSampleError: the template rejects a chat, or the positions of the answers cannot be determined.
    """
    if sample.messages:
        text, spans = _render(sample, tokenizer, learn)
        ids, loss_mask = _tokenize(text, spans, tokenizer)
        return Encoded(sample.line, ids, loss_mask, sample.file)
    ids, loss_mask = _tokenize(sample.text, [(sample.prompt, len(sample.text))], tokenizer)
    if _adds_bos(tokenizer):  # chat templates write this token themselves
        ids = [cast("int", tokenizer.bos_token_id), *ids]
        loss_mask = [False, *loss_mask]
    eos = cast("int", tokenizer.eos_token_id)  # `prepare` rejects a tokenizer without one
    return Encoded(sample.line, [*ids, eos], [*loss_mask, True], sample.file)


def _render(sample: Sample, tokenizer: PreTrainedTokenizerBase, learn: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the chat as text, and the character range [begin, end) of each turn to train on."""
    answers = [at for at, message in enumerate(sample.messages) if message["role"] == "assistant"]
    trained_turns = [at for at in answers if at not in sample.masked]
    if learn == "last":
        trained_turns = trained_turns[-1:]
    _require_tools_rendered(sample, tokenizer)
    if not chat_template.marks_answers(_template(sample, tokenizer)):
        text = _apply(sample, tokenizer, sample.messages)
        return text, [_find_span(sample, tokenizer, text, at) for at in trained_turns]

    text, marked = _render_marked(sample, tokenizer)
    if len(marked) == len(answers):
        return text, [span for at, span in zip(answers, marked, strict=True) if at in trained_turns]
    if sample.masked or learn == "last" or not marked:
        raise BadSampleError(
            sample,
            f"the chat template marks {len(marked)} parts as answers, but the chat has {len(answers)} messages of the "
            "assistant",
            "add {% generation %} around the text of each message of the assistant",
        )
    return text, marked


def _find_span(sample: Sample, tokenizer: PreTrainedTokenizerBase, text: str, at: int) -> tuple[int, int]:
    """Return the character range of message `at`, from chats that end before and after it.

    The rendered chat must begin with both of these. Some templates change a turn once others follow, for example
    Qwen3's, which removes thoughts.
    """
    text_before = _text_before(sample, tokenizer, text, at)
    text_after = _apply(sample, tokenizer, sample.messages[: at + 1])
    if not text.startswith(text_after):
        raise BadSampleError(
            sample,
            f"the chat template changes message {at} if others follow: {_difference(text_after, text)}",
            f"use --learn last to train on the last answer only; {MARKS}",
        )
    if not text_after.startswith(text_before):
        raise BadSampleError(
            sample,
            f"in the chat template, answers do not begin with its generation prompt, message {at}: "
            f"{_difference(text_before, text)}",
            f"use prompts and completions, or --chat-template FILE; {MARKS}",
        )
    return len(text_before), len(text_after)


def _text_before(sample: Sample, tokenizer: PreTrainedTokenizerBase, text: str, at: int) -> str:
    """Return the chat up to the content of message `at`, including the header of the message."""
    if at:
        return _apply(sample, tokenizer, sample.messages[:at], open_answer=True)
    # Many templates reject an empty chat, so the header is derived from a question.
    question = [{"role": "user", "content": "?"}]
    question_text = _apply(sample, tokenizer, question)
    header = _apply(sample, tokenizer, question, open_answer=True).removeprefix(question_text)
    return text[: text.find(header) + len(header)] if header in text else header


MARKS = "or use a template that marks answers with {% generation %}"


def _difference(one: str, other: str) -> str:
    """Return the first difference between two texts, for a message."""
    index = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    excerpts = [text[max(0, index - 20) : index + 20] for text in (one, other)]
    return f"{excerpts[0]!r} becomes {excerpts[1]!r} (character {index})"


def _require_tools_rendered(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> None:
    """Require that the template renders the tools and tool calls of a chat. Raises BadSampleError."""
    calls = [at for at, message in enumerate(sample.messages) if message.get("tool_calls")]
    if not calls and not sample.tools:
        return
    text = _apply(sample, tokenizer, sample.messages)
    for at in calls:
        message = {key: value for key, value in sample.messages[at].items() if key != "tool_calls"}
        without_calls = (*sample.messages[:at], message, *sample.messages[at + 1 :])
        if text == _apply(sample, tokenizer, without_calls):
            raise BadSampleError(sample, f"the chat template ignores the tool_calls of message {at}", TOOLS)
    if sample.tools and text == _apply(sample, tokenizer, sample.messages, tools=()):
        raise BadSampleError(sample, "the chat template ignores the tools", TOOLS)


TOOLS = "write them into the messages, or use --chat-template FILE with a template that renders them"


def _template(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the template for this chat; some tokenizers have a separate one for chats with tools."""
    return str(tokenizer.get_chat_template(None, cast("Any", list(sample.tools)) or None))


def _render_marked(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[tuple[int, int]]]:
    """Return the chat as text, and the character ranges between the template's generation marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    with _translate_errors(sample):
        texts, marked = render_jinja_template(
            conversations=[cast("Any", list(sample.messages))],
            tools=cast("Any", list(sample.tools)) or None,
            chat_template=_template(sample, tokenizer),
            return_assistant_tokens_mask=True,
            **cast("Any", tokenizer.special_tokens_map),
        )
        texts[0].encode()
    return texts[0], cast("list[tuple[int, int]]", list(marked[0]))


def _apply(
    sample: Sample,
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    open_answer: bool = False,
    tools: Sequence[Message] | None = None,
) -> str:
    """Render messages with the chat template.

    Args:
        sample: for error messages and tools.
        tokenizer: has the template.
        messages: the messages to render.
        open_answer: append the header of the next turn of the assistant.
        tools: None for those of the sample.
    """
    tools_or_none = list(sample.tools if tools is None else tools) or None
    with _translate_errors(sample):
        text = str(
            tokenizer.apply_chat_template(
                cast("Any", list(messages)),
                cast("Any", tools_or_none),
                tokenize=False,
                add_generation_prompt=open_answer,
            )
        )
        text.encode()
    return text


@contextmanager
def _translate_errors(sample: Sample) -> Iterator[None]:
    """Convert errors of a template to BadSampleError. A template is a program, and may raise any exception."""
    try:
        yield
    except UnicodeEncodeError:
        raise BadSampleError(
            sample, "contains an unpaired surrogate, which is not a character", "fix the line"
        ) from None
    except Exception as error:  # for example, Mistral's and Gemma's templates reject some orders of roles
        reason = re.sub(r"\s+", " ", str(error))[:200] or type(error).__name__
        raise BadSampleError(
            sample, f"the chat template rejects it: {reason}", "fix the line or the template"
        ) from None


def _tokenize(
    text: str, spans: list[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a text, and for each whether it overlaps with one of the character ranges."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False).data
    loss_mask = [any(begin < high and low < end for begin, end in spans) for low, high in encoding["offset_mapping"]]
    return encoding["input_ids"], loss_mask


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    # Tested with a text, because tokenizers store this in different settings.
    first = tokenizer("a", verbose=False).data["input_ids"][:1]
    return tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
