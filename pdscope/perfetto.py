"""Instruction traces as Chrome/Perfetto JSON, and their summary as text.

May import numpy and pdscope.observe. One track a queue, one slice an instruction.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from pdscope.observe import Trace


def write_trace(trace: Trace, path: str | Path, title: str) -> None:
    """Writes a trace that ui.perfetto.dev and chrome://tracing open. Raises OSError, which
    names the file.

    Slices carry layer (-1: prologue or epilogue), instruction index, rows, distinct experts and
    weight bytes read; times are microseconds from the first instruction.
    """
    write_events(path, _events(trace, title), {"plan": title, "dropped": trace.dropped})


def write_events(
    path: str | Path, events: Iterable[dict[str, Any]], about: Mapping[str, Any]
) -> None:
    """Writes a file of events (see header, slice_event). Raises OSError, which names the file."""
    try:
        _write_to(Path(os.path.realpath(path)), events, about)
    except OSError as error:  # of a write, it names no file
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write_to(target: Path, events: Iterable[dict[str, Any]], about: Mapping[str, Any]) -> None:
    if target.exists() and not target.is_file():  # a device or a pipe: not to be replaced
        with target.open("w", encoding="utf-8") as file:
            _write(file, events, about)
        return
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            _write(file, events, about)
        os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _write(file: TextIO, events: Iterable[dict[str, Any]], about: Mapping[str, Any]) -> None:
    other = json.dumps(about)
    file.write(f'{{"displayTimeUnit": "ns", "otherData": {other}, "traceEvents": [\n')
    for i, event in enumerate(events):
        file.write((",\n" if i else "") + json.dumps(event))
    file.write("\n]}\n")


def header(process: str, tracks: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Names of the process and its tracks, in the order of their numbers."""
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": process}}
    for track, name in tracks.items():
        yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}}
        order = {"sort_index": track}
        yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_sort_index", "args": order}


def slice_event(
    track: int, name: str, category: str, begin_ns: int, end_ns: int, args: Mapping[str, Any]
) -> dict[str, Any]:
    """Something that took time."""
    return {
        "ph": "X",
        "pid": 1,
        "tid": track,
        "name": name,
        "cat": category,
        "ts": begin_ns / 1e3,
        "dur": (end_ns - begin_ns) / 1e3,
        "args": dict(args),
    }


def _events(trace: Trace, title: str) -> Iterator[dict[str, Any]]:
    opcodes = trace.opcode_names()
    yield from header(f"pdscope {title}", trace.queue_names())
    records = trace.records
    if not len(records):
        return
    origin = int(records["begin_ns"].min())
    for begin, end, size, layer, instr, opcode, queue, rows, experts in records.tolist():
        name = opcodes[opcode]
        yield slice_event(
            queue,
            name if layer < 0 else f"{name} l{layer}",
            name,
            begin - origin,
            end - origin,
            {"layer": layer, "instr": instr, "rows": rows, "experts": experts, "bytes": size},
        )


def summary(trace: Trace) -> list[tuple[str, ...]]:
    """A table, headings first: by opcode, how often, how long, and the weight bytes read a
    second.
    """
    records, names = trace.records, trace.opcode_names()
    rows: list[tuple[str, ...]] = [("instruction", "count", "total ms", "mean us", "share", "GB/s")]
    spent = (records["end_ns"] - records["begin_ns"]).astype(np.float64)
    for i in range(1, len(records)):  # one job for two instructions: shared out by bytes
        pair = records[i - 1 : i + 1]
        if spent[i] and all(pair[k][0] == pair[k][1] for k in ("begin_ns", "end_ns")):
            spent[i - 1 : i + 1] *= pair["bytes"] / max(1, pair["bytes"].sum())
    whole = spent.sum() or 1.0
    totals = {code: spent[records["opcode"] == code] for code in names}
    for code, times in sorted(totals.items(), key=lambda item: -item[1].sum()):
        total, count = float(times.sum()), len(times)
        size = int(records["bytes"][records["opcode"] == code].sum())
        rows.append(
            (
                names[code],
                str(count),
                f"{total / 1e6:.2f}",
                f"{total / 1e3 / count:.1f}",
                f"{total / whole:.1%}",
                f"{size / total:.1f}" if size and total else "-",
            )
        )
    return rows
