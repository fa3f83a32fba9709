"""routing.npz: what the gates of a run chose and what was predicted, step by step.

docs/routing-traces.md describes the file. The simulator replays it (pdscope.compiler.simulate).
May import numpy and pdscope.{errors,observe}, the names of pdscope.ir.isa; pdscope.session for its
types alone.
"""

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from pdscope.errors import InputError
from pdscope.ir.isa import MAX_EXPERTS, Opcode
from pdscope.observe import TapEvent

if TYPE_CHECKING:
    from pdscope.session import Session

FORMAT = 1
_REMEDY = "record it again with pdscope-run --save-routing"

Ids = NDArray[np.int16]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class LayerRoutes:
    """One MoE layer's part of a step of n rows.

    ids, weights [n, top_k]: what its gate chose, in rank order. predicted, sure [n, top_k]: what it
    predicted for the layer right behind it, and how sure it was, 0 to 1; -1 where nothing was.
    """

    ids: Ids
    weights: Floats
    predicted: Ids
    sure: Floats


@dataclass(frozen=True)
class Step:
    """Rows of a step, and how many of them wanted logits. Layers by model-layer number."""

    position: NDArray[np.int32]  # [n]
    seq: NDArray[np.int32]  # [n]
    logits: int
    layers: dict[int, LayerRoutes]

    @property
    def rows(self) -> int:
        return len(self.position)


