"""Compiled plans that many tests share: each is compiled once per test run."""

import fcntl
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class PlanStore:
    """Plans by name under one folder that all test processes of a run share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def once(self, key: str, make: Callable[[Path], object]) -> Path:
        """The directory that `make` filled; it is called once per key and run, with that path."""
        target = self.folder / key
        with (self.folder / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (self.folder / f"{key}.done").exists():
                make(target)
                (self.folder / f"{key}.done").touch()
        return target

    def compile(self, model: Path, **options: Any) -> Path:
        """The plan of a model directory with these compile options."""
        import pdscope

        self.once("runtime.so", build_runtime)
        text = json.dumps([str(model), sorted(options.items())])
        key = f"{model.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        return self.once(key, lambda out: pdscope.compile(model, out, **options))


def build_runtime(out: Path) -> None:
    """Fills the cache with the runtime's objects: two processes that compile their first plans at
    once would each build all of them."""
    from pdscope.compiler import build

    plan_c = '#include "plan_desc.h"\nconst pds_plan pds_the_plan = {.plan_hash = "none"};\n'
    build.build_library(plan_c, out, build.available_isa_paths(build.machine()))


def small_gpu_plan(plans: PlanStore) -> Path:
    """Of the bundled model, for a GPU with some resident experts and a ring of slots."""
    from support.assets import BUNDLED

    return plans.compile(
        BUNDLED / "tiny-mixtral",
        dtype="bf16",
        max_context=512,
        gpu_mem="29MB",
        gpu_reserve=0,
        costs="h200-emr16",
    )
