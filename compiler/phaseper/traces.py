"""Routing traces on disk: for each phase a sample of tokens, and what every MoE layer's gate was
given and chose for each of them.

A store is a directory. `store.json` describes it and is written last; each array is a .npy file.
While a store is being written, `progress.json` counts the whole chunks: a writer that was killed
goes on behind them. May import numpy and pdscope.{errors,compiler.passmanager,compiler.quantise}.
"""

import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.passmanager import disk_errors, writing
from pdscope.compiler.quantise import to_bfloat16
from pdscope.errors import PlanError

Array = NDArray[Any]

FORMAT = 1
PHASES = ("prefill", "decode")
STORE, PROGRESS = "store.json", "progress.json"
BUFFER = 64 << 20  # bytes that a writer gathers: files are many, and a step's rows few

TOKEN_ARRAYS = {"token": np.int32, "document": np.int32, "position": np.int32, "split": np.bool_}
LAYER_ARRAYS = ("a", "w", "e", "prev")


@dataclass(frozen=True)
class TraceShape:
    """What a store holds: `rows` and `seen` have one entry a phase."""

    hidden: int
    experts: int
    top_k: int
    layers: tuple[int, ...]  # model-layer numbers of the MoE layers, ascending
    rows: Mapping[str, int]  # rows kept
    seen: Mapping[str, int]  # rows of the text, of which those are a sample

    def array(self, name: str, phase: str) -> tuple[np.dtype[Any], tuple[int, int]]:
        """Type and shape of one of a layer's arrays."""
        n = self.rows[phase]
        if name == "a":
            return np.dtype(np.uint16), (n, self.hidden)
        if name == "w":
            return np.dtype(np.float32), (n, self.top_k)
        return np.dtype(np.int16 if self.experts < 2**15 else np.int32), (n, self.top_k)

    def row_bytes(self) -> int:
        """Bytes of one row of one phase on disk, over all layers."""
        arrays = [self.array(name, PHASES[0]) for name in LAYER_ARRAYS]
        per_layer = sum(dtype.itemsize * shape[1] for dtype, shape in arrays)
        tokens = sum(np.dtype(dtype).itemsize for dtype in TOKEN_ARRAYS.values())
        return tokens + len(self.layers) * per_layer


@dataclass(frozen=True)
class LayerTrace:
    """One MoE layer's rows of one phase; row i is the same token in every layer."""

    a: NDArray[np.uint16]  # [n, hidden] bf16 bits of the gate's input, a read-only memory map
    w: NDArray[np.float32]  # [n, top_k] routing weights, in rank order
    e: NDArray[np.int32]  # [n, top_k] expert ids, in rank order
    prev: NDArray[np.int32]  # [n, top_k] those of the token before; -1: none before it


