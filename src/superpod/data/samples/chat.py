"""Convert a sample to token ids and a loss mask, with the chat template of its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from superpod.data.samples import chat_template
from superpod.data.samples.sample_kinds import Message, Sample
from superpod.errors import UserError, counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Chat template for tokenizers that have none. Exports contain it, so that prompts are rendered like in training."""

LEARN = ("answers", "last")
"""Values of `--learn`: train on all assistant messages, or only on the last."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of a sample, with its position. `loss_mask[i]` is true if the prediction of `ids[i]` is in the loss."""

    line: int
    ids: Sequence[int]
    loss_mask: Sequence[bool | int]
    file: str = ""


class BadSampleError(UserError):
    """The chat template cannot render a sample; `reason` is the message without file and line."""

    def __init__(self, sample: Sample, reason: str, hint: str) -> None:
        super().__init__(f"{sample.where}: {reason}", hint)
        self.reason = reason


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face folder, with its own chat template or else `DEFAULT_TEMPLATE`.

    Raises:
        UserError: the tokenizer cannot be loaded, or has no end-of-sequence token or no tokenizer.json (which gives the
            position of each token in the text).
    """
    from superpod.data.tokens import tokenizer

    loaded = tokenizer.load_pretrained(folder)
    if not loaded.is_fast:
        raise UserError(f"the tokenizer of {folder} has no tokenizer.json", "convert it to a fast tokenizer first")
    return prepare_tokenizer(loaded, folder)


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, model: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer with a chat template, `DEFAULT_TEMPLATE` if it has none. Raises UserError if it has no EOS."""
    if len(tokenizer) == 0 or tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {model} has no end-of-sequence token", "set its eos_token")
    tokenizer.chat_template = tokenizer.chat_template or DEFAULT_TEMPLATE
    return tokenizer


def encode_sample(sample: Sample, tokenizer: PreTrainedTokenizerBase, learn: str = LEARN[0]) -> Encoded:
    """Return the token ids and the loss mask of a sample.

    The loss includes the completion of a prompt, all of a plain text, and the assistant messages of a chat with their
    end-of-turn tokens. Texts and completions end with the end-of-sequence token. A token that contains both the end of
    a prompt and the start of its completion is in the loss.

    Args:
        sample: the sample.
        tokenizer: tokenizer with a chat template.
        learn: "answers" for all assistant messages, "last" for only the last one.

    Raises:
        BadSampleError: the template rejects a chat, or the position of an assistant message cannot be determined.
    """
    if sample.messages:
        text, spans = _render_chat(sample, tokenizer, learn)
        ids, loss_mask = _tokenize_text(text, spans, tokenizer)
        return Encoded(sample.line, ids, loss_mask, sample.file)
    ids, loss_mask = _tokenize_text(sample.text, [(sample.prompt, len(sample.text))], tokenizer)
    if _adds_bos(tokenizer):  # chat templates write this token themselves
        ids = [cast("int", tokenizer.bos_token_id), *ids]
        loss_mask = [False, *loss_mask]
    eos = cast("int", tokenizer.eos_token_id)  # `prepare_tokenizer` rejects a tokenizer without one
    return Encoded(sample.line, [*ids, eos], [*loss_mask, True], sample.file)


