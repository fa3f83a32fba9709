"""The online learner beside an engine: the tokens that steps keep, and a background thread of
lowest priority. Steps never wait for it, and their results do not depend on it.

May import numpy and pdscope.{errors,learner,learner_nets,native,plan,predictors}.
"""

import json
import os
import sys
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from pdscope.errors import PdscopeError
from pdscope.learner import INTERVAL, KEPT, SHIFT, THRESHOLD, Key, Learner
from pdscope.learner_nets import Rows
from pdscope.native import PDS_ERR_BUSY, EngineHandle, ffi
from pdscope.plan import Plan
from pdscope.predictors import JSON, PHASES, Chosen, Net


class EngineSource:
    """The tokens that an engine's steps keep; switches the keeping on."""

    def __init__(self, handle: EngineHandle, plan: Plan, keys: Iterable[Key]) -> None:
        """keys: the nets; tokens of both phases are kept for each layer. BudgetError: no memory."""
        self._handle = handle
        self._hidden, self._k = int(plan.model["hidden"]), int(plan.model["top_k"])
        self._experts = int(plan.model["experts"])
        wanted = bytearray(int(plan.model["layers"]))
        for layer, _ in keys:
            wanted[layer] = 1
        self._lib = handle.library.lib
        given = ffi().from_buffer("uint8_t[]", wanted)
        handle.library.check(self._lib.pds_engine_set_learner(handle.pointer, given))

    def total(self, layer: int, phase: str) -> int:
        asked = self._asked(layer, phase)
        self._handle.library.check(self._lib.pds_engine_read_learned(self._handle.pointer, asked))
        return int(asked.total)

    def read(self, layer: int, phase: str) -> tuple[Rows, int] | None:
        n, k = KEPT[phase], self._k
        a = np.empty((n, self._hidden), np.uint16)
        w = np.empty((n, k), np.float32)
        scores = np.empty((n, self._experts), np.float32)
        ids = {name: np.empty((n, k), np.int32) for name in ("e", "prev", "prev_next", "target")}
        asked = self._asked(layer, phase)
        asked.a = ffi().from_buffer("uint16_t[]", a)
        asked.w = ffi().from_buffer("float[]", w)
        asked.scores = ffi().from_buffer("float[]", scores)
        for name, array in ids.items():
            setattr(asked, name, ffi().from_buffer("int32_t[]", array))
        status = self._lib.pds_engine_read_learned(self._handle.pointer, asked)
        if status == PDS_ERR_BUSY:
            return None
        self._handle.library.check(status)
        x = (a.astype(np.uint32) << 16).view(np.float32)
        return Rows(x, w, scores=scores, **ids).take(slice(0, int(asked.n))), int(asked.total)

    def swap(self, layer: int, phase: str, net: Net) -> None:
        net.set(self._handle, layer, phase)

    def bytes(self) -> int:
        """Of memory that the tokens take."""
        info = ffi().new("pds_engine_info *")
        self._handle.library.check(self._lib.pds_engine_get_info(self._handle.pointer, info))
        return int(info.learner_bytes)

    @staticmethod
    def _asked(layer: int, phase: str) -> Any:
        return ffi().new("pds_learned *", {"layer": layer, "phase": PHASES.index(phase)})


class LearnerThread:
    """Runs a learner in the background until stop()."""

    def __init__(self, learner: Learner, interval: float = INTERVAL) -> None:
        self.learner = learner
        self.fault: str | None = None  # what ended it
        self._pid = os.getpid()
        self._interval = interval
        self._stop = threading.Event()
        # A daemon: what stops it at exit runs after Python has waited for all others.
        self._thread = threading.Thread(target=self._run, name="pdscope-learner", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while not self._stop.wait(self._interval):
            try:
                self.learner.poll(self._stop.is_set)
            except (PdscopeError, MemoryError) as error:
                self.fault = str(error) or "out of memory"
                return

    def stop(self) -> None:
        """Ends it, within a step of training; may be called again, and in a child process."""
        self._stop.set()
        # A garbage collection may call this in the thread itself.
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join()


def input_layers(plan: Plan, keys: Iterable[Key]) -> list[int]:
    """Of the layers that have a net: those of the input group, or the first where the model has no
    such group."""
    groups = {entry["layer"]: entry.get("group") for entry in _entries(plan)}
    layers = sorted({layer for layer, _ in keys})
    return [layer for layer in layers if groups.get(layer) == "input"] or layers[:1]


def thresholds(plan: Plan, layers: Collection[int]) -> dict[str, float]:
    """For each phase an error that says that the text is another one than the plan's nets of these
    layers were trained for: THRESHOLD, or SHIFT times what they missed of its validation split
    where that is less and the plan has the figure."""
    made = {}
    entries = [entry for entry in _entries(plan) if entry["layer"] in layers]
    for phase in PHASES:
        hits = [entry.get("hit") for entry in entries if entry["phase"] == phase]
        known = [1 - hit for hit in hits if isinstance(hit, float | int) and 0 <= hit <= 1]
        made[phase] = min(THRESHOLD, SHIFT * float(np.mean(known))) if known else THRESHOLD
    return made


def _entries(plan: Plan) -> list[dict[str, Any]]:
    data: dict[str, Any] = json.loads((plan.path / JSON).read_text(encoding="utf-8"))
    entries: list[dict[str, Any]] = data["layers"]
    return entries


class EngineLearner:
    """The learner of one engine: on or off, and why."""

    def __init__(self, asked: str, threshold: float | None) -> None:
        """asked: auto, on or off; threshold: see Learner; None: those of thresholds()."""
        self.asked, self._threshold = asked, threshold
        self._why = "asked for"
        self._source: EngineSource | None = None
        self.thread: LearnerThread | None = None

    def start(
        self, handle: EngineHandle, plan: Plan, chosen: Iterable[Chosen], prefetch: str, spare: str
    ) -> None:
        """Starts it where it was asked for or is of use. chosen: with their nets; prefetch: whether
        cache prefetch was asked for; spare: "", or why no core is free. BudgetError: no memory."""
        nets = {(c.layer, c.phase): c.net for c in chosen if c.net is not None and c.net.width}
        if self.asked == "off":
            return
        if not nets:
            self._why = "no layer is predicted by a trained net"
        elif self.asked == "auto" and prefetch == "off":
            self._why = "cache prefetch is off: no step predicts"
        elif self.asked == "auto" and spare:
            self._why = spare
        else:
            self._why = "asked for" if self.asked == "on" else "a core is free"
            self._begin(handle, plan, nets)

    def _begin(self, handle: EngineHandle, plan: Plan, nets: Mapping[Key, Net]) -> None:
        self._source = EngineSource(handle, plan, nets)
        watched = input_layers(plan, nets)
        threshold = thresholds(plan, watched) if self._threshold is None else self._threshold
        learner = Learner(nets, watched, self._source, threshold)
        self.thread = LearnerThread(learner)

    def close(self) -> None:
        """Ends the thread; what it has learned stays in the engine. May be called again."""
        if self.thread is not None:
            self.thread.stop()

    def report(self) -> dict[str, Any]:
        """`asked`, `state` (on, off), `why`; if it was on: `bytes` of the tokens kept, and what
        Learner.report() gives."""
        on = self.thread is not None and self.thread.fault is None
        why = self._why
        if self.thread is not None and self.thread.fault is not None:
            why = f"stopped: {self.thread.fault}"
        made: dict[str, Any] = {"asked": self.asked, "state": "on" if on else "off", "why": why}
        if self.thread is not None and self._source is not None:
            made |= {"bytes": self._source.bytes(), **self.thread.learner.report()}
        return made