class TraceStore:
    """A finished store, read through memory maps."""

    def __init__(self, path: Path, key: str, shape: TraceShape) -> None:
        self.path = path
        self.key = key  # of the plan, the text and the options that it was made from
        self.shape = shape
        self.phases = PHASES
        self.layers = list(shape.layers)
        self.hidden, self.experts, self.top_k = shape.hidden, shape.experts, shape.top_k

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Raises PlanError naming the file for what is no store, or one that was cut short."""
        path = Path(path)
        file = path / STORE
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            if data["format_version"] != FORMAT:
                raise PlanError(
                    f"{file}: format_version is {data['format_version']!r}, expected {FORMAT}: "
                    "collect the traces again"
                )
            layers = tuple(data["shape"].pop("layers"))
            shape = TraceShape(layers=layers, **data["shape"])
            store = cls(path, str(data["key"]), shape)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(
                f"{file}: is no description of finished traces ({error}): collect them again"
            ) from None
        store._check()
        return store

    def rows(self, phase: str) -> int:
        return self.shape.rows[phase]

    def layer(self, phase: str, layer: int) -> LayerTrace:
        """Rows of the MoE layer with model-layer number `layer`."""
        a, w, e, prev = (self._load(layer_file(phase, layer, x)) for x in LAYER_ARRAYS)
        return LayerTrace(a, np.array(w), e.astype(np.int32), prev.astype(np.int32))

    def token(self, phase: str) -> NDArray[np.int32]:
        """Token ids [n]."""
        return np.array(self._load(f"{phase}/token.npy"))

    def document(self, phase: str) -> NDArray[np.int32]:
        """Number of each row's document in the text [n]; rows ascend by document and position."""
        return np.array(self._load(f"{phase}/document.npy"))

    def position(self, phase: str) -> NDArray[np.int32]:
        """Position of each row in its document [n]."""
        return np.array(self._load(f"{phase}/position.npy"))

    def split(self, phase: str) -> NDArray[np.bool_]:
        """True [n]: validation. About a tenth of the documents, whole ones, by their content."""
        return np.array(self._load(f"{phase}/split.npy"))

    def _load(self, name: str) -> Array:
        try:
            loaded: Array = np.load(self.path / name, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise PlanError(
                f"{self.path / name}: cannot be read ({error}): collect the traces again"
            ) from None
        return loaded

    def _check(self) -> None:
        for phase in PHASES:
            for name in TOKEN_ARRAYS:
                self._check_array(f"{phase}/{name}.npy", (self.shape.rows[phase],))
            for layer in self.layers:
                for name in LAYER_ARRAYS:
                    _, shape = self.shape.array(name, phase)
                    self._check_array(layer_file(phase, layer, name), shape)

    def _check_array(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._load(name).shape
        if found != shape:
            raise PlanError(
                f"{self.path / name}: has shape {found}, expected {shape}: collect the traces again"
            )


def layer_file(phase: str, layer: int, name: str) -> str:
    """Relative path of one of a layer's arrays."""
    return f"{phase}/layer{layer:03d}.{name}.npy"


class TraceWriter:
    """Writes a store row by row, in order; every row lies in the files of its chunk when
    `end_chunk` returns."""

    def __init__(
        self,
        path: Path,
        key: str,
        shape: TraceShape,
        tokens: Mapping[str, Mapping[str, Array]],
    ) -> None:
        """Goes on behind the last chunk in `path` if that was begun with the same `key`; else what
        is there is deleted. `tokens`: for each phase the arrays of TOKEN_ARRAYS, [rows] each."""
        self.path, self.key, self.shape = path, key, shape
        self.done = 0  # the caller's count of what the whole chunks hold
        self._written = dict.fromkeys(PHASES, 0)
        self._pending: dict[str, list[Array]] = {}  # by file: rows that are not there yet
        self._bytes = 0  # of them
        if self._resume():
            return
        with disk_errors(path):
            shutil.rmtree(path, ignore_errors=True)
            for phase in PHASES:
                (path / phase).mkdir(parents=True)
                for name, kind in TOKEN_ARRAYS.items():
                    np.save(path / phase / f"{name}.npy", tokens[phase][name].astype(kind))
                for file, dtype, size in self._files(phase):
                    file.write_bytes(_header(dtype, size))
        self.end_chunk(0)

    def add(self, phase: str, layers: Mapping[int, Mapping[str, Array]]) -> None:
        """The next rows of a phase: for every layer its LAYER_ARRAYS, `a` as float32 [n, hidden],
        which is rounded to bf16, nearest even."""
        count = 0
        for layer, arrays in layers.items():
            for name in LAYER_ARRAYS:
                dtype, _ = self.shape.array(name, phase)
                data = to_bfloat16(arrays[name]) if name == "a" else arrays[name].astype(dtype)
                self._pending.setdefault(layer_file(phase, layer, name), []).append(data)
                self._bytes += data.nbytes
                count = len(data)
        self._written[phase] += count
        if self._bytes > BUFFER:
            self._write()

    def _write(self) -> None:
        with disk_errors(self.path):
            for name, parts in self._pending.items():
                with (self.path / name).open("ab") as file:
                    for part in parts:
                        file.write(part.tobytes())
        self._pending, self._bytes = {}, 0

    def end_chunk(self, done: int) -> None:
        """What was added so far outlives a kill; the next writer here finds `done` again."""
        self._write()
        self.done = done
        state = {"key": self.key, "done": done, "rows": self._written}
        with writing(self.path / PROGRESS) as file:
            file.write_text(json.dumps(state), encoding="utf-8")

    def written_bytes(self) -> int:
        """Bytes of the rows that are on disk."""
        return sum(self._written.values()) * self.shape.row_bytes()

    def finish(self) -> TraceStore:
        """Makes the store one that TraceStore.open reads."""
        assert self._written == dict(self.shape.rows), (self._written, self.shape.rows)
        self._write()
        data = {"format_version": FORMAT, "key": self.key, "shape": asdict(self.shape)}
        with writing(self.path / STORE) as file:
            file.write_text(json.dumps(data, indent=1), encoding="utf-8")
        (self.path / PROGRESS).unlink()
        return TraceStore.open(self.path)

    def _resume(self) -> bool:
        """Cuts the files back to the last whole chunk; False if there is none of this key."""
        try:
            state = json.loads((self.path / PROGRESS).read_text(encoding="utf-8"))
            if state["key"] != self.key:
                return False
            done, written = int(state["done"]), {p: int(state["rows"][p]) for p in PHASES}
            for phase in PHASES:
                for file, dtype, size in self._files(phase):
                    row = dtype.itemsize * size[1]
                    end = len(_header(dtype, size)) + written[phase] * row
                    if file.stat().st_size < end:
                        return False
                    os.truncate(file, end)
        except (OSError, ValueError, KeyError, TypeError):
            return False
        self.done, self._written = done, written
        return True

    def _files(self, phase: str) -> Iterator[tuple[Path, np.dtype[Any], tuple[int, int]]]:
        for layer in self.shape.layers:
            for name in LAYER_ARRAYS:
                yield self.path / layer_file(phase, layer, name), *self.shape.array(name, phase)


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """What a .npy file of this shape begins with; its rows follow."""
    out = io.BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, fields)
    return out.getvalue()
