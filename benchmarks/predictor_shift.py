"""What the online learner makes of another domain: chats, then Python's own standard library, then
chats again.

The plan reads them, prompt by prompt, in steps of up to 64 tokens; behind each step the learner
looks, as its thread would, but at fixed points, so that all runs give the same. Printed for each
part of the text: the share of the next layer's experts missed by the nets that were loaded and by
those that serve at the time, on tokens that nothing has learned from yet, means over the input
group's layers and over all; and how often the learner fine-tuned, swapped nets and left them as
they were or set them back. At the end: how many triggers it took on code until the error of the
latest tokens, as many as a part has, was below the threshold.

    python benchmarks/predictor_shift.py PLAN --chats FILE [--threshold T] [--tokens N]
        [--modules shift|other] [--json]
"""

import argparse
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pdscope
from pdscope.documents import read_documents
from pdscope.engine import Engine
from pdscope.learner import Learner
from pdscope.learner_nets import Trained, error
from pdscope.learner_thread import EngineSource, input_layers, thresholds
from pdscope.predictors import Net, read_predictors

Floats = NDArray[np.float64]

STEP, PART = 64, 1280  # tokens
MODULES = (
    "argparse", "ast", "calendar", "configparser", "copy", "csv", "dataclasses", "datetime",
    "decimal", "difflib", "fractions", "functools", "inspect", "pickle", "random", "shutil",
    "socket", "statistics", "subprocess", "tarfile", "textwrap", "threading", "typing", "zipfile",
)  # fmt: skip
OTHER_MODULES = (
    "abc", "bdb", "cmd", "codecs", "collections/__init__", "contextlib", "email/message", "enum",
    "gettext", "gzip", "heapq", "http/client", "imaplib", "ipaddress", "json/decoder",
    "logging/__init__", "mailbox", "optparse", "pathlib", "platform", "pprint", "selectors",
    "smtplib", "ssl", "tempfile", "tokenize", "traceback", "urllib/parse", "uuid", "weakref",
)  # fmt: skip
PHASE = "prefill"


