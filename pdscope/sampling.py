"""Sampling parameters, checked, and the sampler of the runtime behind them.

May import numpy, pdscope.{errors,native}. The choice itself is made in C (pds_sample), which is
stateless and deterministic: the same logits, parameters, seed and draw give the same token.
"""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdscope.errors import InputError
from pdscope.native import Library, ffi

# What the runtime's float32 holds with all its digits, in round numbers.
LEAST, MOST = 1.2e-38, 3.4e38


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    temperature 0 is greedy (the lowest id wins a tie). top_k 0, top_p 1, min_p 0 and
    repetition_penalty 1 are off. `seed` None takes a fresh one from the operating system.
    Raises InputError for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            real = isinstance(value, int | float | np.integer | np.floating)
            _require(name, value, real and not isinstance(value, bool), "a number")
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            _require(name, value, whole or (name == "seed" and value is None), "a whole number")
        penalty, range_ = self.repetition_penalty, f"from {LEAST} to {MOST}"
        warm = self.temperature == 0 or LEAST <= self.temperature <= MOST
        _require("temperature", self.temperature, warm, f"0 (greedy) or {range_}")
        _require("top_k", self.top_k, 0 <= self.top_k < 2**31, f"0 (off) to {2**31 - 1}")
        _require("top_p", self.top_p, LEAST <= self.top_p <= 1, f"from {LEAST} to 1")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1")
        _require("repetition_penalty", penalty, LEAST <= penalty <= MOST, range_)
        _require(
            "seed", self.seed, self.seed is None or 0 <= self.seed < 2**64, "from 0 to 2**64 - 1"
        )

    def with_seed(self) -> int:
        """The seed to use: the given one, or a fresh one."""
        return int.from_bytes(os.urandom(6), "little") if self.seed is None else self.seed


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise InputError(f"{name} is {value!r}, expected {expected}")


class Sampler:
    """pds_sample with its scratch memory and the history of one generation."""

    def __init__(
        self, library: Library, vocab: int, sampling: Sampling, seed: int, capacity: int
    ) -> None:
        """`capacity`: tokens that the history can hold, prompt included."""
        c = ffi()
        self._library = library
        self._sample = library.lib.pds_sample
        self._vocab = vocab
        self._struct = c.new(
            "pds_sampler *",
            {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "repetition_penalty": sampling.repetition_penalty,
                "top_k": sampling.top_k,
                "seed": seed,
            },
        )
        self._values = np.empty(vocab, np.float32)
        self._ids = np.empty(vocab, np.int32)
        self._history = np.empty(capacity, np.int32)
        self._length = 0
        self._c_values = c.from_buffer("float[]", self._values)
        self._c_ids = c.from_buffer("int32_t[]", self._ids)
        self._c_history = c.from_buffer("int32_t[]", self._history)
        self._out = c.new("int32_t *")

    @property
    def history(self) -> NDArray[np.int32]:
        """Ids seen so far, prompt included; a view."""
        return self._history[: self._length]

    def extend(self, ids: NDArray[np.int32]) -> None:
        """Adds ids to the history."""
        self._history[self._length : self._length + len(ids)] = ids
        self._length += len(ids)

    def generate(self, session: Any, seq: int, limit: int, stop: Any) -> tuple[int, list[int]]:
        """pds_generate behind the history: (status, up to `limit` new tokens, a stop id last).

        session: pds_session pointer. stop: int32 array of ids that end it. The tokens join the
        history whatever the status is.
        """
        c = ffi()
        request = c.new(
            "pds_generation *",
            {
                "sampler": self._struct,
                "stop_ids": c.from_buffer("int32_t[]", stop),
                "n_stop_ids": len(stop),
                "n_history": self._length,
                "history": self._c_history,
                "max_tokens": limit,
                "seq": seq,
                "scratch_values": self._c_values,
                "scratch_ids": self._c_ids,
            },
        )
        count = c.new("uint32_t *")
        status = int(self._library.lib.pds_generate(session, request, count))
        begin, self._length = self._length, self._length + int(count[0])
        self._struct.draw += int(count[0])
        return status, self._history[begin : self._length].tolist()

    def draw(self, logits: NDArray[np.float32]) -> int:
        """The next token for fp32 logits [vocab]; it joins the history."""
        row = np.ascontiguousarray(logits, np.float32)
        pointer: Any = ffi().from_buffer("float[]", row)
        self._library.check(
            self._sample(
                pointer,
                self._vocab,
                self._struct,
                self._c_history,
                self._length,
                self._c_values,
                self._c_ids,
                self._out,
            )
        )
        token = int(self._out[0])
        self._struct.draw += 1
        if self._length < len(self._history):
            self._history[self._length] = token
            self._length += 1
        return token
