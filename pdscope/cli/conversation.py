"""The conversation of `pdscope-run --chat` on a terminal."""

import sys
from typing import TYPE_CHECKING, Any

import click

from pdscope.errors import BudgetError

if TYPE_CHECKING:
    from pdscope.engine import Engine


def converse(engine: "Engine", system: str | None, options: dict[str, Any]) -> None:
    """Reads lines and answers them until end of input. Ctrl-C ends an answer, or the
    conversation.
    """
    from pdscope.cli.run import speeds

    try:
        import readline  # noqa: F401  line editing for input()
    except ImportError:
        pass
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    click.echo("Ctrl-C ends an answer, /clear forgets, Ctrl-D leaves.", err=True)
    while True:
        try:
            line = input("> ").strip()
            line.encode("utf-8")  # in the C locale Python lets foreign bytes in, as surrogates
        except UnicodeError:
            click.echo("error: the line is not valid UTF-8: type it again", err=True)
            continue
        except EOFError:
            click.echo(err=True)
            return
        if line == "/clear":
            messages = list(start)
        if not line or line == "/clear":
            continue
        messages.append({"role": "user", "content": line})
        try:
            # The shared beginning of the conversation is in the KV already.
            stream = engine.generate(messages, stream=True, reuse_prefix=True, **options)
        except BudgetError as error:
            click.echo(f"error: {error}; or forget it with /clear", err=True)
            messages.pop()
            continue
        answer: list[str] = []
        try:
            for piece in stream:
                answer.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            stream.close()
        sys.stdout.write("\n")
        if stream.completion is not None:
            click.echo(speeds(stream.completion), err=True)
        messages.append({"role": "assistant", "content": "".join(answer)})
