"""Numbers and tables as text, without rich: what the commands print must not slow them down.
Imports nothing.
"""

from collections.abc import Iterable, Sequence


def human_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if count < 1024 or unit == "TiB":
            break
    return f"{count:.1f} {unit}"


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values in two columns."""
    listed = list(rows)
    width = max((len(name) for name, _ in listed), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in listed)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns with headings (the first row); all but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        rest = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        return "  ".join([f"{row[0]:<{widths[0]}}", *rest]).rstrip()

    return "\n".join(map(line, rows))


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is the headings, the first column left-aligned."""
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        rest = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        return "| " + " | ".join([f"{row[0]:<{widths[0]}}", *rest]) + " |"

    rule = "| " + " | ".join(["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]) + " |"
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])
