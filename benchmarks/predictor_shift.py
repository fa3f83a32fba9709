"""What the online learner makes of another domain: chats, then Python's own standard library.

The plan reads both, prompt by prompt, in steps of 64 tokens; behind each step the learner looks, as
its thread would, but at fixed points, so that all runs give the same. Printed for each part of the
text: the share of the next layer's experts missed by the nets that were loaded and by those that
serve at the time, on tokens that nothing has learned from yet, means over the input group's layers
and over all; and how often the learner fine-tuned, swapped nets and left them as they were.

    python benchmarks/predictor_shift.py PLAN --chats FILE [--threshold T] [--tokens N] [--json]
"""

import argparse
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pdscope
from pdscope.documents import read_documents
from pdscope.engine import Engine
from pdscope.learner import THRESHOLD, Learner
from pdscope.learner_nets import Trained, error
from pdscope.learner_thread import EngineSource, input_layers
from pdscope.predictors import Net, read_predictors

STEP, PART = 64, 1280  # tokens
MODULES = (
    "argparse", "ast", "calendar", "configparser", "copy", "csv", "dataclasses", "datetime",
    "decimal", "difflib", "fractions", "functools", "inspect", "pickle", "random", "shutil",
    "socket", "statistics", "subprocess", "tarfile", "textwrap", "threading", "typing", "zipfile",
)  # fmt: skip
PHASE = "prefill"


def code(engine: Engine) -> Iterator[NDArray[np.int32]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in MODULES:
        text = (root / f"{name}.py").read_text(encoding="utf-8")
        yield np.asarray(engine.tokenizer.encode(text), np.int32)


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
    def __init__(self, engine: Engine, threshold: float) -> None:
        chosen = read_predictors(engine.plan) or []
        nets = {(c.layer, c.phase): c.net for c in chosen if c.net is not None and c.net.width}
        self.engine, self.source = engine, Serving(engine.handle, engine.plan, nets)
        self.source.nets = {layer: net for (layer, phase), net in nets.items() if phase == PHASE}
        self.loaded = {layer: Trained(net) for layer, net in self.source.nets.items()}
        self.input = set(input_layers(engine.plan, nets)) & self.loaded.keys()
        self.learner = Learner(nets, self.input, self.source, threshold)

    def read(self, name: str, texts: Iterator[NDArray[np.int32]], tokens: int) -> Iterator[Part]:
        rows: list[tuple[float, float, float, float]] = []
        read = 0
        for ids in texts:
            self.engine.reset()
            for at in range(0, min(len(ids), self.engine.info.max_context) - STEP + 1, STEP):
                self.engine.prefill(ids[at : at + STEP])
                rows.append(self._errors())
                self.learner.poll()
                read += STEP
                if len(rows) * STEP == PART:
                    yield self._part(name, read, rows)
                    rows = []
                if read >= tokens:
                    return

    def _errors(self) -> tuple[float, float, float, float]:
        """Of the last step's tokens: as loaded and as served, of the input group and of all."""
        found: dict[int, tuple[float, float]] = {}
        for layer, net in self.loaded.items():
            kept = self.source.read(layer, PHASE)
            assert kept is not None
            rows = kept[0].take(slice(max(0, len(kept[0]) - STEP), None))
            served = Trained(self.source.nets[layer])
            found[layer] = (
                float(error(net.logits(rows), rows.target).mean()),
                float(error(served.logits(rows), rows.target).mean()),
            )
        some = np.mean([found[layer] for layer in self.input], 0)
        every = np.mean(list(found.values()), 0)
        return float(some[0]), float(some[1]), float(every[0]), float(every[1])

    def _part(self, name: str, tokens: int, rows: list[tuple[float, float, float, float]]) -> Part:
        report = self.learner.report()[PHASE]
        counts = {key: int(report[key]) for key in ("triggers", "swaps", "rollbacks")}
        means = [float(x) for x in np.mean(rows, 0)]
        return Part(name, tokens, *means, **counts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--threshold", type=float, default=THRESHOLD)
    parser.add_argument("--tokens", type=int, default=4 * PART, help="of each text")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    parts: list[dict[str, Any]] = []
    with pdscope.load(args.plan, learner="off", cache_prefetch="on") as engine:
        shift = Shift(engine, args.threshold)
        chats = (d.ids for d in read_documents(engine.tokenizer, args.chats))
        for name, texts in (("chats", chats), ("code", code(engine))):
            for part in shift.read(name, texts, args.tokens):
                parts.append(asdict(part))
                if not args.json:
                    print(
                        f"{part.text:5} {part.tokens:6}: input group {part.input_loaded:.4f} as "
                        f"loaded, {part.input_served:.4f} as served; all layers "
                        f"{part.all_loaded:.4f}, {part.all_served:.4f}; {part.triggers} triggers, "
                        f"{part.swaps} swaps, {part.rollbacks} rollbacks",
                        flush=True,
                    )
    if args.json:
        print(json.dumps(parts, indent=2))


if __name__ == "__main__":
    main()
