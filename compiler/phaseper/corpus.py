"""Calibration text as token ids on disk, and the sample of its positions that traces are kept of.

What is kept is known before the model runs: every position has a pseudo-random key, and the ones
with the lowest keys stay. So the sample does not depend on steps, threads or interruptions.
May import numpy and pdscope.{documents,errors,compiler.passmanager}.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.passmanager import disk_errors, writing
from pdscope.documents import Document
from pdscope.errors import PlanError

PHASES = ("prefill", "decode")
SEED = 2610
# Text read for each row kept: rows of more documents say more than neighbours, but each token
# costs a pass through the model.
READ = 4
BLOCK = 1 << 20  # positions that one step of the selection looks at

# Of each position its id and its phases, as bits; of each document where it ends, its hash and how
# many positions it has of each phase.
_FILES: dict[str, type[np.generic]] = {
    "ids": np.int32,
    "kinds": np.uint8,
    "ends": np.int64,
    "hashes": np.uint64,
    "prefill": np.int64,
    "decode": np.int64,
}
_BITS = {"prefill": 1, "decode": 2}


class Corpus:
    """Documents in a directory: token ids, the phases of each, where each document ends."""

    def __init__(self, path: Path) -> None:
        """Raises PlanError when the directory holds no whole corpus."""
        file = path / "corpus.json"
        try:
            sizes = json.loads(file.read_text(encoding="utf-8"))
            arrays = {name: _map(path, name, sizes) for name in _FILES}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlanError(f"{file}: no whole text is there ({error}): compile again") from None
        self._arrays = arrays
        self.ends: NDArray[np.int64] = arrays["ends"]  # [documents] positions up to its end

    @classmethod
    def write(cls, path: Path, documents: Iterable[Document]) -> Self:
        """Writes the documents one by one; a directory is a corpus when it has all of them."""
        with disk_errors(path):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            files = {name: (path / f"{name}.bin").open("wb") for name in _FILES}
            end, sizes = 0, dict.fromkeys(_FILES, 0)
            try:
                for d in documents:
                    end += len(d.ids)
                    digest = hashlib.sha256(d.ids.astype("<i4").tobytes()).digest()
                    parts = {
                        "ids": d.ids,
                        "kinds": _BITS["prefill"] * d.prefill + _BITS["decode"] * d.decode,
                        "ends": np.array([end]),
                        "hashes": np.frombuffer(digest[:8], "<u8"),
                        "prefill": d.prefill.sum(keepdims=True),
                        "decode": d.decode.sum(keepdims=True),
                    }
                    for name, part in parts.items():
                        files[name].write(part.astype(_FILES[name]).tobytes())
                        sizes[name] += len(part)
            finally:
                for stream in files.values():
                    stream.close()
            with writing(path / "corpus.json") as file:
                file.write_text(json.dumps(sizes), encoding="utf-8")
        return cls(path)

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def tokens(self) -> int:
        return len(self._arrays["ids"])

    def begin(self, number: int) -> int:
        """Position in the corpus of a document's first token."""
        return int(self.ends[number - 1]) if number else 0

    def ids(self, positions: NDArray[np.int64] | slice) -> NDArray[np.int32]:
        """Token ids at positions of the corpus."""
        return np.array(self._arrays["ids"][positions])

    def of_phase(self, phase: str, positions: slice) -> NDArray[np.bool_]:
        """Which positions are of a phase."""
        found: NDArray[np.bool_] = (self._arrays["kinds"][positions] & _BITS[phase]) > 0
        return np.array(found)

    def counts(self, phase: str) -> NDArray[np.int64]:
        """Positions of a phase in each document [documents]."""
        return np.array(self._arrays[phase])

    def document(self, number: int) -> Document:
        where = slice(self.begin(number), int(self.ends[number]))
        return Document(
            self.ids(where), self.of_phase("prefill", where), self.of_phase("decode", where)
        )

    def validation(self) -> NDArray[np.bool_]:
        """Documents to validate on, a tenth of them [documents]; copies of one are on one side."""
        return np.array(self._arrays["hashes"] % np.uint64(10) == 0)


@dataclass(frozen=True)
class Sample:
    """What is kept of a corpus."""

    taken: NDArray[np.bool_]  # [documents] those that the model reads
    positions: Mapping[str, NDArray[np.int64]]  # of each phase: kept ones in the corpus, ascending
    seen: Mapping[str, int]  # of each phase: positions of the documents that are read


def choose(corpus: Corpus, rows: int) -> Sample:
    """At most `rows` positions a phase, drawn evenly from the documents that are read: all of them,
    or random ones until both phases have READ times `rows` positions.

    Memory is bounded by `rows` and the number of documents.
    """
    order = np.argsort(_mixed(np.arange(len(corpus)), len(PHASES)))
    need = 0
    for phase in PHASES:
        enough = np.cumsum(corpus.counts(phase)[order]) >= READ * rows
        need = max(need, int(enough.argmax()) + 1 if enough.any() else len(corpus))
    taken = np.zeros(len(corpus), np.bool_)
    taken[order[:need]] = True
    positions = {p: _lowest(corpus, taken, stream, rows) for stream, p in enumerate(PHASES)}
    seen = {p: int(corpus.counts(p)[taken].sum()) for p in PHASES}
    return Sample(taken, positions, seen)


def token_arrays(corpus: Corpus, positions: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """What a trace store says of its rows, [rows] each: token, document, position, split."""
    document = np.searchsorted(corpus.ends, positions, "right")
    begins = np.concatenate(([0], corpus.ends))[document]
    return {
        "token": corpus.ids(positions),
        "document": document,
        "position": positions - begins,
        "split": corpus.validation()[document],
    }


def _lowest(corpus: Corpus, taken: NDArray[np.bool_], stream: int, rows: int) -> NDArray[np.int64]:
    """The positions of phase number `stream` with the `rows` lowest keys, ascending."""
    kept = np.empty(0, np.int64)
    for at in range(0, corpus.tokens, BLOCK):
        block = slice(at, min(at + BLOCK, corpus.tokens))
        fresh = at + np.flatnonzero(corpus.of_phase(PHASES[stream], block))
        fresh = fresh[taken[np.searchsorted(corpus.ends, fresh, "right")]]
        kept = np.concatenate((kept, fresh))
        if len(kept) > rows:
            kept = kept[np.argpartition(_mixed(kept, stream), rows)[:rows]]
    return np.sort(kept)


def _mixed(numbers: NDArray[np.int64], stream: int) -> NDArray[np.uint64]:
    """Pseudo-random 64-bit keys, of different numbers different ones: the finaliser of splitmix64
    (Steele, Lea and Flood, 2014)."""
    z = numbers.astype(np.uint64) + (np.uint64(SEED + stream) << np.uint64(48))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z ^ (z >> np.uint64(31))


def _map(path: Path, name: str, sizes: Mapping[str, int]) -> NDArray[Any]:
    """One of the files, in place; ValueError for another size."""
    file, dtype = path / f"{name}.bin", np.dtype(_FILES[name])
    if file.stat().st_size != sizes[name] * dtype.itemsize:
        raise ValueError(f"{file} was cut short")
    if not sizes[name]:
        return np.empty(0, dtype)
    return np.memmap(file, dtype, "r")
