"""The online learner: fine-tunes the predictors to the text that an engine is given.

It looks at what the engine's steps have kept of their last tokens, and where the nets of the input
group miss too many experts, it fine-tunes the nets of that phase on these tokens.
learner_thread.py runs it beside an engine. May import numpy and
pdscope.{learner_nets,predictors}.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from pdscope.learner_nets import Rows, Trained, error, loss
from pdscope.predictors import PHASES, Net

KEPT = {"prefill": 128, "decode": 32}  # tokens a layer; PDS_LEARN_* of pdscope.h
WINDOW = 16  # tokens that the error is a mean over
THRESHOLD = 0.25  # share of the chosen experts that were not among the predicted ones
HELD = 4  # the newest of so many tokens is for validation
GAIN = 0.005  # share of the loss that a swap must be worth
STEPS = 4  # of one fine-tuning, while those who judge it like it better
MEMORY = 1024  # tokens of earlier fine-tunings that are learned from again
ANCHOR = 256  # tokens of earlier validations that validate again
MOST_PATIENCE = 32
INTERVAL = 0.1  # seconds between two looks

Key = tuple[int, str]  # layer, phase
_NO_IDS = np.empty((0, 0), np.int32)
_NO_FLOATS = np.empty((0, 0), np.float32)
NOTHING = Rows(_NO_FLOATS, _NO_FLOATS, _NO_IDS, _NO_IDS, _NO_IDS, _NO_IDS, _NO_FLOATS)


class Source(Protocol):
    """Where tokens come from and nets go to."""

    def total(self, layer: int, phase: str) -> int:
        """Tokens kept so far, those that others have replaced included."""

    def read(self, layer: int, phase: str) -> tuple[Rows, int] | None:
        """The last KEPT tokens and the total with them; None: a step is writing there now."""

    def swap(self, layer: int, phase: str, net: Net) -> None:
        """Steps predict with `net` from now on."""


class _Phase:
    """What is known of a phase."""

    def __init__(self, watched: Iterable[int], kept: int) -> None:
        self.windows: dict[int, deque[float]] = {layer: deque(maxlen=WINDOW) for layer in watched}
        self.seen = dict.fromkeys(self.windows, 0)
        self.kept = kept
        self.quiet_until = 0  # no trigger before so many tokens
        self.patience = 1
        self.counts = {"triggers": 0, "swaps": 0, "rollbacks": 0}

    def error(self) -> float | None:
        """Mean over the watched layers; None: a window is not full."""
        if not self.windows or any(len(w) < WINDOW for w in self.windows.values()):
            return None
        return float(np.mean([np.mean(w) for w in self.windows.values()]))

    def triggered(self, tokens: int, useful: bool) -> None:
        """Errors of the nets before do not count any more. The next trigger has new tokens to learn
        from, and waits longer where learning did not help."""
        for window in self.windows.values():
            window.clear()
        self.patience = 1 if useful else min(2 * self.patience, MOST_PATIENCE)
        self.quiet_until = tokens + self.kept * self.patience


class Learner:
    """The learner without its thread."""

    def __init__(
        self,
        nets: Mapping[Key, Net],
        watched: Iterable[int],
        source: Source,
        threshold: float = THRESHOLD,
    ) -> None:
        """nets: those with hidden units, by layer and phase; watched: the layers whose errors
        trigger, those of the input group; threshold: their error above which it trains."""
        self._nets = dict(nets)
        self._source, self._threshold = source, threshold
        layers = sorted(set(watched))
        self._phases = {
            phase: _Phase([n for n in layers if (n, phase) in nets], KEPT[phase])
            for phase in PHASES
        }
        self._watched = {
            (layer, phase): Trained(self._nets[layer, phase])
            for phase, state in self._phases.items()
            for layer in state.windows
        }
        self._loaded = dict(nets)
        self._memory: dict[Key, Rows] = {}
        self._anchors: dict[Key, Rows] = {}
        self._used: dict[tuple[int, str, str], int] = {}  # layer, net's phase, tokens' phase
        self._seconds = 0.0

    def poll(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Looks at tokens that are new, and fine-tunes if that is called for."""
        for phase, state in self._phases.items():
            if stopped() or not self._look(phase, state):
                continue
            found, tokens = state.error(), max(state.seen.values())
            if found is not None and found > self._threshold and tokens >= state.quiet_until:
                began = time.perf_counter()
                useful = self._tune(phase, state, stopped)
                self._seconds += time.perf_counter() - began
                state.triggered(tokens, useful)

    def _look(self, phase: str, state: _Phase) -> bool:
        """Adds the errors of new tokens to the windows. False: there is none."""
        fresh = False
        for layer, window in state.windows.items():
            if self._source.total(layer, phase) == state.seen[layer]:
                continue
            found = self._source.read(layer, phase)
            if found is None:
                continue
            rows, total = found
            new = min(total - state.seen[layer], WINDOW, len(rows))
            rows = rows.take(slice(len(rows) - new, None))
            window.extend(error(self._watched[layer, phase].logits(rows), rows.target).tolist())
            state.seen[layer] = total
            fresh = True
        return fresh

    def _tune(self, phase: str, state: _Phase, stopped: Callable[[], bool]) -> bool:
        """One layer after the other. True: a net was replaced."""
        state.counts["triggers"] += 1
        useful = False
        for layer, of in list(self._nets):
            if of != phase:
                continue
            net = self._tuned(layer, phase, stopped)
            if stopped():
                break
            if net is None:
                state.counts["rollbacks"] += 1
                continue
            self._source.swap(layer, phase, net)
            self._nets[layer, phase] = net
            if (layer, phase) in self._watched:
                self._watched[layer, phase] = Trained(net)
            state.counts["swaps"] += 1
            useful = True
        return useful

    def _tuned(self, layer: int, phase: str, stopped: Callable[[], bool]) -> Net | None:
        """The layer's net after fine-tuning; None where it would predict worse, or has no tokens.

        It is the net that was loaded, and what the older tokens of both phases teach it, with those
        of earlier times while memory lasts: so it follows the text, and goes nowhere in many small
        steps. It is judged by the newest tokens and by those that judged before: few tokens are a
        noisy judge, and what fits one moment alone would be worse at the next.
        """
        learn, judge = self._halves(layer, phase)
        if len(learn) < WINDOW:
            return None
        if (layer, phase) in self._memory:
            learn = _last(self._memory[layer, phase].join(learn), MEMORY)
        self._memory[layer, phase] = learn
        older = self._anchors.get((layer, phase))
        self._anchors[layer, phase] = _last(judge if older is None else older.join(judge), ANCHOR)
        if older is not None:
            judge = older.join(judge)
        before, after = Trained(self._nets[layer, phase]), Trained(self._loaded[layer, phase])
        best, least = None, np.inf
        with np.errstate(all="ignore"):  # what becomes of it is judged
            for _ in range(STEPS):
                after.fit(learn, stopped)
                net = after.rounded()
                found = loss(Trained(net).logits(judge), judge)
                if stopped() or not found < least:
                    break
                best, least = net, found
            return best if best is not None and _better(Trained(best), before, judge) else None

    def _halves(self, layer: int, phase: str) -> tuple[Rows, Rows]:
        """Tokens to learn from, and tokens to judge by: of each phase the newest ones. None that
        were taken before."""
        learn, judge = None, None
        for each in (phase, *(p for p in PHASES if p != phase)):
            found = self._source.read(layer, each)
            if found is None:
                continue
            rows, total = found
            fresh = min(len(rows), total - self._used.get((layer, phase, each), 0))
            self._used[layer, phase, each] = total
            rows = _last(rows, fresh)
            n = len(rows) - len(rows) // HELD
            parts = rows.take(slice(0, n)), rows.take(slice(n, None))
            learn = parts[0] if learn is None else learn.join(parts[0])
            judge = parts[1] if judge is None else judge.join(parts[1])
        if learn is None or judge is None:
            return NOTHING, NOTHING
        return learn, judge

    def report(self) -> dict[str, Any]:
        """For each phase: triggers, swaps and rollbacks (both count nets), `window_error` (None
        until WINDOW tokens have been seen), and `layer_errors` of the watched layers; `seconds` of
        fine-tuning."""
        made: dict[str, Any] = {"threshold": self._threshold}
        for phase, state in self._phases.items():
            now = state.error()
            layers = {n: round(float(np.mean(w)), 4) for n, w in state.windows.items() if len(w)}
            made[phase] = {
                **state.counts,
                "window_error": None if now is None else round(now, 4),
                "layer_errors": layers,
            }
        return made | {"seconds": round(self._seconds, 3)}


def _last(rows: Rows, n: int) -> Rows:
    return rows.take(slice(max(0, len(rows) - n), None))


def _better(net: Trained, before: Trained, rows: Rows) -> bool:
    """It misses no more experts, and its loss is lower by GAIN. NaN: no."""
    new, old = net.logits(rows), before.logits(rows)
    fewer = error(new, rows.target).mean() <= error(old, rows.target).mean()
    return bool(fewer and loss(new, rows) < (1 - GAIN) * loss(old, rows))
