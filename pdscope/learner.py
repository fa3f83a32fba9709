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

from pdscope.learner_nets import Floats, Lessons, Rows, Trained, error, loss
from pdscope.predictors import PHASES, Net

KEPT = {"prefill": 128, "decode": 32}  # tokens a layer; PDS_LEARN_* of pdscope.h
WINDOW = 16  # tokens that the error is a mean over
THRESHOLD = 0.25  # share of the chosen experts that were not among the predicted ones, at most
# Such a share that is another text: so many times what the nets missed when they were validated.
# Of tiny-qwen3-moe's windows on chats that it has not seen 11 % are above that in prefill and 0.7 %
# in decode, on code 65 % and 4 %; with 1.5 it would be 24 % and 5 % of the chats', with 2 prefill's
# mean on code would be below. A false trigger costs the background thread's time.
SHIFT = 1.75
HELD = 4  # the newest of so many tokens is for validation
GAIN = 0.005  # share of the loss that a swap must be worth,
FAR_GAIN = 0.1  # and a longer step
LENGTHS = (1, 2, 4)  # of the step from where the lessons began, while each is better than the last
JUDGES = 128  # tokens that validate, the newest ones; then they are learned from
TRIAL = 128  # tokens on which a fine-tuned net must have missed less than the one that was loaded
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
        # What the fine-tuned nets missed more than those that were loaded.
        self.trials: dict[int, deque[float]] = {n: deque(maxlen=TRIAL) for n in self.windows}
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

    def failed(self) -> bool:
        """The nets that were loaded would have missed less."""
        full = [trial for trial in self.trials.values() if len(trial) == TRIAL]
        if not full:
            return False
        worse = np.mean(full, axis=0)
        return bool(worse.mean() > worse.std() / TRIAL**0.5)  # its standard error

    def forget(self) -> None:
        """Errors of the nets before do not count any more."""
        for each in (*self.windows.values(), *self.trials.values()):
            each.clear()

    def triggered(self, tokens: int, useful: bool) -> None:
        """The next trigger has new tokens to learn from, and waits longer where learning did not
        help."""
        self.forget()
        self.patience = 1 if useful else min(2 * self.patience, MOST_PATIENCE)
        self.quiet_until = tokens + self.kept * self.patience


class Learner:
    """The learner without its thread."""

    def __init__(
        self,
        nets: Mapping[Key, Net],
        watched: Iterable[int],
        source: Source,
        threshold: float | Mapping[str, float] = THRESHOLD,
    ) -> None:
        """nets: those with hidden units, by layer and phase; watched: the layers whose errors
        trigger, those of the input group; threshold: their error above which it trains, of both
        phases or by phase."""
        self._nets = dict(nets)
        self._source = source
        if isinstance(threshold, Mapping):
            self._thresholds = dict(threshold)
        else:
            self._thresholds = dict.fromkeys(PHASES, float(threshold))
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
        self._first = dict(self._watched)
        self._lessons: dict[Key, Lessons] = {}
        self._judges: dict[Key, Rows] = {}
        self._used: dict[tuple[int, str, str], int] = {}  # layer, net's phase, tokens' phase
        self._seconds = 0.0

    def poll(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Looks at tokens that are new, and fine-tunes if that is called for."""
        for phase, state in self._phases.items():
            if stopped() or not self._look(phase, state):
                continue
            if state.failed():
                self._restore(phase, state)
                continue
            found, tokens = state.error(), max(state.seen.values())
            if found is None or tokens < state.quiet_until:
                continue
            if found > self._thresholds[phase]:
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
            rows = _last(rows, min(total - state.seen[layer], len(rows)))
            serving, first = self._watched[layer, phase], self._first[layer, phase]
            missed = error(serving.logits(rows), rows.target)
            window.extend(missed.tolist())
            if serving is not first:
                worse = missed - error(first.logits(rows), rows.target)
                state.trials[layer].extend(worse.tolist())
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
            self._serve(layer, phase, net)
            state.counts["swaps"] += 1
            useful = True
        return useful

    def _serve(self, layer: int, phase: str, net: Net) -> None:
        key = layer, phase
        self._source.swap(layer, phase, net)
        self._nets[key] = net
        if key in self._watched:
            self._watched[key] = self._first[key] if net is self._loaded[key] else Trained(net)

    def _restore(self, phase: str, state: _Phase) -> None:
        """The text has changed back: the nets that were loaded serve again. What was learned is
        kept for the next trigger."""
        for (layer, of), net in list(self._nets.items()):
            if of == phase and net is not self._loaded[layer, of]:
                self._serve(layer, of, self._loaded[layer, of])
                state.counts["rollbacks"] += 1
        state.forget()

    def _tuned(self, layer: int, phase: str, stopped: Callable[[], bool]) -> Net | None:
        """The layer's net after fine-tuning; None where it would predict worse, or has no tokens.

        It is the net that was loaded, and what the tokens of all triggers so far teach it, in one
        step while that is enough: so it follows the text, and goes nowhere in many small steps. It
        is judged by the newest tokens and by those that judged before, few of which are a noisy
        judge; so is the net that was loaded, which is the better one where the text has changed
        back.
        """
        key = layer, phase
        learn, judge = self._halves(layer, phase)
        if len(learn) < WINDOW:
            return None
        loaded = Trained(self._loaded[key])
        if key not in self._lessons:
            self._lessons[key] = Lessons(loaded)
        if key in self._judges:
            judge = self._judges[key].join(judge)
        retired = judge.take(slice(0, max(0, len(judge) - JUDGES)))
        self._judges[key] = judge = _last(judge, JUDGES)
        lessons = self._lessons[key]
        lessons.add(learn.join(retired))
        with np.errstate(all="ignore"):  # what becomes of it is judged
            step = lessons.step(stopped)
            best, after = self._loaded[key], loaded.logits(judge)
            for length in LENGTHS:
                net = lessons.moved(np.float32(length) * step).rounded()
                found = Trained(net).logits(judge)
                if stopped() or not _better(found, after, judge, FAR_GAIN if length > 1 else GAIN):
                    break
                best, after = net, found
                if length > 1:  # too far for one step: the next begins where this one ends
                    self._lessons[key] = Lessons(Trained(net))
            if stopped() or best is self._nets[key]:
                return None
            before = Trained(self._nets[key]).logits(judge)
            return best if _better(after, before, judge) else None

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
        """For each phase: its threshold, triggers, swaps and rollbacks (both count nets),
        `window_error` (None until WINDOW tokens have been seen), and `layer_errors` of the watched
        layers; `seconds` of fine-tuning."""
        made: dict[str, Any] = {}
        for phase, state in self._phases.items():
            now = state.error()
            layers = {n: round(float(np.mean(w)), 4) for n, w in state.windows.items() if len(w)}
            made[phase] = {
                "threshold": round(self._thresholds[phase], 4),
                **state.counts,
                "window_error": None if now is None else round(now, 4),
                "layer_errors": layers,
            }
        return made | {"seconds": round(self._seconds, 3)}


def _last(rows: Rows, n: int) -> Rows:
    return rows.take(slice(max(0, len(rows) - n), None))


def _better(new: Floats, old: Floats, rows: Rows, gain: float = GAIN) -> bool:
    """Logits [n, experts] that miss no more experts than the old ones, and whose loss is lower by
    `gain` and by more than its standard error. NaN: no."""
    fewer = error(new, rows.target).mean() <= error(old, rows.target).mean()
    was = loss(old, rows)
    less = was - loss(new, rows)
    sure = max(gain * float(was.mean()), float(less.std()) / len(less) ** 0.5)
    return bool(fewer and less.mean() > sure)
