"""A simulated run as Chrome/Perfetto JSON: the driver's instructions, kernels, and both directions
of the link.

May import pdscope.{errors,perfetto} and pdscope.compiler.simulate.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdscope.compiler.simulate.executor import Executor
from pdscope.perfetto import header, slice_event, write_events

DRIVER, CPU, COMPUTE, H2D, D2H = 1, 2, 3, 4, 5
_TRACKS = {
    DRIVER: "driver",
    CPU: "cpu",
    COMPUTE: "gpu0 compute",
    H2D: "link to the GPU",
    D2H: "link to the host",
}
_TRACK_OF = {"compute": COMPUTE, "h2d": H2D, "d2h": D2H}


def write_timeline(executor: Executor, path: str | Path, title: str) -> None:
    """Writes what an executor kept. Raises OSError, which names the file."""
    write_events(path, _events(executor, title), {"plan": title, "simulated": True})


def _events(executor: Executor, title: str) -> Iterator[dict[str, Any]]:
    yield from header(f"pdscope {title} (simulated)", _TRACKS)
    for instr in executor.instrs or ():
        yield slice_event(
            CPU if instr.queue.text == "cpu" else DRIVER,
            instr.opcode.text if instr.layer < 0 else f"{instr.opcode.text} l{instr.layer}",
            instr.opcode.text,
            instr.begin,
            instr.end,
            {
                "layer": instr.layer,
                "instr": instr.index,
                "rows": instr.rows,
                "experts": instr.experts,
                **instr.decision,
            },
        )
    for span in executor.gpu.spans or ():
        name = span.name if span.layer < 0 else f"{span.name} l{span.layer}"
        args = {"layer": span.layer, "bytes": span.size}
        yield slice_event(
            _TRACK_OF[span.track], name, span.name.split()[0], span.begin, span.end, args
        )