def code(engine: Engine, modules: Iterable[str] = MODULES) -> Iterator[NDArray[np.int32]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in (root / f"{name}.py" for name in modules):
        if path.exists():  # not in each version of Python
            text = path.read_text(encoding="utf-8")
            yield np.asarray(engine.tokenizer.encode(text), np.int32)


def prompts(engine: Engine, chats: Path) -> Iterator[NDArray[np.int32]]:
    """Of each chat what the model reads before it first writes."""
    for document in read_documents(engine.tokenizer, chats):
        written = np.flatnonzero(~document.prefill)
        yield document.ids[: written[0] if len(written) else None]


class Serving(EngineSource):
    """Where the learner's nets go, remembered."""

    nets: dict[int, Net]

    def swap(self, layer: int, phase: str, net: Net) -> None:
        super().swap(layer, phase, net)
        if phase == PHASE:
            self.nets[layer] = net


@dataclass(frozen=True)
class Part:
    """Errors are shares; counts are of the whole run up to its end."""

    text: str
    tokens: int
    input_loaded: float
    input_served: float
    all_loaded: float
    all_served: float
    triggers: int
    swaps: int
    rollbacks: int


class Shift:
    """steps: tokens, errors and, of the whole run, triggers before; see _errors()."""

    def __init__(self, engine: Engine, threshold: float | None = None) -> None:
        """threshold: None: the plan's own."""
        chosen = read_predictors(engine.plan) or []
        nets = {(c.layer, c.phase): c.net for c in chosen if c.net is not None and c.net.width}
        self.engine, self.source = engine, Serving(engine.handle, engine.plan, nets)
        self.source.nets = {layer: net for (layer, phase), net in nets.items() if phase == PHASE}
        self.loaded = {layer: Trained(net) for layer, net in self.source.nets.items()}
        self.input = set(input_layers(engine.plan, nets)) & self.loaded.keys()
        own = thresholds(engine.plan, self.input)[PHASE]
        self.threshold = own if threshold is None else threshold
        self.learner = Learner(nets, self.input, self.source, self.threshold)
        self.steps: list[tuple[int, Floats, int]] = []

    def read(self, name: str, texts: Iterator[NDArray[np.int32]], tokens: int) -> Iterator[Part]:
        """Also adds to `steps`."""
        read = begun = 0
        first = len(self.steps)
        for ids in texts:
            self.engine.reset()
            ids = ids[: self.engine.info.max_context]
            for at in range(0, len(ids), STEP):
                n = len(ids[at : at + STEP])
                self.engine.prefill(ids[at : at + STEP])
                self.steps.append((n, self._errors(n), self._triggers()))
                self.learner.poll()
                read += n
                if read - begun >= PART or read >= tokens:
                    yield self._part(name, read, mean_errors(self.steps[first:]))
                    begun, first = read, len(self.steps)
                if read >= tokens:
                    return

    def fallen(self, begin: int) -> tuple[int, Floats] | None:
        """The first PART tokens from step `begin` on whose served error of the input group is below
        the threshold: the triggers from `begin` to their last one, and their errors; None: there
        are none such."""
        for i in range(begin, len(self.steps)):
            n = np.cumsum([n for n, _, _ in self.steps[i:]])
            if n[-1] < PART:
                break
            last = i + int(np.searchsorted(n, PART))
            found = mean_errors(self.steps[i : last + 1])
            if found[1] < self.threshold:
                return self.steps[last][2] - self.steps[begin][2], found
        return None

    def _triggers(self) -> int:
        return int(self.learner.report()[PHASE]["triggers"])

    def _errors(self, n: int) -> Floats:
        """Of the last n tokens: of the input group as loaded and as served, of all layers as loaded
        and as served [4]."""
        found: dict[int, tuple[float, float]] = {}
        for layer, net in self.loaded.items():
            kept = self.source.read(layer, PHASE)
            assert kept is not None
            rows = kept[0].take(slice(len(kept[0]) - n, None))
            served = Trained(self.source.nets[layer])
            found[layer] = (
                float(error(net.logits(rows), rows.target).mean()),
                float(error(served.logits(rows), rows.target).mean()),
            )
        some = np.mean([found[layer] for layer in self.input], 0)
        every = np.mean(list(found.values()), 0)
        return np.concatenate([some, every])

    def _part(self, name: str, tokens: int, found: Floats) -> Part:
        report = self.learner.report()[PHASE]
        counts = {key: int(report[key]) for key in ("triggers", "swaps", "rollbacks")}
        some, some_served, every, every_served = found.tolist()
        return Part(name, tokens, some, some_served, every, every_served, **counts)


def mean_errors(steps: list[tuple[int, Floats, int]]) -> Floats:
    """Over tokens [4]."""
    return np.average([e for _, e, _ in steps], axis=0, weights=[n for n, _, _ in steps])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--threshold", type=float, help="default: the plan's own")
    parser.add_argument("--tokens", type=int, default=4 * PART, help="of each text")
    parser.add_argument("--modules", choices=("shift", "other"), default="shift")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with pdscope.load(args.plan, learner="off", cache_prefetch="on") as engine:
        shift = Shift(engine, args.threshold)
        chats = prompts(engine, args.chats)
        modules = MODULES if args.modules == "shift" else OTHER_MODULES
        parts: list[dict[str, Any]] = []
        begins = []
        for name, texts in (("chats", chats), ("code", code(engine, modules)), ("chats", chats)):
            begins.append(len(shift.steps))
            for part in shift.read(name, texts, args.tokens):
                parts.append(asdict(part))
                if not args.json:
                    say(part)
        found = shift.fallen(begins[1])
        seconds = shift.learner.report()["seconds"]
    end = {"threshold": shift.threshold, "triggers": None, "seconds": seconds}
    if found is not None:
        end |= {"triggers": found[0], "loaded": found[1][0], "served": found[1][1]}
    if args.json:
        print(json.dumps({"parts": parts, "fallen": end}, indent=2))
    else:
        print(f"threshold {shift.threshold:.4f}: {told(end)}; {seconds:.1f} s of fine-tuning")


def say(part: Part) -> None:
    print(
        f"{part.text:5} {part.tokens:6}: input group {part.input_loaded:.4f} as loaded, "
        f"{part.input_served:.4f} as served; all layers {part.all_loaded:.4f}, "
        f"{part.all_served:.4f}; {part.triggers} triggers, {part.swaps} swaps, "
        f"{part.rollbacks} rollbacks",
        flush=True,
    )


def told(end: dict[str, Any]) -> str:
    if end["triggers"] is None:
        return "the error on code stayed above it"
    return (
        f"{end['triggers']} triggers on code until the error was below, {end['served']:.4f} "
        f"({end['loaded']:.4f} as loaded) over {PART} tokens"
    )


if __name__ == "__main__":
    main()
