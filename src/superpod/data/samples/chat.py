"""Turn a sample into token ids, and mark those that the model is to learn."""

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
"""The chat template for a tokenizer without one. Exported models carry it, so that prompts look as in training."""

LEARN = ("answers", "last")
"""Which turns of a chat are learnt: all of the assistant's, or only the last."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of a sample; `learnt[i]` is whether the loss counts the prediction of `ids[i]` from those before it."""

    line: int
    ids: Sequence[int]
    learnt: Sequence[bool | int]
    file: str = ""


class BadSample(UserError):
    """A sample that the tokenizer's chat template cannot write; `reason` is without file and line."""

    def __init__(self, sample: Sample, reason: str, hint: str) -> None:
        super().__init__(f"{sample.where}: {reason}", hint)
        self.reason = reason


def load(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, with a chat template: its own, or `PLAIN`.

    Raises:
        UserError: none loads, it has no tokenizer.json (only that gives each token's place in the text), or no
            end-of-sequence token.
    """
    from superpod.data.tokens import tokenizer

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


def encode(sample: Sample, tokenizer: PreTrainedTokenizerBase, learn: str = LEARN[0]) -> Encoded:
    """Token ids of a sample, and which of them are learnt.

    A prompt teaches its completion, plain text everything, a chat the assistant's turns (with `learn` "last", the last
    one) with the tokens that end them. Text and completions end with the end-of-sequence token. A token that spans the
    end of the prompt and the start of the completion is learnt.

    Raises:
        BadSample: a chat that the template refuses, or of which it does not say where the answers are.
    """
    if sample.messages:
        text, spans = _render(sample, tokenizer, learn)
        ids, learnt = _ids(text, spans, tokenizer)
        return Encoded(sample.line, ids, learnt, sample.file)
    ids, learnt = _ids(sample.text, [(sample.prompt, len(sample.text))], tokenizer)
    # A chat template writes this token itself.
    begin = [cast("int", tokenizer.bos_token_id)] if _adds_bos(tokenizer) else []
    end = cast("int", tokenizer.eos_token_id)  # `ready` refuses a tokenizer without one
    return Encoded(sample.line, [*begin, *ids, end], [False for _ in begin] + [*learnt, True], sample.file)


def _render(sample: Sample, tokenizer: PreTrainedTokenizerBase, learn: str) -> tuple[str, list[tuple[int, int]]]:
    """The whole chat as text, and [begin, end) in characters of each turn in it that is learnt."""
    answers = [at for at, message in enumerate(sample.messages) if message["role"] == "assistant"]
    learnt = [at for at in answers if at not in sample.muted][-1 if learn == "last" else 0 :]
    _refuse_lost_tools(sample, tokenizer)
    if chat_template.marks_answers(_template(sample, tokenizer)):
        whole, marked = _marked(sample, tokenizer)
        if len(marked) == len(answers):
            spans = [span for at, span in zip(answers, marked, strict=True) if at in learnt]
        elif sample.muted or learn == "last" or not marked:
            raise BadSample(
                sample,
                f"the chat template marks {len(marked)} parts as the assistant's, and the chat has {len(answers)} "
                "messages of the assistant",
                "write {% generation %} around what each message of the assistant adds",
            )
        else:
            spans = marked
        return whole, spans
    whole = _apply(sample, tokenizer, sample.messages)
    return whole, [_span(sample, tokenizer, whole, at) for at in learnt]


def _span(sample: Sample, tokenizer: PreTrainedTokenizerBase, whole: str, at: int) -> tuple[int, int]:
    """Where message `at` stands in the chat: between the chat rendered up to it, and just past it.

    Both must begin the whole. A template may rewrite a turn once others follow, as Qwen3 does with thoughts.
    """
    before = _before(sample, tokenizer, whole, at)
    after = _apply(sample, tokenizer, sample.messages[: at + 1])
    if not whole.startswith(after):
        raise BadSample(
            sample,
            f"the chat template writes message {at} differently once others follow: {_difference(after, whole)}",
            f"--learn last learns the last answer only; {MARKS}",
        )
    if not after.startswith(before):
        raise BadSample(
            sample,
            f"the chat template does not begin answers with its generation prompt, message {at}: "
            f"{_difference(before, whole)}",
            f"give prompts and completions, or --chat-template FILE; {MARKS}",
        )
    return len(before), len(after)


def _before(sample: Sample, tokenizer: PreTrainedTokenizerBase, whole: str, at: int) -> str:
    """The chat up to where message `at` begins, its header included: the model is given that, and does not learn it."""
    if at:
        return _apply(sample, tokenizer, sample.messages[:at], open_answer=True)
    # Many templates refuse a chat without messages, so that the header is read off a question.
    question = [{"role": "user", "content": "?"}]
    asked = _apply(sample, tokenizer, question)
    header = _apply(sample, tokenizer, question, open_answer=True).removeprefix(asked)
    return whole[: whole.find(header) + len(header)] if header in whole else header


MARKS = "a template that marks answers with {% generation %} says itself what is learnt"


def _difference(one: str, other: str) -> str:
    """Where two texts part, with what stands around it."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    around = [text[max(0, at - 20) : at + 20] for text in (one, other)]
    return f"{around[0]!r} becomes {around[1]!r} (character {at})"


def _refuse_lost_tools(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> None:
    """BadSample where the template writes nothing of the tools, or of the calls, that a chat has."""
    called = [at for at, message in enumerate(sample.messages) if message.get("tool_calls")]
    if not called and not sample.tools:
        return
    whole = _apply(sample, tokenizer, sample.messages)
    for at in called:
        message = {key: value for key, value in sample.messages[at].items() if key != "tool_calls"}
        without = (*sample.messages[:at], message, *sample.messages[at + 1 :])
        if whole == _apply(sample, tokenizer, without):
            raise BadSample(sample, f"the chat template leaves out the tool_calls of message {at}", TOOLS)
    if sample.tools and whole == _apply(sample, tokenizer, sample.messages, tools=()):
        raise BadSample(sample, "the chat template leaves out the tools", TOOLS)


TOOLS = "write them into the messages, or give --chat-template FILE that takes them"


def _template(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of the template that this chat is written with: some tokenizers have another one for tools."""
    return str(tokenizer.get_chat_template(None, cast("Any", list(sample.tools)) or None))


def _marked(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[tuple[int, int]]]:
    """The chat as text, and what lies between the template's generation marks, as transformers has it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    with _explained(sample):
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
    """The messages as the model sees them; with `open_answer`, up to where the assistant's next turn begins.

    `tools` None: the sample's.
    """
    given = list(sample.tools if tools is None else tools) or None
    with _explained(sample):
        text = str(
            tokenizer.apply_chat_template(
                cast("Any", list(messages)), cast("Any", given), tokenize=False, add_generation_prompt=open_answer
            )
        )
        text.encode()
    return text


@contextmanager
def _explained(sample: Sample) -> Iterator[None]:
    """A template is a program of its author's, and a sample may be what that did not think of."""
    try:
        yield
    except UnicodeEncodeError:
        raise BadSample(sample, "holds half a surrogate pair, which is not a character", "fix the line") from None
    except Exception as error:  # what a template raises is open: Mistral's and Gemma's refuse some orders of roles
        reason = re.sub(r"\s+", " ", str(error))[:200] or type(error).__name__
        raise BadSample(sample, f"the chat template refuses it: {reason}", "fix the line, or the template") from None


def _ids(text: str, spans: list[tuple[int, int]], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Token ids of a text, and for each whether it overlaps one of the spans."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False).data
    learnt = [any(begin < high and low < end for begin, end in spans) for low, high in encoding["offset_mapping"]]
    return encoding["input_ids"], learnt


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    # Found by trying: tokenizers keep this in different settings.
    first = tokenizer("a", verbose=False).data["input_ids"][:1]
    return tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