@dataclass(frozen=True)
class RoutingTrace:
    """All steps in one table of R rows; arrays [MoE layers, R, top_k] but for the first four."""

    experts: int  # of a layer
    rows: NDArray[np.int32]  # [steps] of each step
    logits: NDArray[np.int32]  # [steps]
    position: NDArray[np.int32]  # [R]
    seq: NDArray[np.int32]  # [R]
    layers: NDArray[np.int32]  # [MoE layers] model-layer numbers, ascending
    ids: Ids
    weights: Floats
    predicted: Ids
    sure: Floats

    @property
    def top_k(self) -> int:
        return int(self.ids.shape[2])

    @property
    def predicts(self) -> bool:
        return bool((self.predicted >= 0).any())

    def steps(self) -> Iterator[Step]:
        end = 0
        for n, logits in zip(self.rows.tolist(), self.logits.tolist(), strict=True):
            at = slice(end, end := end + n)
            yield Step(
                self.position[at],
                self.seq[at],
                logits,
                {
                    layer: LayerRoutes(
                        self.ids[i, at],
                        self.weights[i, at],
                        self.predicted[i, at],
                        self.sure[i, at],
                    )
                    for i, layer in enumerate(self.layers.tolist())
                },
            )

    def save(self, path: str | Path) -> None:
        """Writes the file aside and renames it. Raises OSError, which names the file."""
        target = Path(os.path.realpath(path))
        aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        arrays: dict[str, Any] = {n: v for n, v in vars(self).items() if n != "experts"}
        head = np.array([FORMAT, self.experts], np.int32)
        try:
            with aside.open("wb") as file:
                np.savez_compressed(file, pdscope_routing=head, **arrays)
            os.replace(aside, target)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            aside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Raises InputError naming file, field, what was expected and the remedy."""
        names = [name for name in cls.__dataclass_fields__ if name != "experts"]
        try:
            with np.load(path, allow_pickle=False) as file:
                missing = [n for n in ("pdscope_routing", *names) if n not in file]
                if missing:
                    raise InputError(f"{path}: {missing[0]}: missing: {_REMEDY}")
                head = file["pdscope_routing"].tolist()
                arrays = {name: file[name] for name in names}
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
        except (ValueError, zipfile.BadZipFile, EOFError, AttributeError) as error:
            raise InputError(f"{path}: not a routing trace ({error}): {_REMEDY}") from None
        if not isinstance(head, list) or head[:1] != [FORMAT] or len(head) != 2:
            raise InputError(
                f"{path}: pdscope_routing: {head}, expected [{FORMAT}, experts]: {_REMEDY}"
            )
        trace = cls(experts=head[1], **arrays)
        if problem := trace.problem():
            raise InputError(f"{path}: {problem}: {_REMEDY}")
        return trace

    def problem(self) -> str | None:
        """The first field that is not as it should be: its name, and what was expected."""
        ends: dict[str, tuple[int, ...]] = {
            "rows": (len(self.rows),),
            "logits": (len(self.rows),),
            "position": (self.position.shape[:1] or (0,)),
            "seq": (self.position.shape[:1] or (0,)),
            "layers": (len(self.layers),),
        }
        shape = (len(self.layers), *self.position.shape[:1], *self.ids.shape[2:3])
        ends |= dict.fromkeys(("ids", "weights", "predicted", "sure"), shape)
        for name, wanted in ends.items():
            array = getattr(self, name)
            kind = "f" if name in ("weights", "sure") else "i"
            if array.shape != wanted or array.dtype.kind != kind:
                what = "floats" if kind == "f" else "integers"
                return f"{name}: {array.dtype} of shape {array.shape}, expected {what} {wanted}"
        if not len(self.rows) or not len(self.layers) or not self.top_k:
            return "rows: no step, no layer or no expert, expected one at least"
        if (self.rows < 1).any() or int(self.rows.sum()) != len(self.position):
            return f"rows: sum to {int(self.rows.sum())}, expected {len(self.position)}, from 1 on"
        if not 1 <= self.experts <= MAX_EXPERTS:
            return f"pdscope_routing: {self.experts} experts, expected 1 to {MAX_EXPERTS}"
        for name, least in (("ids", 0), ("predicted", -1)):
            array = getattr(self, name)
            if array.min() < least or array.max() >= self.experts:
                return f"{name}: {array.min()} to {array.max()}, expected {least} to " + str(
                    self.experts - 1
                )
        for name in ("weights", "sure"):
            if not np.isfinite(getattr(self, name)).all():
                return f"{name}: not all are finite"
        return None


class Recorder:
    """Collects the steps of sessions that it watches: `with recorder.watch(session)`."""

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self._heads: list[tuple[NDArray[np.int32], NDArray[np.int32], int]] = []
        self._routes: list[dict[int, LayerRoutes]] = []

    @contextmanager
    def watch(self, session: "Session") -> Iterator[Self]:
        """Inside, every step of the session is recorded. Results stay the same; steps take
        longer."""
        with session.tap(self._tap):
            yield self

    def _tap(self, event: TapEvent) -> None:
        if event.opcode == Opcode.EMBED:
            assert event.position is not None and event.seq is not None
            self._heads.append((event.position.copy(), event.seq.copy(), event.logits))
            self._routes.append({})
        elif event.opcode == Opcode.GATE:
            assert event.ids is not None
            predicted = np.full(event.ids.shape, -1, np.int16)
            sure = np.zeros(event.ids.shape, np.float32)
            if event.predicted is not None:  # fused into the gate: it says what, not how surely
                predicted[:], sure[:] = event.predicted, 1
            ids = event.ids.astype(np.int16)
            self._routes[-1][event.layer] = LayerRoutes(ids, event.data.copy(), predicted, sure)
        elif event.opcode == Opcode.PREDICT and event.ids is not None:
            routes = self._routes[-1][event.layer]
            # Of larger steps a sample predicts: rows 0, step, 2 step ...
            step = -(-len(routes.ids) // len(event.ids))
            routes.predicted[::step] = event.ids
            routes.sure[::step] = event.data

    def trace(self) -> RoutingTrace:
        """What was recorded. Raises InputError if nothing was."""
        # A step that failed has not come to its last layer.
        layers = sorted({layer for routes in self._routes for layer in routes})
        whole = [i for i, routes in enumerate(self._routes) if len(routes) == len(layers)]
        if not layers:
            raise InputError("routing: no step with experts was run, so there is nothing to save")
        routes, heads = [self._routes[i] for i in whole], [self._heads[i] for i in whole]

        def table(name: str) -> Any:
            return np.stack(
                [np.concatenate([getattr(r[layer], name) for r in routes]) for layer in layers]
            )

        return RoutingTrace(
            experts=self.experts,
            rows=np.array([len(p) for p, _, _ in heads], np.int32),
            logits=np.array([n for _, _, n in heads], np.int32),
            position=np.concatenate([p for p, _, _ in heads]),
            seq=np.concatenate([s for _, s, _ in heads]),
            layers=np.array(layers, np.int32),
            ids=table("ids"),
            weights=table("weights"),
            predicted=table("predicted"),
            sure=table("sure"),
        )
