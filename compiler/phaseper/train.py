"""Training of PhasePer's nets: many side by side in stacked weights, and the search for each one's
loss and width.

Nets are independent: each has its own rows of the stacked tensors and its own share of the summed
loss, so that a net comes out the same whatever it is stacked with. On a CPU the work is cut into
fixed slices of nets, one thread each, so that neither the number of cores nor their load changes a
byte. May import numpy, torch, pdscope.errors and pdscope.compiler.phaseper.*.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdscope.compiler.phaseper.checkpoints import Checkpoints
from pdscope.compiler.phaseper.groups import MIDDLE
from pdscope.compiler.phaseper.losses import DISTILL, LossSpec, paper_loss, stacked_loss
from pdscope.compiler.phaseper.metrics import Array, hit_rate, membership
from pdscope.compiler.phaseper.nets import NetShape, Parameters, forward, initial
from pdscope.compiler.phaseper.rows import CHUNK, PhaseRows
from pdscope.errors import BudgetError

SLICE = 8  # pairs of layers that one CPU thread trains; part of what the result depends on
JUDGED = 8192  # validation rows that a search or early stopping looks at
# Hit rate that twice the width gains on all rows, and not yet on those of a search (measured on
# tiny-deepseek-v2, decode, 256 -> 512: 0.0037). Half the width has to lead by it.
WIDER = 0.003
NOT_SAVED = Checkpoints(None)


@dataclass(frozen=True)
class TrainOptions:
    """What decides the result besides the traces. Rows count with repetition."""

    seed: int = 0
    size_budget: int = 4_200_000  # bytes of one layer's file, both phases
    width: int = 512  # of the widest nets, where the budget allows it
    batch: int = 1024
    rows: int = 2_000_000  # that a net is trained on
    epochs: int = 24  # passes over the rows, where there are few
    search_rows: tuple[int, ...] = (40_000, 120_000)  # of the rounds; each halves the candidates
    learning_rate: float = 4.5e-3
    weight_decay: float = 0.01
    checks: int = 10  # looks at the validation rows
    patience: int = 4  # looks without a gain before training stops early


@dataclass(frozen=True)
class Candidate:
    loss: LossSpec
    shape: NetShape


@dataclass(frozen=True)
class Job:
    """One net to train. `pair` is its layer's index."""

    pair: int
    candidate: Candidate


@dataclass(frozen=True)
class Trained:
    """`parameters` of one net, on the CPU, in stacks of one, none of a search's; `hit`: on the
    judged validation rows; `rows`: that it was trained on when it was best; `searched`: (candidate,
    hit rate) of every round's candidates."""

    job: Job
    parameters: Parameters
    hit: float
    rows: int
    searched: tuple[tuple[Candidate, float], ...] = ()


def fitting_width(
    hidden: int, experts: int, blocks: tuple[str, ...], deep: bool, budget: int, most: int
) -> int:
    """The most hidden units, a multiple of 16 and at most `most`, whose net takes at most `budget`
    bytes. Raises BudgetError when 16 do not fit."""
    for width in range(most - most % 16, 0, -16):
        if NetShape(hidden, experts, width, deep, blocks).bytes() <= budget:
            return width
    least = NetShape(hidden, experts, 16, deep, blocks).bytes()
    raise BudgetError(
        f"a predictor of {budget} bytes a layer and phase: the smallest of this model takes "
        f"{least}; raise --predictor-budget (bytes of a layer's both phases) to {2 * least}, or "
        "leave predictors out: --predictor off"
    )