def _render_chat(sample: Sample, tokenizer: PreTrainedTokenizerBase, learn: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the chat as text, and the character range [begin, end) of each assistant message to train on."""
    answers = [at for at, message in enumerate(sample.messages) if message["role"] == "assistant"]
    trained_messages = [at for at in answers if at not in sample.masked]
    if learn == "last":
        trained_messages = trained_messages[-1:]
    _require_tools_rendered(sample, tokenizer)
    if not chat_template.marks_answers(_get_template(sample, tokenizer)):
        text = _apply_template(sample, tokenizer, sample.messages)
        return text, [_find_message_span(sample, tokenizer, text, at) for at in trained_messages]

    text, marked = _render_marked(sample, tokenizer)
    if len(marked) == len(answers):
        return text, [span for at, span in zip(answers, marked, strict=True) if at in trained_messages]
    if sample.masked or learn == "last" or not marked:
        raise BadSampleError(
            sample,
            f"the chat template marks {counted(len(marked), 'answer')}, but the chat has "
            f"{counted(len(answers), 'assistant message')}",
            "add {% generation %} around the text of each assistant message",
        )
    return text, marked


def _find_message_span(sample: Sample, tokenizer: PreTrainedTokenizerBase, text: str, at: int) -> tuple[int, int]:
    """Return the character range [begin, end) of message `at` in the rendered chat `text`.

    It is found by rendering the chat up to the message, and up to its end; `text` must begin with both. Some templates
    change a message if others follow: Qwen3's, for example, removes its thoughts.

    Raises:
        BadSampleError: `text` does not begin with both.
    """
    text_before = _render_before(sample, tokenizer, text, at)
    text_after = _apply_template(sample, tokenizer, sample.messages[: at + 1])
    if not text.startswith(text_after):
        raise BadSampleError(
            sample,
            f"the chat template changes message {at} if others follow: {_describe_difference(text_after, text)}",
            f"use --learn last to train only on the last answer, {USE_GENERATION_MARKS}",
        )
    if not text_after.startswith(text_before):
        raise BadSampleError(
            sample,
            f"the chat template begins message {at} differently from its generation prompt: "
            f"{_describe_difference(text_before, text)}",
            f"use prompts and completions, another --chat-template, {USE_GENERATION_MARKS}",
        )
    return len(text_before), len(text_after)


def _render_before(sample: Sample, tokenizer: PreTrainedTokenizerBase, text: str, at: int) -> str:
    """Return the rendered chat `text` up to the content of message `at`, including the header of the message."""
    if at:
        return _apply_template(sample, tokenizer, sample.messages[:at], open_answer=True)
    # Many templates reject an empty chat, so the header is derived from a question.
    question = [{"role": "user", "content": "?"}]
    question_text = _apply_template(sample, tokenizer, question)
    header = _apply_template(sample, tokenizer, question, open_answer=True).removeprefix(question_text)
    return text[: text.find(header) + len(header)] if header in text else header


USE_GENERATION_MARKS = "or use a template that marks answers with {% generation %}"


def _describe_difference(one: str, other: str) -> str:
    """Return the first difference between two texts as "'...' becomes '...' (character 12)"."""
    index = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    excerpts = [text[max(0, index - 20) : index + 20] for text in (one, other)]
    return f"{excerpts[0]!r} becomes {excerpts[1]!r} (character {index})"


def _require_tools_rendered(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise BadSampleError if the chat template ignores the tools or a tool call of a chat."""
    calls = [at for at, message in enumerate(sample.messages) if message.get("tool_calls")]
    if not calls and not sample.tools:
        return
    text = _apply_template(sample, tokenizer, sample.messages)
    for at in calls:
        message = {key: value for key, value in sample.messages[at].items() if key != "tool_calls"}
        without_calls = (*sample.messages[:at], message, *sample.messages[at + 1 :])
        if text == _apply_template(sample, tokenizer, without_calls):
            raise BadSampleError(sample, f"the chat template ignores the tool_calls of message {at}", _RENDER_TOOLS)
    if sample.tools and text == _apply_template(sample, tokenizer, sample.messages, tools=()):
        raise BadSampleError(sample, "the chat template ignores the tools", _RENDER_TOOLS)


_RENDER_TOOLS = "write them into the messages, or use --chat-template FILE with a template that renders them"


def _get_template(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template for a sample; some tokenizers have another one for chats with tools."""
    return str(tokenizer.get_chat_template(None, cast("Any", list(sample.tools)) or None))


def _render_marked(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[tuple[int, int]]]:
    """Return the chat as text, and the character ranges that the template encloses in {% generation %}."""
    from transformers.utils.chat_template_utils import render_jinja_template

    with _translate_errors(sample):
        texts, marked = render_jinja_template(
            conversations=[cast("Any", list(sample.messages))],
            tools=cast("Any", list(sample.tools)) or None,
            chat_template=_get_template(sample, tokenizer),
            return_assistant_tokens_mask=True,
            **cast("Any", tokenizer.special_tokens_map),
        )
        texts[0].encode()
    return texts[0], cast("list[tuple[int, int]]", list(marked[0]))


def _apply_template(
    sample: Sample,
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    open_answer: bool = False,
    tools: Sequence[Message] | None = None,
) -> str:
    """Return messages rendered with the chat template.

    Args:
        sample: sample with the tools, named in errors.
        tokenizer: tokenizer with the template.
        messages: the messages to render.
        open_answer: whether to append the header of an assistant message.
        tools: tools to render; None for those of the sample.

    Raises:
        BadSampleError: the template rejects the messages.
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
    """Convert any exception of the chat template, which is a program, to BadSampleError."""
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


def _tokenize_text(
    text: str, spans: list[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a text, and per token whether it overlaps with one of the character ranges `spans`."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False).data
    loss_mask = [any(begin < high and low < end for begin, end in spans) for low, high in encoding["offset_mapping"]]
    return encoding["input_ids"], loss_mask


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    # Tested with a text, because tokenizers store this in different settings.
    first = tokenizer("a", verbose=False).data["input_ids"][:1]
    return tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
