"""What the benchmarks share: this machine's ceilings, memory and caches, and spreads of figures.

Imported by the scripts next to it; may import pdscope.
"""

import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pdscope import config
from pdscope.compiler.build import find_compiler
from pdscope.compiler.pipeline import compiler_sha256


class Ceilings:
    """ceilings.c, built: `measure(mode)` in GB/s (read) or GFLOP/s, None where the CPU lacks it."""

    def __init__(self, program: Path, threads: int, seconds: float) -> None:
        self.program, self.threads, self.seconds = program, threads, seconds

    def measure(self, mode: str, read_bytes: int = 2 << 30) -> float | None:
        """read_bytes: size of the region that `read` goes over."""
        command = [self.program, mode, str(self.threads), str(self.seconds)]
        command.append(str(read_bytes / 2**30))
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        text = done.stdout.strip()
        return None if text == "absent" else float(text)


@contextmanager
def ceilings(threads: int, seconds: float = 1.0) -> Iterator[Ceilings]:
    source = Path(__file__).with_name("ceilings.c")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "ceilings"
        command = [*find_compiler().command, "-O3", "-pthread", "-o", program, source]
        subprocess.run(command, check=True)
        yield Ceilings(program, threads, seconds)


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


def last_level_cache() -> int:
    """Bytes of the largest cache that the first core sees; 0 if the system does not say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text))
    return max(sizes)


def available_memory() -> int:
    """Bytes that programs may still take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}
