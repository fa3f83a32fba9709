"""Paths on the command line. May import click and pdscope.errors."""

import os
from pathlib import Path
from typing import Any

import click

from pdscope.errors import InputError


class GivenPath(click.Path):
    """A click path that refuses the empty name, which pathlib takes for the current directory."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        if not os.fspath(value):
            name = "the path" if param is None else param.get_error_hint(ctx)
            raise InputError(f"{name} has an empty name; expected a path")
        return super().convert(value, param, ctx)
