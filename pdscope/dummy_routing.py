"""Routing that nobody's gates chose, for benchmarks: random weights route like no trained model.

Three kinds. `uniform`: each token's experts of each layer are top_k different ones, all as likely.
`trace:FILE`: those of a recorded routing.npz, row after row from row `seed` on, over and over;
layer i of the plan's layers with experts takes those of the trace's i-th, again from the first
behind the last.
`zipf:S`: made up with what predictors and caches live on:

- popularity: the r-th expert of a layer is drawn in proportion to r^-S, in an order of its own for
  each layer;
- topics: a sequence has one of TOPICS topics at a time and keeps it from token to token, but for
  one token in 64. Each topic makes a random set of experts likelier at every layer (log-odds of
  standard deviation PULL). So tokens that are neighbours share experts, and the experts of a layer
  say what the topic is, and with that something of the next layer's;
- Gumbel noise, drawn anew for each token and layer: top_k draws without replacement.

What an id gets does not depend on how many tokens are asked for. May import numpy and
pdscope.{errors,plan,routing_records,routing_trace}.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pdscope.errors import InputError
from pdscope.plan import Plan
from pdscope.routing_records import moe_layers
from pdscope.routing_trace import RoutingTrace

TOPICS = 8
STAY = 63 / 64
PULL = 1.5
_CHUNK = 1024  # tokens that are drawn at a time

_FORM = re.compile(
    r"(?:zipf:([0-9.eE+-]+)|(uniform)|trace:(.+?))(?:,seed:([0-9]{1,9}))?", re.DOTALL
)

Routes = NDArray[np.int32]


@dataclass(frozen=True)
class DummyRouting:
    """skew: zipf's S; 0 and no file: uniform. file: a routing.npz instead."""

    skew: float | None = None
    file: Path | None = None
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `zipf:S`, `uniform` or `trace:FILE`, and `,seed:N` behind it. Raises InputError."""
        match = _FORM.fullmatch(text)
        try:
            skew = float(match[1]) if match and match[1] else None
        except ValueError:
            skew = math.nan
        if match is None or not (skew is None or 0 <= skew <= 100):
            raise InputError(
                f"dummy_routing: {text!r} is not zipf:S with S from 0 to 100, uniform or "
                "trace:FILE, or one of them with ,seed:N behind it"
            )
        return cls(skew, Path(match[3]) if match[3] else None, int(match[4] or 0))

    def describe(self) -> str:
        """For people."""
        if self.file is not None:
            what = f"the recorded routing of {self.file}"
        elif self.skew is None:
            what = f"uniformly random experts (seed {self.seed})"
        else:
            what = f"experts drawn by rank^-{self.skew:g}, with topics (seed {self.seed})"
        return f"{what}, weights 1 / top_k: no gate chose them"

    def as_dict(self) -> dict[str, Any]:
        kind = "trace" if self.file is not None else "uniform" if self.skew is None else "zipf"
        file = None if self.file is None else str(self.file)
        return {"kind": kind, "skew": self.skew, "file": file, "seed": self.seed}

    def routes(self, plan: Plan, tokens: int) -> Routes:
        """What Session.set_routes takes [tokens, layers, top_k]; 0 in layers without experts.

        Raises InputError for a plan without experts, and for a trace that cannot be read or is of
        other numbers of experts or of choices.
        """
        model, layers = plan.model, moe_layers(plan)
        experts, top_k = int(model["experts"]), int(model["top_k"])
        if not layers:
            raise InputError(f"dummy_routing: {plan.path} has no layer with experts")
        out = np.zeros((tokens, model["layers"], top_k), np.int32)
        if self.file is not None:
            out[:, layers] = _recorded(self.file, plan, tokens, len(layers), self.seed)
            return out
        topic = None if self.skew is None else _topics(self.seed, tokens)
        for layer in layers:
            random = np.random.Generator(np.random.PCG64([self.seed, layer]))
            odds = np.zeros((1, experts))
            if self.skew is not None:
                popularity = -self.skew * np.log(random.permutation(experts) + 1.0)
                odds = popularity + PULL * random.standard_normal((TOPICS, experts))
            for at in range(0, tokens, _CHUNK):
                part = slice(at, min(at + _CHUNK, tokens))
                noise = random.gumbel(size=(part.stop - at, experts))
                scores = odds[0 if topic is None else topic[part]] + noise
                top = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
                rank = np.argsort(-np.take_along_axis(scores, top, 1), axis=1, kind="stable")
                out[part, layer] = np.take_along_axis(top, rank, 1)
        return out


def _topics(seed: int, tokens: int) -> NDArray[np.int64]:
    """[tokens] topic of each."""
    random = np.random.Generator(np.random.PCG64([seed, 2**20]))  # beside those of layers
    draws = random.random((tokens, 2))
    changes = draws[:, 0] >= STAY
    changes[:1] = True
    since = np.maximum.accumulate(np.where(changes, np.arange(tokens), 0))
    return np.asarray((draws[:, 1] * TOPICS).astype(np.int64)[since])


def _recorded(file: Path, plan: Plan, tokens: int, layers: int, first: int) -> NDArray[np.int16]:
    """[tokens, layers, top_k] of a trace, from row `first` on."""
    trace = RoutingTrace.load(file)
    for name, said in (("experts", trace.experts), ("top_k", trace.top_k)):
        if said != plan.model[name]:
            raise InputError(
                f"{file}: {name} is {said}, expected {plan.model[name]} as {plan.path} has: record "
                "a model of these dimensions with pdscope-run --save-routing"
            )
    rows = np.arange(first, first + tokens) % len(trace.position)
    return trace.ids[np.arange(layers) % len(trace.layers)].transpose(1, 0, 2)[rows]


def distinct(routes: NDArray[np.int32], layers: Sequence[int]) -> list[int]:
    """How many experts each of the layers activates, of routes [tokens, layers, top_k]."""
    return [len(np.unique(routes[:, layer])) for layer in layers]
