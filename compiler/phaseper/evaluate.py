"""A finished plan's predictors on any text: what they name, against what the gates choose while the
plan reads it.

In numpy alone: whoever inspects a plan needs no torch. compiler/phaseper/{nets,rivals}.py say what
each predictor is. May import numpy, pdscope.{documents,errors,ir,plan,predictor_figures,predictors,
routing_records} and pdscope.compiler.{lowered,quantise,passes.lower,phaseper.calibrate,
phaseper.metrics,phaseper.rivals,phaseper.scores,phaseper.store}; of pdscope.engine only types.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.lowered import PANEL, Form, Tensor
from pdscope.compiler.passes.lower import Lower
from pdscope.compiler.phaseper.calibrate import probabilities
from pdscope.compiler.phaseper.metrics import (
    WINDOW,
    Array,
    Ids,
    hits,
    membership,
    rank_hit,
    reliability,
    top,
)
from pdscope.compiler.phaseper.rivals import previous_scores, transition_scores
from pdscope.compiler.phaseper.scores import net_scores, sigmoid
from pdscope.compiler.phaseper.store import Gate
from pdscope.compiler.quantise import to_bfloat16, to_float32
from pdscope.documents import Document
from pdscope.errors import InputError, PlanError
from pdscope.ir.graph_text import parse_graph
from pdscope.plan import Plan
from pdscope.predictor_figures import PHASEPER, PHASES, Figures, Layer
from pdscope.predictors import read_tensors
from pdscope.routing_records import LayerRecords, RoutingReader

if TYPE_CHECKING:
    from pdscope.engine import Engine

BLOCKS = ("routed", "previous", "previous_next")
_AGAIN = "compile the plan again"


@dataclass(frozen=True)
class Evaluation:
    """`layers`: those of the plan, with the text's figures, of the phases that the text has."""

    layers: tuple[Layer, ...]
    rows: Mapping[str, int]  # positions read, by phase


