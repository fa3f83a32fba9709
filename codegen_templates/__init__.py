"""Renders templates: the C sources of a plan and chat templates. The sole user of jinja2.

May import jinja2 and pdscope.errors. Templates instantiate (constants, tables, loops over data);
they hold no algorithms, and an undefined name in one of ours is an error.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pdscope.errors import InputError


@cache
def _c_environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template_name: str, **variables: object) -> str:
    """The text of one of our templates, e.g. "plan.c.j2". A variable that it misses is
    jinja2.UndefinedError.
    """
    return _c_environment().get_template(template_name).render(**variables)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training masks; for inference its body is plain
    text.
    """

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RaisedByTemplate(Exception):
    """The template itself refused the messages, through raise_exception()."""


def _raise_exception(message: object) -> NoReturn:
    raise _RaisedByTemplate(str(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no chat template wants.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@cache
def _parse(source: str) -> jinja2.Template:
    # A chat template comes with the model, so it is foreign code: the sandbox keeps it from
    # attributes that reach the interpreter and from changing what it is given.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def parse_chat(source: str, where: str = "chat template") -> jinja2.Template:
    """A Hugging Face chat template, parsed. Raises InputError, which names `where`, for one that is
    no jinja template.
    """
    try:
        return _parse(source)
    except Exception as error:  # jinja2's own, and what foreign text makes of Python's parser
        raise InputError(
            f"{where}: is no template that jinja reads ({_reason(error)}): take it from the "
            "model's original repository, or pass the prompt as text, without --chat"
        ) from None


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    where: str = "chat template",
    /,  # `variables` may have these names
    *,
    add_generation_prompt: bool = True,
    **variables: object,
) -> str:
    """The prompt text of a conversation.

    `template` is the source of a Hugging Face chat template, `where` names it in errors, `messages`
    are {"role": ..., "content": ...}, `variables` are what else the template reads (bos_token,
    tools, enable_thinking, ...).
    Raises InputError when the template is broken or refuses the messages.
    """
    parsed = parse_chat(template, where)
    try:
        return parsed.render(
            messages=messages, add_generation_prompt=add_generation_prompt, **variables
        )
    except _RaisedByTemplate as error:
        raise InputError(
            f"{where}: refuses the messages ({_reason(error)}): change them to what it accepts"
        ) from None
    except jinja2.TemplateError as error:
        raise InputError(
            f"{where}: cannot render these messages ({_reason(error)}): pass the prompt as text, "
            "without --chat"
        ) from None
    except Exception as error:  # a template is foreign code: it may divide by zero
        raise InputError(
            f"{where}: cannot render these messages ({type(error).__name__}: {_reason(error)}): "
            "each needs the fields that the template reads, usually 'role' and 'content'"
        ) from None


def _reason(error: Exception) -> str:
    """In one line, of bounded length."""
    line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return " ".join(str(error).split())[:200] + line
