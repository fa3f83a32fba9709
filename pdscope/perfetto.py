"""Instruction traces as Chrome/Perfetto JSON, and their summary as text.

May import numpy and pdscope.observe. One track a queue, one slice an instruction.
"""

import json
import os
from collections.abc import Iterator
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
    try:
        _write_to(Path(os.path.realpath(path)), trace, title)
    except OSError as error:  # of a write, it names no file
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write_to(target: Path, trace: Trace, title: str) -> None:
    if target.exists() and not target.is_file():  # a device or a pipe: not to be replaced
        with target.open("w", encoding="utf-8") as file:
            _write(file, trace, title)
        return
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            _write(file, trace, title)
        os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _write(file: TextIO, trace: Trace, title: str) -> None:
    other = json.dumps({"plan": title, "dropped": trace.dropped})
    file.write(f'{{"displayTimeUnit": "ns", "otherData": {other}, "traceEvents": [\n')
    file.write(",\n".join(json.dumps(event) for event in _events(trace, title)))
    file.write("\n]}\n")


def _events(trace: Trace, title: str) -> Iterator[dict[str, Any]]:
    queues, opcodes = trace.queue_names(), trace.opcode_names()
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"pdscope {title}"}}
    for queue, name in queues.items():
        yield {"ph": "M", "pid": 1, "tid": queue, "name": "thread_name", "args": {"name": name}}
        order = {"sort_index": queue}
        yield {"ph": "M", "pid": 1, "tid": queue, "name": "thread_sort_index", "args": order}
    records = trace.records
    if not len(records):
        return
    origin = int(records["begin_ns"].min())
    for begin, end, size, layer, instr, opcode, queue, rows, experts in records.tolist():
        yield {
            "ph": "X",
            "pid": 1,
            "tid": queue,
            "name": opcodes[opcode] if layer < 0 else f"{opcodes[opcode]} l{layer}",
            "cat": opcodes[opcode],
            "ts": (begin - origin) / 1e3,
            "dur": (end - begin) / 1e3,
            "args": {
                "layer": layer,
                "instr": instr,
                "rows": rows,
                "experts": experts,
                "bytes": size,
            },
        }


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
