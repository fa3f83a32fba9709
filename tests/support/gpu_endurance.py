"""What a GPU's engines do for long and side by side, on the mock driver and on a real one.

May import numpy, pdscope and support.{gpu,runs}.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.gpu import engine_run, loaded, same
from support.runs import random_ids

from pdscope.engine import Engine


def host_bytes() -> int:
    """Of this process, in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def generations(engine: Engine, n: int) -> None:
    """Each in a session of its own: a prompt of 8 to 31 tokens, then 8 decoded ones."""
    ids = random_ids(engine.info.vocab, 64)
    for i in range(n):
        session = engine.session()
        session.prefill(ids[: 8 + i % 24])
        for token in ids[40:48]:
            session.decode(token)
        session.close()


def growth(plan: Path, n: int, device_bytes: Callable[[], int]) -> tuple[int, int]:
    """Bytes of host and of device memory that n generations behind n / 4 others leave behind."""
    with loaded(plan) as engine:
        generations(engine, n // 4)
        host, device = host_bytes(), device_bytes()
        generations(engine, n)
        return host_bytes() - host, device_bytes() - device


def side_by_side(plans: tuple[Path, Path], beside: Callable[[], None]) -> None:
    """An engine of each, at the same time: every logit is that of a run alone. `beside` is called
    while they run."""
    alone = []
    for plan in plans:
        with loaded(plan) as engine:
            alone.append(engine_run(engine))
    with loaded(plans[0]) as one, loaded(plans[1]) as other, ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            runs = [pool.submit(engine_run, engine) for engine in (one, other)]
            beside()
            for expected, run in zip(alone, runs, strict=True):
                assert same(run.result(), expected)