def evaluate(
    engine: "Engine",
    layers: Sequence[Layer],
    documents: Sequence[Document],
    advance: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Reads the documents. advance: receives tokens read since its last call.

    Memory does not grow with the text. Raises PlanError for damaged predictors, InputError for a
    text that has no position of a phase that is predicted.
    """
    gates = plan_gates(engine.plan)
    for number in sorted({n for layer in layers for n in (layer.layer, layer.next)} - gates.keys()):
        raise PlanError(f"phaseper.json: layer {number} of the model has no experts: {_AGAIN}")
    sources = [_Source(engine.plan, layer, gates[layer.next]) for layer in layers]
    rows = dict.fromkeys(PHASES, 0)
    with RoutingReader(engine) as reader:
        for records in reader.read(documents):
            for phase in PHASES:
                at = np.flatnonzero(getattr(records, phase))
                rows[phase] += len(at)
                for source in sources if len(at) else ():
                    if source.about.phase == phase:
                        about = source.about
                        source.add(records.layers[about.layer], records.layers[about.next], at)
            advance(len(records.token))
    found = tuple(source.result() for source in sources if rows[source.about.phase])
    if not found:
        raise InputError(
            f"the text has no position of a phase that is predicted ({', '.join(PHASES)}): add "
            "whole conversations, or texts"
        )
    return Evaluation(found, rows)


class _Source:
    """The predictors of a layer and phase, and how they did so far."""

    def __init__(self, plan: Plan, about: Layer, gate: Gate) -> None:
        self.about, self._gate = about, gate
        self._experts = int(plan.model["experts"])
        path = plan.path / f"phaseper/layer{about.layer:03d}.safetensors"
        n, shapes = self._experts, {"frequency": (self._experts,)}
        stored: dict[str, tuple[int, ...]] = {**shapes, "transition": (n, n)}
        self._net = bool(about.net.get("stored"))
        if self._net:
            stored |= net_shapes(about.net, int(plan.model["hidden"]), n)
        self._tensors = layer_tensors(path, about.phase, stored)
        names = (n for n in about.figures if n != PHASEPER or self._net)
        self._tallies = {name: Tally(n, name == about.chosen) for name in names}

    def add(self, layer: LayerRecords, following: LayerRecords, at: NDArray[np.int64]) -> None:
        chosen = following.e[at]
        scores = self.scores(layer, following, at)
        for name, tally in self._tallies.items():
            tally.add(scores[name], chosen, self.about.temperatures[name])

    def scores(
        self, layer: LayerRecords, following: LayerRecords, at: NDArray[np.int64]
    ) -> dict[str, Array]:
        """Of every predictor [rows, experts]."""
        tensors, experts = self._tensors, self._experts
        a, e, w = to_float32(to_bfloat16(layer.a[at])), layer.e[at], layer.w[at]
        prev, prev_next = layer.prev[at], following.prev[at]
        likely = tensors["frequency"]
        found = {
            "previous": previous_scores(prev_next, likely),
            "frequency": np.broadcast_to(likely, (len(at), experts)),
            "transition": transition_scores(tensors["transition"], e, w),
            "cross_gate": choice_scores(self._gate, self._gate.logits(a)),
        }
        if self._net:
            routed = np.zeros((len(at), experts), np.float32)
            np.put_along_axis(routed, e.astype(np.int64), w, 1)
            blocks = {
                "routed": routed,
                "previous": membership(prev, experts),
                "previous_next": membership(prev_next, experts),
            }
            features = np.concatenate([blocks[b] for b in self.about.net["blocks"]], 1)
            found[PHASEPER] = net_scores(tensors, a, features.astype(np.float32))
        return found

    def result(self) -> Layer:
        figures = {name: tally.figures() for name, tally in self._tallies.items()}
        chosen = self._tallies[self.about.chosen]
        prefill = self.about.phase == "prefill"
        return replace(
            self.about,
            figures=figures,
            r_hit=figures[self.about.chosen].rank_hit if prefill else chosen.first_hit(),
            reliability=chosen.reliability(),
        )


class Tally:
    """Hit rate and rank accuracy of one predictor, rows coming in order; see metrics.hit_rate and
    metrics.rank_accuracy. In detail: with what calibrate.calibrate finds besides."""

    def __init__(self, experts: int, detail: bool = False) -> None:
        self._hits, self._first, self._rows = 0.0, 0.0, 0
        self._detail, self._bins = detail, np.zeros((3, 10))  # pairs; sums: predicted, observed
        self._ranks: list[float] = []
        self._experts = experts
        self._open()

    def _open(self) -> None:
        self._filled = 0  # rows of the window
        self._counts = np.zeros(self._experts)
        self._expected = np.zeros(self._experts)

    def add(self, scores: Array, chosen: Ids, temperature: float) -> None:
        """scores [n, experts], chosen [n, top_k]."""
        self._hits += float(hits(scores, chosen).sum())
        self._rows += len(chosen)
        truth = membership(chosen, self._experts)
        expected = probabilities(scores, chosen.shape[1], temperature)
        if self._detail:
            half = (chosen.shape[1] + 1) // 2
            self._first += float(np.take_along_axis(truth, top(scores, half), 1).mean(1).sum())
            found = reliability(expected, truth)
            pairs = np.asarray(found.pairs)
            self._bins += pairs, pairs * found.predicted, pairs * found.observed
        at = 0
        while at < len(chosen):
            end = min(at + WINDOW - self._filled, len(chosen))
            self._counts += truth[at:end].sum(0)
            self._expected += expected[at:end].sum(0, dtype=np.float64)
            self._filled += end - at
            at = end
            if self._filled == WINDOW:
                self._ranks.append(rank_hit(self._counts, self._expected))
                self._open()

    def figures(self) -> Figures:
        """Of the rows so far, of which there is at least one."""
        ranks = list(self._ranks)
        if self._filled >= WINDOW // 2 or not ranks:
            ranks.append(rank_hit(self._counts, self._expected))
        return Figures(self._hits / self._rows, sum(ranks) / len(ranks))

    def first_hit(self) -> float:
        """Share of the better half of the predicted top_k that the gate chose."""
        return self._first / self._rows

    def reliability(self) -> dict[str, list[float]]:
        """See metrics.Reliability."""
        pairs, predicted, observed = self._bins
        some = np.maximum(pairs, 1)
        middle = (np.arange(len(pairs)) + 0.5) / len(pairs)
        return {
            "predicted": np.where(pairs > 0, predicted / some, middle).tolist(),
            "observed": (observed / some).tolist(),
            "pairs": pairs.astype(np.int64).tolist(),
        }


def net_shapes(net: Mapping[str, Any], hidden: int, experts: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a net (nets.NetShape.tensors) as phaseper.json describes it."""
    width, parts = net.get("width"), net.get("blocks")
    known = isinstance(parts, list) and all(b in BLOCKS for b in parts)
    if not isinstance(width, int) or not known or not isinstance(net.get("deep"), bool):
        raise PlanError(f"phaseper.json: net: no width, deep and blocks of a net: {_AGAIN}")
    first = width + experts
    shapes: dict[str, tuple[int, ...]] = {
        "in.weight": (first, hidden),
        "in.bias": (first,),
        "features.weight": (len(net["blocks"]) * experts, first),
        "out.weight": (experts, width),
    }
    if net["deep"]:
        shapes |= {"gate.weight": (width, hidden), "gate.bias": (width,)}
        shapes |= {"block.weight": (width, width), "block.bias": (width,)}
    return shapes


def choice_scores(gate: Gate, logits: Array) -> Array:
    """rivals.choice_scores: what the family's gate takes the best top_k of [n, experts]."""
    attrs = gate.attrs
    if attrs.score == "softmax":
        choice = np.exp(logits - logits.max(1, keepdims=True))
        choice /= choice.sum(1, keepdims=True)
    else:
        choice = sigmoid(logits)
    if gate.bias is not None:
        choice = choice + gate.bias
    if attrs.groups > 1:
        grouped = choice.reshape(len(choice), attrs.groups, -1)
        best = np.sort(grouped, axis=2)
        merit = best[:, :, -1] if attrs.group_score == "max" else best[:, :, -2:].sum(2)
        lost = np.argsort(-merit, axis=1, kind="stable")[:, attrs.top_groups :]
        masked = np.zeros(merit.shape, np.bool_)
        np.put_along_axis(masked, lost, True, 1)
        grouped = np.where(masked[:, :, None], np.float32(attrs.masked_score), grouped)
        choice = grouped.reshape(choice.shape)
    scores: Array = choice.astype(np.float32)
    return scores


def plan_gates(plan: Plan) -> dict[int, Gate]:
    """The gate of every MoE layer, by model-layer number, from the plan's weight files."""
    data = plan.data
    graph = parse_graph(plan.read_text("graph.txt"))
    model = Lower(data["dtype"], data["max_context"], data["predictor"]).run(graph)

    def values(tensor: Tensor) -> Array:
        path = plan.path / model.files[tensor.file].path
        try:
            flat = np.fromfile(path, "<f4", tensor.matrix_bytes // 4, offset=tensor.offset)
        except OSError as error:
            raise PlanError(f"{path}: {error.strerror}: recompile the model") from None
        if len(flat) != tensor.matrix_bytes // 4:
            raise PlanError(f"{path}: is cut short: recompile the model")
        if tensor.form is Form.VECTOR:
            return flat
        panels = flat.reshape(-1, tensor.k_pad, PANEL).transpose(0, 2, 1)
        rows: Array = panels.reshape(-1, tensor.k_pad)[: tensor.n, : tensor.k]
        return np.ascontiguousarray(rows)

    return {
        number: Gate(
            layer.gate.attrs,
            values(layer.gate.weight),
            None if layer.gate.bias is None else values(layer.gate.bias),
        )
        for number, layer in enumerate(model.layers)
        if layer.gate is not None
    }


def layer_tensors(
    path: Path, phase: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, NDArray[Any]]:
    """Tensors PHASE.NAME of a layer's file, by NAME: fp32, or bf16 as its bits in uint16.

    Raises PlanError naming file and tensor for what is missing or of another shape.
    """
    found = read_tensors(path, [f"{phase}.{name}" for name in shapes])
    for name, shape in shapes.items():
        held = found[f"{phase}.{name}"].shape
        if held != shape:
            raise PlanError(
                f"{path}: tensor {phase}.{name} has shape {held}, expected {shape}: {_AGAIN}"
            )
    return {name: found[f"{phase}.{name}"] for name in shapes}
