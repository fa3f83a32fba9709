"""Which predictor serves a layer and phase: all are measured, the best that is worth its cost wins.

May import numpy, torch and pdscope.compiler.phaseper.*.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.phaseper import rivals
from pdscope.compiler.phaseper.calibrate import (
    Calibration,
    calibrate,
    fit_temperature,
    probabilities,
)
from pdscope.compiler.phaseper.metrics import Array, Ids, hit_rate, membership, rank_accuracy
from pdscope.compiler.phaseper.nets import NetShape, file_tensors
from pdscope.compiler.phaseper.predictor_file import PHASEPER, Net, PredictorFiles
from pdscope.compiler.phaseper.rows import PhaseRows
from pdscope.compiler.phaseper.train import Trained, some

MEASURED = 32768  # validation rows that predictors are compared on
WORTH = 0.002  # hit rate that a dearer predictor has to gain on a cheaper one

# Microseconds that one token's prediction takes, given what it reads; the cost table replaces it.
Cost = Callable[[str, int], float]


def read_time(name: str, read: int) -> float:
    """Of `read` bytes on one core, at 10 GB/s from beyond its caches."""
    return read / 10_000


@dataclass(frozen=True)
class Figures:
    """hit: share of the gate's experts among the best top_k; rank_hit: rank accuracy over windows,
    the predicted counts being sums of calibrated probabilities."""

    hit: float
    rank_hit: float


def measure(scores: Array, chosen: Ids, temperature: float) -> Figures:
    """scores [n, experts] against what the gate chose [n, top_k]."""
    p = probabilities(scores, chosen.shape[1], temperature)
    return Figures(hit_rate(scores, chosen), rank_accuracy(p, chosen))


@dataclass(frozen=True)
class Selected:
    """One layer and phase. `net` holds the tensors of the learned net where it was chosen."""

    chosen: str
    figures: Mapping[str, Figures]  # by predictor: phaseper and the rivals
    temperatures: Mapping[str, float]
    calibration: Calibration
    net: Net | None
    trained: Trained


def eligible(phase: str) -> tuple[str, ...]:
    """Predictors that can serve a phase. Prefill computes a layer for all rows of a step before the
    next one, so the next layer's experts at the token before are not known in time."""
    names = (rivals.CROSS_GATE, rivals.FREQUENCY, rivals.TRANSITION)
    return names if phase == "prefill" else (rivals.PREVIOUS, *names)


def choose(hit: Mapping[str, float], microseconds: Mapping[str, float]) -> str:
    """The cheapest of the predictors that come within WORTH of the best hit rate; of equally cheap
    ones the better."""
    best = max(hit.values())
    near = [name for name in hit if hit[name] >= best - WORTH]
    return min(near, key=lambda name: (microseconds[name], -hit[name], name))


def select(rows: PhaseRows, trained: Trained, cost: Cost = read_time) -> Selected:
    """Measures the net and its rivals on the validation rows (on training rows where there are no
    others) and picks one."""
    pair = trained.job.pair
    ids = some(rows.validation if len(rows.validation) else rows.train, MEASURED)
    chosen = rows.chosen(pair, ids)
    net = as_stored(rows, trained)
    scores = {
        PHASEPER: net.scores(rows.a(pair, ids), rows.features(pair, ids)),
        **rows.rival_scores(pair, ids, rows.tables(pair)),
    }
    truth = membership(chosen, rows.experts)
    temperatures = {n: fit_temperature(s, truth, rows.top_k) for n, s in scores.items()}
    figures = {n: measure(s, chosen, temperatures[n]) for n, s in scores.items()}
    times = {name: cost(name, read) for name, read in bytes_read(rows, net.shape).items()}
    names = (PHASEPER, *eligible(rows.phase))
    best = choose({n: figures[n].hit for n in names}, times)
    return Selected(
        chosen=best,
        figures=figures,
        temperatures=temperatures,
        calibration=calibrate(scores[best], chosen, rows.phase, temperatures[best]),
        net=net if best == PHASEPER else None,
        trained=trained,
    )


def as_stored(rows: PhaseRows, trained: Trained) -> Net:
    """The net with its weights as the file holds them."""
    pair, shape = trained.job.pair, trained.job.candidate.shape
    return Net(shape, file_tensors(shape, trained.parameters, 0, rows.scale[pair]))


def bytes_read(rows: PhaseRows, shape: NetShape) -> dict[str, int]:
    """What one token's prediction reads, by predictor."""
    return {
        PHASEPER: shape.forward_bytes(rows.top_k),
        rivals.CROSS_GATE: 4 * rows.hidden * rows.experts,
        rivals.PREVIOUS: 4 * rows.top_k,
        rivals.FREQUENCY: 4 * rows.top_k,
        rivals.TRANSITION: 4 * rows.top_k * rows.experts,
    }


def entry(rows: PhaseRows, selected: Selected, group: str) -> dict[str, Any]:
    """This layer and phase in phaseper.json."""
    trained, best = selected.trained, selected.chosen
    candidate = trained.job.candidate
    shape, loss, pair = candidate.shape, candidate.loss, trained.job.pair
    about = {n: asdict(f) for n, f in selected.figures.items()}
    net = about.pop(PHASEPER) | {
        "stored": selected.net is not None,
        "width": shape.width,
        "deep": shape.deep,
        "blocks": list(shape.blocks),
        "bytes": shape.bytes(),
        "forward_bytes": shape.forward_bytes(rows.top_k),
        "loss": loss.kind,
        "lambda": loss.lam,
        "gamma": loss.gamma,
        "rows": trained.rows,
        "searched": [
            {
                "loss": c.loss.kind,
                "lambda": c.loss.lam,
                "gamma": c.loss.gamma,
                "width": c.shape.width,
                "hit": hit,
            }
            for c, hit in trained.searched
        ],
    }
    calibration = asdict(selected.calibration)
    diagram = calibration.pop("reliability")
    diagram["error"] = selected.calibration.reliability.error
    return {
        "layer": rows.layers[pair],
        "next": rows.layers[pair + 1],
        "phase": rows.phase,
        "group": group,
        "chosen": best,
        **asdict(selected.figures[best]),
        "rivals": about,
        "net": net,
        **calibration,
        "temperatures": dict(selected.temperatures),
        "reliability": diagram,
    }


def evaluate(
    rows: PhaseRows, ids: NDArray[np.int64], files: PredictorFiles
) -> list[dict[str, Any]]:
    """The stored predictors on rows of other text: one {layer, phase, group, hit, rank_hit, chosen,
    rivals} for each pair of layers. Temperatures and tables are those of the files."""
    out = []
    for pair in rows.pairs:
        layer = rows.layers[pair]
        about, chosen = files.entry(layer, rows.phase), rows.chosen(pair, ids)
        scores = rows.rival_scores(pair, ids, files.tables(layer, rows.phase))
        net = files.net(layer, rows.phase)
        if net is not None:
            scores[PHASEPER] = net.scores(rows.a(pair, ids), rows.features(pair, ids))
        found = {
            name: asdict(measure(s, chosen, about["temperatures"][name]))
            for name, s in scores.items()
        }
        best = about["chosen"]
        made = {key: about[key] for key in ("layer", "phase", "group", "chosen")}
        made |= found[best] if best in found else {"hit": None, "rank_hit": None}
        made["rivals"] = {n: f for n, f in found.items() if n != PHASEPER}
        out.append(made)
    return out