def candidates(rows: PhaseRows, group: str, options: TrainOptions) -> list[Candidate]:
    """What the search tries for a layer of `group`: the paper's losses and distillation, the
    shallow net in outer groups and the deep one in the middle."""
    deep = group == MIDDLE
    budget = options.size_budget // 2  # prefill's net and decode's
    most = options.width if not deep else options.width * 3 // 4
    width = fitting_width(rows.hidden, rows.experts, rows.blocks, deep, budget, most)
    shape = NetShape(rows.hidden, rows.experts, width, deep, rows.blocks)
    grid = [(0.0, 0.0)] if deep else [(0.5, 1.0), (2.0, 2.0)]
    losses = [paper_loss(group, rows.phase, lam, gamma) for lam, gamma in grid]
    found = [Candidate(loss, shape) for loss in [*losses, LossSpec(DISTILL)]]
    if width >= 32:
        narrow = replace(shape, width=(width // 2) - (width // 2) % 16)
        found.append(Candidate(LossSpec(DISTILL), narrow))
    return found


def train_phases(
    phases: Mapping[str, PhaseRows],
    groups: Sequence[str],
    options: TrainOptions,
    threads: int,
    progress: Callable[[int], None] = lambda _: None,
    saved: Checkpoints = NOT_SAVED,
) -> dict[str, list[Trained]]:
    """The best net of every phase and pair of layers, in order; on a CPU `threads` of their slices
    train at a time.

    groups[i]: group of pair i's layer. progress: receives rows trained on since its last call, over
    all nets. saved: what an earlier call has left there is gone on with, and comes out the same.
    """
    work = [
        (phase, list(rows.pairs[at : at + SLICE]))
        for phase, rows in phases.items()
        for at in range(0, len(rows.pairs), SLICE)
    ]

    def one(item: tuple[str, list[int]]) -> list[Trained]:
        torch.set_num_threads(1)  # of this thread's operations
        return train_slice(phases[item[0]], item[1], groups, options, progress, saved)

    found: dict[str, list[Trained]] = {phase: [] for phase in phases}
    if any(rows.device.type != "cpu" for rows in phases.values()):
        for phase, rows in phases.items():  # one after the other: memory
            rows.load()
            found[phase] = train_slice(rows, list(rows.pairs), groups, options, progress, saved)
            rows.release()
        return found
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for (phase, _), trained in zip(work, pool.map(one, work), strict=True):
            found[phase] += trained
    for rows in phases.values():
        rows.release()
    return found


def train_slice(
    rows: PhaseRows,
    pairs: Sequence[int],
    groups: Sequence[str],
    options: TrainOptions,
    progress: Callable[[int], None],
    saved: Checkpoints = NOT_SAVED,
) -> list[Trained]:
    """Successive halving: every candidate of a pair is trained on few rows, the better half on
    more, and the best on all."""
    name = f"{rows.phase}-{pairs[0]}"
    left = {pair: candidates(rows, groups[pair], options) for pair in pairs}
    history: dict[int, list[tuple[Candidate, float]]] = {pair: [] for pair in pairs}
    for number, count in enumerate(options.search_rows):
        jobs = [Job(pair, c) for pair in pairs for c in left[pair] if len(left[pair]) > 1]
        judged: dict[int, list[tuple[Candidate, float]]] = {}
        stage = Stage(saved, f"{name}-search{number}", keep=False)
        for trained in train_jobs(rows, jobs, count, options, progress, stage):
            judged.setdefault(trained.job.pair, []).append((trained.job.candidate, trained.hit))
        for pair, results in judged.items():
            history[pair] += results
            results.sort(key=lambda r: -_merit(r))
            left[pair] = [c for c, _ in results[: len(results) // 2]]
    jobs = [Job(pair, left[pair][0]) for pair in pairs]
    stage = Stage(saved, f"{name}-last", keep=True)
    best = train_jobs(rows, jobs, options.rows, options, progress, stage)
    return [replace(t, searched=tuple(history[t.job.pair])) for t in best]


def _merit(result: tuple[Candidate, float]) -> float:
    """Hit rate, and what a wider net has yet to gain."""
    return result[1] + WIDER * math.log2(result[0].shape.width)


@dataclass(frozen=True)
class Stage:
    """A training of many stacks: where their states are saved, and whether their parameters
    matter."""

    saved: Checkpoints
    name: str
    keep: bool


def train_jobs(
    rows: PhaseRows,
    jobs: Sequence[Job],
    count: int,
    options: TrainOptions,
    progress: Callable[[int], None] = lambda _: None,
    stage: Stage | None = None,
) -> list[Trained]:
    """Trains each job's net on `count` rows, those of one shape side by side. In `jobs`' order."""
    stage = stage or Stage(NOT_SAVED, "", keep=True)
    made: dict[Job, Trained] = {}
    ordered = sorted(jobs, key=lambda j: (str(j.candidate.shape), j.pair))
    for number, (_, same) in enumerate(groupby(ordered, key=lambda j: j.candidate.shape)):
        part = replace(stage, name=f"{stage.name}-{number}")
        stack = _Stack(rows, list(same), count, options, stage.keep)
        for trained in stack.train(progress, part):
            made[trained.job] = trained
    return [made[job] for job in jobs]


class _Stack:
    """Nets of one shape, and how far their training is."""

    def __init__(
        self, rows: PhaseRows, jobs: list[Job], count: int, options: TrainOptions, keep: bool
    ) -> None:
        self.rows, self.jobs, self.options = rows, jobs, options
        self.shape = jobs[0].candidate.shape
        self.pairs = [j.pair for j in jobs]
        self.batch = min(options.batch, max(len(rows.train), 1))
        self.steps = max(1, min(count, options.epochs * len(rows.train)) // self.batch)
        self.best = _Best(rows, self.shape, jobs, keep)
        self.step = 0

    def _begin(self) -> None:
        generator = torch.Generator().manual_seed(self.options.seed)
        linear = _cross_gates(self.rows, self.pairs)
        self.parameters = initial(self.shape, linear, generator, self.rows.device)
        for tensor in self.parameters.values():
            tensor.requires_grad_()
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=self.options.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=self.options.weight_decay,
            fused=True,
        )

    def train(self, progress: Callable[[int], None], stage: Stage) -> list[Trained]:
        """Ends early where no net gets better any more."""
        rows, steps, pairs = self.rows, self.steps, self.pairs
        state = stage.saved.load(stage.name, rows.device)
        if state is not None:
            self.step = state["step"]
            self.best.restore(state["best"])
            progress(self.step * self.batch * len(self.jobs))
            if state["done"]:
                return self.best.trained()
        self._begin()
        if state is not None:
            with torch.no_grad():
                for name, tensor in self.parameters.items():
                    tensor.copy_(state["parameters"][name])
            self.optimizer.load_state_dict(state["optimizer"])
        specs = [j.candidate.loss for j in self.jobs]
        truth = any(spec.kind != DISTILL for spec in specs)
        frequency = torch.from_numpy(np.stack([rows.frequency(p) for p in pairs]))
        frequency = frequency[:, None].to(rows.device)
        checks = self.options.checks if self.best.keep else 1  # a search asks for the end alone
        looks = {steps * (i + 1) // checks for i in range(checks)} | {steps}
        batches = _shuffled(rows.train, self.batch, steps, self.options.seed)
        for ids in islice(batches, self.step, None):
            self.step += 1
            for group in self.optimizer.param_groups:
                group["lr"] = self.options.learning_rate * _schedule(self.step, steps)
            b = rows.batch(pairs, ids, truth)
            found = forward(self.shape, self.parameters, b.x, rows.dtype)
            loss = stacked_loss(specs, found, b.truth, b.soft, frequency, rows.top_k)
            self.optimizer.zero_grad()
            torch.autograd.backward(loss)
            self.optimizer.step()
            progress(len(ids) * len(self.jobs))
            if self.step in looks:
                barren = self.best.look(self.parameters, self.step * self.batch)
                if barren >= self.options.patience:
                    break
            if stage.saved.due(stage.name):
                stage.saved.save(stage.name, self._state())
        end = {"done": True, "step": self.step, "best": self.best.state()}
        stage.saved.save(stage.name, end)
        return self.best.trained()

    def _state(self) -> dict[str, Any]:
        parameters = {name: tensor.detach() for name, tensor in self.parameters.items()}
        return {
            "done": False,
            "step": self.step,
            "best": self.best.state(),
            "parameters": parameters,
            "optimizer": self.optimizer.state_dict(),
        }


class _Best:
    """How each net did when it did best on the validation rows, and its parameters then if `keep`
    says so."""

    def __init__(self, rows: PhaseRows, shape: NetShape, jobs: list[Job], keep: bool) -> None:
        self.rows, self.shape, self.jobs, self.keep = rows, shape, jobs, keep
        self.judged = some(rows.validation if len(rows.validation) else rows.train, JUDGED)
        self.hit = [-1.0] * len(jobs)
        self.seen = [0] * len(jobs)
        self.kept: list[Parameters] = [{} for _ in jobs]
        self.barren = 0

    def look(self, parameters: Parameters, seen: int) -> int:
        """Gives how many looks ago any net last did better than before."""
        pairs = [j.pair for j in self.jobs]
        hits = self._hits(parameters, pairs)
        self.barren += 1
        for i, hit in enumerate(hits):
            if hit > self.hit[i]:
                self.hit[i], self.seen[i], self.barren = hit, seen, 0
                if self.keep:
                    self.kept[i] = {
                        n: p[i : i + 1].detach().cpu().clone() for n, p in parameters.items()
                    }
        return self.barren

    def _hits(self, parameters: Parameters, pairs: Sequence[int]) -> list[float]:
        """hit_rate of each net, on the device where the nets are."""
        if self.rows.device.type == "cpu":
            scores = logits(self.rows, self.shape, parameters, pairs, self.judged)
            return [
                hit_rate(s, self.rows.chosen(pair, self.judged))
                for s, pair in zip(scores, pairs, strict=True)
            ]
        found = torch.zeros(len(pairs), dtype=torch.float64, device=self.rows.device)
        for at in range(0, len(self.judged), CHUNK):
            part = self.judged[at : at + CHUNK]
            truth = np.stack(
                [membership(self.rows.chosen(p, part), self.rows.experts) for p in pairs]
            )
            with torch.no_grad():
                made = forward(
                    self.shape, parameters, self.rows.inputs(pairs, part), self.rows.dtype
                )
                best = made.topk(self.rows.top_k, dim=2).indices
                right = torch.from_numpy(truth).to(made.device).gather(2, best)
            found += right.sum((1, 2)) / self.rows.top_k
        hits: list[float] = (found / max(1, len(self.judged))).tolist()
        return hits

    def state(self) -> dict[str, Any]:
        return {"hit": self.hit, "seen": self.seen, "barren": self.barren, "kept": self.kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.hit, self.seen, self.barren = state["hit"], state["seen"], state["barren"]
        self.kept = [{n: p.cpu() for n, p in net.items()} for net in state["kept"]]

    def trained(self) -> list[Trained]:
        found = zip(self.jobs, self.kept, self.hit, self.seen, strict=True)
        return [Trained(*one) for one in found]


def logits(
    rows: PhaseRows,
    shape: NetShape,
    parameters: Parameters,
    pairs: Sequence[int],
    ids: NDArray[np.int64],
) -> Array:
    """[nets, rows, experts], as in training."""
    made = []
    with torch.no_grad():
        for at in range(0, len(ids), CHUNK):
            x = rows.inputs(pairs, ids[at : at + CHUNK])
            made.append(forward(shape, parameters, x, rows.dtype).cpu().numpy())
    if not made:
        return np.zeros((len(pairs), 0, rows.experts), np.float32)
    out: Array = np.concatenate(made, 1)
    return out


def some(ids: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """At most `most` of the rows, spread evenly, in order."""
    if len(ids) <= most:
        return ids
    return ids[np.linspace(0, len(ids) - 1, most).astype(np.int64)]


def _cross_gates(rows: PhaseRows, pairs: Sequence[int]) -> Tensor:
    """The linear map that nets begin as, [nets, inputs + 1, experts]: the next layer's gate, so
    that a net starts as its strongest rival."""
    linear = torch.zeros(len(pairs), rows.scale.shape[1] + 1, rows.experts)
    for i, pair in enumerate(pairs):
        weight = rows.gates[rows.layers[pair + 1]].weight
        linear[i, : rows.hidden] = torch.from_numpy(np.array(weight, np.float32)).T
    return linear.to(rows.device)


def _shuffled(
    ids: NDArray[np.int64], batch: int, steps: int, seed: int
) -> Iterator[NDArray[np.int64]]:
    """`steps` batches of rows, pass after pass in fresh orders; rows of a batch ascend."""
    generator = np.random.Generator(np.random.PCG64(seed))
    order, at = generator.permutation(ids), 0
    for _ in range(steps):
        if at + batch > len(order):
            order, at = generator.permutation(ids), 0
        yield np.sort(order[at : at + batch])
        at += batch


def _schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: a short rise, then half a cosine down to 2 %."""
    rise = min(1.0, step / max(1, min(100, steps // 10)))
    return rise * (0.02 + 0.49 * (1 + math.cos(math.pi * (step - 1) / steps)))


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Within the block every operation of torch runs on the thread that asked for it: sums are
    taken in one order, however many cores there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
