"""What the benchmarks share: this machine's ceilings, memory and caches, spreads of figures, and
reports.

Imported by the scripts next to it; may import pdscope.
"""

import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdscope import config
from pdscope.compiler.build import find_compiler
from pdscope.compiler.pipeline import compiler_sha256
from pdscope.errors import PdscopeError

READ_SECONDS, COMPUTE_SECONDS = 0.3, 0.1  # of one sample
LOAD_BEFORE = os.getloadavg()[0]  # threads that wanted to run, over the last minute


def names(text: str) -> list[str]:
    """Of an option that takes several, with commas between them."""
    return text.split(",")


def count(text: str) -> int:
    """An option's number, 1 or more."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def numbers(text: str) -> list[int]:
    return [count(number) for number in names(text)]


def run(main: Callable[[], None]) -> None:
    """A script's main; its errors as the commands tell theirs."""
    try:
        main()
    except PdscopeError as error:
        sys.exit(f"error: {error}")


@dataclass(frozen=True)
class Sample:
    """What the machine could do at one moment: GB/s and GFLOP/s."""

    read: float
    compute: float


class Ceilings:
    """ceilings.c, running: its threads sleep between measurements, and it keeps `region` bytes."""

    def __init__(self, program: Path, threads: int, region: int) -> None:
        self.region = region
        self._process = subprocess.Popen(
            [program, str(threads), str(region / 2**30)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, mode: str, seconds: float) -> float | None:
        """GB/s (read) or GFLOP/s of one mode of ceilings.c; None where the CPU lacks it."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{mode} {seconds}\n")
        self._process.stdin.flush()
        text = self._process.stdout.readline().strip()
        if not text:
            raise RuntimeError(f"ceilings.c ended at '{mode}', exit status {self._process.wait()}")
        return None if text == "absent" else float(text)

    def best_of(self, modes: Sequence[str]) -> str:
        """The mode with the highest rate."""
        return max(modes, key=lambda mode: self.measure(mode, COMPUTE_SECONDS) or 0)

    def sample(self, compute_mode: str) -> Sample:
        """Both ceilings now; the second by a mode that this CPU has (`fma` is everywhere)."""
        read = self.measure("read", READ_SECONDS)
        compute = self.measure(compute_mode, COMPUTE_SECONDS)
        assert read and compute
        return Sample(read, compute)

    def flush(self) -> None:
        """Reads the region once: caches hold nothing else then."""
        self.measure("read", 0)

    def close(self) -> None:
        self._process.communicate()


@contextmanager
def ceilings(threads: int) -> Iterator[Ceilings]:
    """Builds and starts ceilings.c, over a region of four last-level caches and 2 GiB at least."""
    source = Path(__file__).with_name("ceilings.c")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "ceilings"
        command = [*find_compiler().command, "-O3", "-pthread", "-o", str(program), str(source)]
        subprocess.run(command, check=True)
        tools = Ceilings(program, threads, max(2 << 30, 4 * last_level_cache()))
        try:
            yield tools
        finally:
            tools.close()


def around(before: Sample, after: Sample) -> Sample:
    """The ceilings of what ran between two samples: their means."""
    return Sample((before.read + after.read) / 2, (before.compute + after.compute) / 2)


def plan_folder(name: str) -> Path:
    """Where a benchmark keeps its plan: another place for every state of PDScope's sources, since a
    plan holds the kernels it was compiled with. Removes those of other states."""
    folder = config.cache_dir() / f"{name}-{compiler_sha256()[:12]}"
    for old in folder.parent.glob(f"{name}-" + "[0-9a-f]" * 12):
        if old != folder:
            shutil.rmtree(old)
    return folder


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def _caches() -> dict[str, int]:
    """Bytes of each cache that the first core sees, by its name (L1d, L2, ...), smallest first;
    empty if the system does not say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind = (index / "type").read_text().strip()
        text = (index / "size").read_text().strip()
        size = int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)
        letter = {"Data": "d", "Instruction": "i"}.get(kind, "")
        found[f"L{(index / 'level').read_text().strip()}{letter}"] = size
    return dict(sorted(found.items(), key=lambda item: item[1]))


def last_level_cache() -> int:
    """Bytes of the largest cache that the first core sees; 0 if the system does not say."""
    return max(_caches().values(), default=0)


def available_memory() -> int:
    """Bytes that programs may still take."""
    return _meminfo("MemAvailable")


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def describe() -> dict[str, str]:
    """This machine, for a report: processor, cores, caches, memory, system, compiler, and how
    busy it was when the script began."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    release = ".".join(platform.release().split(".")[:2])
    sizes = {k: f"{n >> 10} KiB" if n < 1 << 20 else f"{n >> 20} MiB" for k, n in _caches().items()}
    return {
        "processor": model,
        "cores": f"{usable_cores()} usable of {os.cpu_count()}",
        "caches": ", ".join(f"{name} {size}" for name, size in sizes.items()) or "not told",
        "memory": f"{_meminfo('MemTotal') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {release}, Python {platform.python_version()}",
        "compiler": find_compiler().name,
        "load average before": f"{LOAD_BEFORE:.1f}",
    }


def write_report(path: Path, title: str, table: str) -> None:
    """A markdown file of one run: the command line, this machine and what the run printed."""
    script = Path(sys.argv[0]).name
    lines = [f"# {title}", "", f"    python benchmarks/{script} {shlex.join(sys.argv[1:])}", ""]
    lines += ["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in describe().items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + f"\n\n```\n{table.rstrip()}\n```\n")


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}
