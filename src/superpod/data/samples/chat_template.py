"""Read and check a user's chat template without importing transformers, and store it with the tokenizer."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.data import paths
from superpod.data.tokens.tokenizer import import_package
from superpod.errors import UserError

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser

MAX_BYTES = 1 << 20
FILE = "chat_template.jinja"
"""Name of the template file in a tokenizer folder of transformers."""


def read(path: Path) -> str:
    """Return the text of the chat template file `path`. Raises UserError if transformers could not compile it."""
    paths.check(path, "--chat-template ")
    if not path.is_file():
        raise UserError(
            f"--chat-template {paths.shorten(path)} is not a file",
            "pass a Jinja template file (for example chat.jinja)",
        )
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"--chat-template {paths.shorten(path)} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--chat-template {paths.shorten(path)} is not UTF-8 at byte {error.start}", _EXAMPLE) from None
    if len(content) > MAX_BYTES:
        raise UserError(f"--chat-template {paths.shorten(path)} is longer than {MAX_BYTES >> 20} MiB", _EXAMPLE)
    _check_syntax(text, path)
    return text


_EXAMPLE = "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"


def _check_syntax(text: str, path: Path) -> None:
    """Raise UserError if a template has a syntax error, or does not use `messages`."""
    # The environment is that of _compile_jinja_template in transformers/utils/chat_template_utils.py.
    jinja2, ext = import_package("jinja2"), import_package("jinja2.ext")
    sandbox = import_package("jinja2.sandbox").ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        tags = frozenset({"generation"})

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    try:
        environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"--chat-template {paths.shorten(path)}:{error.lineno}: {error.message}", _EXAMPLE) from None
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, OverflowError) as error:
        raise UserError(f"--chat-template {paths.shorten(path)}: {paths.shorten(error)}", _EXAMPLE) from None
    if not re.search(r"\bmessages\b", text):
        raise UserError(
            f"--chat-template {paths.shorten(path)} does not use `messages`, so all chats would be rendered alike",
            _EXAMPLE,
        )


def marks_answers(template: str) -> bool:
    """Return whether a template marks answers with {% generation %}, by the same pattern as transformers."""
    return bool(re.search(r"\{\%-?\s*generation\s*-?\%\}", template))


def copy_tokenizer_with_template(stored: Path, template: str, out: Path) -> Path:
    """Copy the tokenizer folder `stored` to `out`, with `template` instead of its own, and return `out`."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in stored.iterdir():
        if file.is_file() and not file.name.startswith("chat_template"):
            shutil.copyfile(file, out / file.name)
    settings = out / "tokenizer_config.json"
    if settings.is_file():
        import json

        content = json.loads(settings.read_bytes())
        content.pop("chat_template", None)  # older folders have it here, and it would take precedence
        settings.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (out / FILE).write_text(template, encoding="utf-8")
    return out
