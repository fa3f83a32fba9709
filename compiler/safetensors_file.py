"""One safetensors file: its header checked entry by entry, its tensors as zero-copy numpy views.

Stricter than the safetensors library, whose messages do not name the tensor: every fault is a
ModelError that names file, tensor, what was expected and what to do. May import numpy and
pdscope.errors.
"""

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pdscope.errors import ModelError

AGAIN = "download the file again"
# Every dtype of the format, and the bits of one element.
DTYPE_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "C64": 64,
}
# The dtypes that PDScope reads. bf16 comes as its bits in uint16: numpy has no bf16.
NUMPY_DTYPE: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `offset` counts from the start of the file."""

    key: str
    dtype: str  # "F32", "BF16", "F16", ...
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"the key {key!r} occurs twice")
        out[key] = value
    return out


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class SafetensorsFile:
    """A checked file. Opening reads the header only; `read` maps the payload."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        try:
            with path.open("rb") as stream:
                self.size = stream.seek(0, 2)
                stream.seek(0)
                header, self._data = self._header(stream.read(8), stream)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
        self.tensors = self._entries(header)

    def fail(self, what: str, remedy: str = AGAIN) -> NoReturn:
        raise ModelError(f"{self.path}: {what}; {remedy}")

    def _header(self, prefix: bytes, stream: Any) -> tuple[dict[str, Any], int]:
        """The header's JSON and the offset of the payload."""
        if len(prefix) < 8:
            self.fail(f"is {len(prefix)} bytes long, too short for a safetensors file")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER:
            self.fail(
                f"header length is {length}, expected at most {MAX_HEADER}: no safetensors file"
            )
        if 8 + length > self.size:
            self.fail(f"header needs {8 + length} bytes, the file has {self.size}: it is cut short")
        raw = stream.read(length)
        try:
            header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            self.fail(f"header is not valid JSON ({error})")
        if not isinstance(header, dict):
            self.fail("header is not a JSON object")
        return header, 8 + length

    def _entries(self, header: dict[str, Any]) -> dict[str, TensorInfo]:
        payload = self.size - self._data
        out = {
            key: self._entry(key, entry) for key, entry in header.items() if key != "__metadata__"
        }
        position, previous = 0, "the start of the payload"
        for info in sorted(out.values(), key=lambda t: (t.offset, t.nbytes)):
            begin, end = info.offset - self._data, info.offset - self._data + info.nbytes
            if begin < position:
                self.fail(f"tensor {info.key}: bytes {begin}..{end} overlap {previous}")
            if begin > position:
                self.fail(
                    f"tensor {info.key}: starts at byte {begin}, expected {position} right after "
                    f"{previous}"
                )
            position, previous = end, f"tensor {info.key}"
            if end > payload:
                self.fail(
                    f"tensor {info.key}: ends at byte {end}, but the file has only {payload} bytes "
                    "of tensors: it is cut short or its offsets are wrong"
                )
        if position != payload:
            self.fail(f"{payload - position} bytes after the last tensor, expected none")
        return out

    def _entry(self, key: str, entry: Any) -> TensorInfo:
        if not key.strip():
            self.fail("header has a tensor with an empty name")
        if not isinstance(entry, dict):
            self.fail(f"tensor {key}: header entry is not a JSON object")
        dtype, shape, offsets = (entry.get(k) for k in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            self.fail(f"tensor {key}: unknown dtype {dtype!r}", "expected F32, F16 or BF16")
        if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
            self.fail(f"tensor {key}: shape is {shape!r}, expected a list of positive integers")
        if any(n == 0 for n in shape):
            self.fail(f"tensor {key}: shape {shape} has a zero dimension", "the tensor is empty")
        if not (
            isinstance(offsets, list) and len(offsets) == 2 and all(_is_count(n) for n in offsets)
        ):
            self.fail(f"tensor {key}: data_offsets is {offsets!r}, expected two byte positions")
        begin, end = offsets
        if begin > end:
            self.fail(f"tensor {key}: data_offsets {offsets} run backwards")
        bits = math.prod(shape) * DTYPE_BITS[dtype]
        if bits % 8 or end - begin != bits // 8:
            self.fail(
                f"tensor {key}: {end - begin} bytes of data, expected {bits // 8} for shape "
                f"{shape} of {dtype}"
            )
        return TensorInfo(key, dtype, tuple(shape), self.path, self._data + begin, end - begin)

    def read(self, key: str) -> NDArray[Any]:
        """The tensor as a read-only view of the mapped file; bf16 as uint16 bits."""
        info = self.tensors[key]
        if info.dtype not in NUMPY_DTYPE:
            raise ModelError(
                f"{self.path}: tensor {key}: dtype {info.dtype} is not supported; use a bf16, fp16 "
                "or fp32 checkpoint of this model"
            )
        dtype = NUMPY_DTYPE[info.dtype]
        if self._map is None:
            with self.path.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            if len(self._map) != self.size:
                self.fail("changed while it was being read", "leave the files alone and try again")
        flat: NDArray[Any] = np.frombuffer(
            self._map, dtype=dtype, count=info.nbytes // dtype.itemsize, offset=info.offset
        )
        if not flat.flags.aligned:  # headers of an odd length are legal, if rare
            flat = flat.copy()
        return flat.reshape(info.shape)
