"""Safetensors checkpoints: which tensor is which parameter, and does it fit the model.

Names are mapped by transformers' own conversion table, so PDScope accepts what transformers
accepts. Weights stay in the mapped files until they are asked for. May import numpy,
transformers, pdscope.compiler.{input_file,safetensors_file} and pdscope.errors.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from pdscope.compiler.input_file import check_file
from pdscope.compiler.safetensors_file import AGAIN, NUMPY_DTYPE, SafetensorsFile, TensorInfo
from pdscope.errors import ModelError

__all__ = [
    "Checkpoint",
    "DummyWeights",
    "Source",
    "TensorInfo",
    "Weights",
    "check_finite",
    "map_parameters",
]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NOISE = (
    4_194_301  # values in the block that dummy weights are cut from: the largest prime below 2^22
)
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
Array = NDArray[Any]
# (bytes hashed so far, bytes in all)
Progress = Callable[[int, int], None]


class Checkpoint:
    """The safetensors files of a model directory, every header checked. Reads no weight.

    tensors: every tensor of the checkpoint by key.
    """

    def __init__(self, directory: Path, files: dict[str, SafetensorsFile]) -> None:
        self.directory = directory
        self._files = files
        self._owner: dict[str, SafetensorsFile] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for file in files.values():
            for key, info in file.tensors.items():
                if key in self._owner:
                    raise ModelError(
                        f"{file.path}: tensor {key} is also in {self._owner[key].path.name}; "
                        "expected every tensor once, remove the file that does not belong here"
                    )
                self._owner[key] = file
                self.tensors[key] = info

    @classmethod
    def open(cls, directory: Path | str) -> "Checkpoint":
        """Checks the files of `directory`; ModelError names file, tensor and remedy."""
        directory = Path(directory)
        if not directory.is_dir():
            raise ModelError(f"{directory}: not a directory, so it holds no weights")
        for name in (SINGLE, INDEX):
            check_file(directory / name)
        if (directory / SINGLE).exists():  # transformers prefers it to an index, too
            return cls(directory, {SINGLE: SafetensorsFile(directory / SINGLE)})
        index = directory / INDEX
        if not index.exists():
            _no_checkpoint(directory)
        weight_map = _read_index(index)
        files: dict[str, SafetensorsFile] = {}
        for name in sorted(set(weight_map.values())):
            check_file(directory / name)
            if not (directory / name).exists():
                count = sum(1 for v in weight_map.values() if v == name)
                raise ModelError(
                    f"{directory / name}: missing, but {INDEX} says it holds {count} tensors; "
                    "download the shard"
                )
            files[name] = SafetensorsFile(directory / name)
        for key, name in weight_map.items():
            if key not in files[name].tensors:
                raise ModelError(
                    f"{directory / name}: tensor {key} is not in it, but {INDEX} says so; "
                    "download the shard and the index again"
                )
        for name, file in files.items():
            for key in file.tensors:
                if weight_map.get(key) != name:
                    where = weight_map.get(key)
                    raise ModelError(
                        f"{file.path}: holds tensor {key}, which {INDEX} "
                        + (f"places in {where}" if where else "does not name")
                        + "; download the shard and the index again"
                    )
        return cls(directory, files)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(f.path for f in self._files.values())

    @property
    def total_bytes(self) -> int:
        return sum(f.size for f in self._files.values())

    @property
    def main_dtype(self) -> str:
        """The dtype of most bytes: "float32", "bfloat16", "float16", or the file's own word."""
        held: Counter[str] = Counter()
        for info in self.tensors.values():
            held[info.dtype] += info.nbytes
        word = held.most_common(1)[0][0]
        return DTYPE_NAMES.get(word, word)

    def read(self, key: str) -> Array:
        """A read-only view of the mapped file: float32, float16, or uint16 for bf16 bits."""
        return self._owner[key].read(key)

    def content_hash(self, progress: Progress | None = None) -> str:
        """SHA-256 over the index and every shard. Reads all the weights."""
        return content_hash(self.directory, self.files, progress)


def content_hash(
    directory: Path, shards: tuple[Path, ...], progress: Progress | None = None
) -> str:
    """SHA-256 over the names, lengths and bytes of the index and `shards`.

    A file that has not changed (path, size, modification time) is not read twice in one process.
    """
    index = directory / INDEX
    # A single file is read without the index that may lie beside it.
    used = index.exists() and [p.name for p in shards] != [SINGLE]
    files = sorted([*shards, index] if used else shards)
    total = sum(p.stat().st_size for p in files)
    digest, done = hashlib.sha256(), 0
    for path in files:
        stat = path.stat()
        key = (str(path.resolve()), stat.st_size, stat.st_mtime_ns)
        if key not in _file_hashes:
            _file_hashes[key] = _hash_file(path, done, total, progress)
        done += stat.st_size
        if progress is not None:
            progress(done, total)
        digest.update(f"{path.name}\0{stat.st_size}\0{_file_hashes[key]}\n".encode())
    return digest.hexdigest()


_file_hashes: dict[tuple[str, int, int], str] = {}


def _hash_file(path: Path, done: int, total: int, progress: Progress | None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 24):
            digest.update(block)
            done += len(block)
            if progress is not None:
                progress(done, total)
    return digest.hexdigest()


def _no_checkpoint(directory: Path) -> NoReturn:
    others = sorted(p.name for p in directory.glob("*.safetensors"))
    if others:
        raise ModelError(
            f"{directory}: has {others[0]} but neither {SINGLE} nor {INDEX}; "
            "download the index, or rename a single file to model.safetensors"
        )
    pickled = sorted(
        p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern)
    )
    if pickled:
        raise ModelError(
            f"{directory}: has only pickled weights ({pickled[0]}), which PDScope does not load; "
            "use the safetensors files of this model, or convert it with save_pretrained()"
        )
    raise ModelError(
        f"{directory}: no weights: neither {SINGLE} nor {INDEX}; download the safetensors files, "
        "or use --load-format dummy to compile the configuration alone"
    )


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error}); {AGAIN}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: weight_map is missing or empty; {AGAIN}")
    for key, name in weight_map.items():
        if not key.strip():
            raise ModelError(f"{path}: weight_map has an empty tensor name; {AGAIN}")
        plain = isinstance(name, str) and re.fullmatch(r"[^/\\\0]+\.safetensors", name)
        if not plain or name.startswith("."):
            raise ModelError(
                f"{path}: weight_map[{key!r}] is {name!r}, expected the plain name of a "
                f".safetensors file beside the index; {AGAIN}"
            )
    return weight_map


@dataclass(frozen=True)
class Source:
    """Where a parameter, or a part of it, lies in the checkpoint.

    part "whole": all of the parameter. "gate", "up" and "down": the matrix of one expert of a fused
    parameter (gate and up are the first and second half of its rows).
    """

    key: str
    part: str
    expert: int | None


def map_parameters(meta_model: Any, checkpoint: Checkpoint) -> dict[str, tuple[Source, ...]]:
    """Parameter (transformers' state_dict name) -> its sources in the checkpoint, in expert order.

    Tied parameters are listed under the embedding's name only. Raises ModelError for a parameter
    that is missing, a tensor that belongs to nothing, a shape other than the configuration's, or a
    dtype that cannot be used.
    """
    return _Mapper(meta_model, checkpoint).run()


class _Mapper:
    def __init__(self, meta_model: Any, checkpoint: Checkpoint) -> None:
        self.model = meta_model
        self.checkpoint = checkpoint
        self.state: dict[str, Any] = meta_model.state_dict()
        self.family = type(meta_model).__name__
        self.found: dict[str, dict[tuple[str, int | None], str]] = {}
        self.unexpected: list[str] = []

    def run(self) -> dict[str, tuple[Source, ...]]:
        transforms = get_model_conversion_mapping(self.model, add_legacy=False)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        for key in self.checkpoint.tensors:
            target, pattern = rename_source_key(
                key, renamings, converters, self.model.base_model_prefix, self.state
            )
            if target not in self.state and key in self.state:
                target, pattern = key, None
            self.place(key, target, pattern, converters)
        self.tie()
        if self.unexpected:
            self.fail_unexpected()
        self.check_complete()
        return {
            name: tuple(
                Source(key, part, expert)
                for (part, expert), key in sorted(
                    parts.items(), key=lambda item: (item[0][1] or 0, item[0][0])
                )
            )
            for name, parts in sorted(self.found.items())
        }

    def place(
        self, key: str, target: str, pattern: str | None, converters: list[WeightConverter]
    ) -> None:
        if target not in self.state:
            if not self.ignorable(key):
                self.unexpected.append(key)
            return
        part, expert = "whole", None
        shape = tuple(self.state[target].shape)
        if pattern is not None:  # one expert's matrix of a fused parameter
            converter = next(c for c in converters if pattern in c.source_patterns)
            patterns = list(converter.source_patterns)
            halves = len(patterns) == 2
            part = ("gate", "up")[patterns.index(pattern)] if halves else "down"
            number = re.search(r"experts\.(\d+)\.", key)
            if number is None:
                self.unexpected.append(key)
                return
            expert = int(number.group(1))
            if expert >= shape[0]:
                raise ModelError(
                    f"{self.where(key)}: expert {expert}, but config.json has {shape[0]} experts; "
                    "config.json and the weights are of different models"
                )
            shape = (shape[1] // 2, shape[2]) if halves else shape[1:]
        self.check_tensor(key, target, shape)
        parts = self.found.setdefault(target, {})
        if (part, expert) in parts:
            raise ModelError(
                f"{self.where(key)}: is the same parameter as {parts[(part, expert)]} ({target}); "
                "expected one of the two"
            )
        parts[(part, expert)] = key

    def check_tensor(self, key: str, target: str, shape: tuple[int, ...]) -> None:
        info = self.checkpoint.tensors[key]
        if info.shape != shape:
            hint = ""
            if target in ("model.embed_tokens.weight", "lm_head.weight"):
                hint = f" (vocab_size {shape[0]}, hidden_size {shape[1]})"
            raise ModelError(
                f"{self.where(key)}: shape {list(info.shape)}, but config.json makes it "
                f"{list(shape)}{hint}; config.json and the weights are of different models"
            )
        if info.dtype not in NUMPY_DTYPE:
            raise ModelError(
                f"{self.where(key)}: dtype {info.dtype} is not supported; use a bf16, fp16 or fp32 "
                "checkpoint of this model"
            )

    def ignorable(self, key: str) -> bool:
        """What transformers ignores too: rotary buffers and multi-token-prediction layers."""
        if re.search(r"rotary_emb\.inv_freq$", key):
            return True
        patterns = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        if any(re.search(p, key) for p in patterns):
            return True
        layer = re.match(r"model\.layers\.(\d+)\.", key)
        extra = int(getattr(self.model.config, "num_nextn_predict_layers", 0) or 0)
        layers = int(self.model.config.num_hidden_layers)
        return layer is not None and layers <= int(layer.group(1)) < layers + extra

    def tie(self) -> None:
        """With tied embeddings, the head may be stored a second time, if it is the same."""
        for target, source in (getattr(self.model, "all_tied_weights_keys", None) or {}).items():
            head = self.found.pop(target, None)
            if head is None:
                continue
            body = self.found.get(source)
            if body is None:
                self.found[source] = head
                continue
            a, b = head[("whole", None)], body[("whole", None)]
            if not self.same(a, b):
                raise ModelError(
                    f"{self.where(a)}: differs from {b}, but config.json says "
                    "tie_word_embeddings; set it to false if the model has its own head"
                )

    def same(self, a: str, b: str) -> bool:
        x, y = self.checkpoint.read(a), self.checkpoint.read(b)
        return x.dtype == y.dtype and bool(np.array_equal(x.view(np.uint8), y.view(np.uint8)))

    def check_complete(self) -> None:
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        missing: list[str] = []
        for name, tensor in self.state.items():
            if name in tied or ("whole", None) in self.found.get(name, {}):
                continue
            parts = self.found.get(name, {})
            if not parts:
                missing.append(name)
                continue
            kinds = ("gate", "up") if {p for p, _ in parts} & {"gate", "up"} else ("down",)
            missing += [
                f"{name} (expert {e}, {part})"
                for e in range(tensor.shape[0])
                for part in kinds
                if (part, e) not in parts
            ]
        if missing:
            raise ModelError(
                f"{self.checkpoint.directory}: no tensor for {_some(missing)} of {self.family}; "
                "download the missing shards, or take the config.json that belongs to these weights"
            )

    def fail_unexpected(self) -> NoReturn:
        raise ModelError(
            f"{self.where(self.unexpected[0])}: not a parameter of {self.family} with this "
            "config.json"
            + (f" (nor are {len(self.unexpected) - 1} others)" if len(self.unexpected) > 1 else "")
            + "; config.json and the weights are of different models"
        )

    def where(self, key: str) -> str:
        return f"{self.checkpoint.tensors[key].file}: tensor {key}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


class Weights:
    """Parameters of a checkpoint as numpy arrays, read from the mapped files when asked for."""

    def __init__(self, checkpoint: Checkpoint, sources: Mapping[str, tuple[Source, ...]]) -> None:
        self.checkpoint = checkpoint
        self.sources = dict(sources)
        self._parts = {
            name: {(s.part, s.expert): s.key for s in found} for name, found in sources.items()
        }

    def dtype_of(self, param: str) -> str:
        """The checkpoint's own dtype: "float32", "bfloat16" or "float16"."""
        info = self.checkpoint.tensors[self.sources[param][0].key]
        return DTYPE_NAMES[info.dtype]

    def get(self, param: str, part: str = "whole", expert: int | None = None) -> Array:
        """A parameter, or one expert's matrix of a fused one: float32, or uint16 holding bf16 bits.

        param: transformers' state_dict name. part: "whole", or with `expert` "gate", "up" or
        "down", each a matrix [n, k]. float16 is widened to float32. The array may be a read-only
        view of the file.
        """
        parts = self._parts[param]
        if (part, expert) in parts:
            return self._read(parts[(part, expert)])
        if part != "whole" and ("whole", None) in parts:
            fused = self._read(parts[("whole", None)])
            return slice_fused(fused, part, expert)
        if part == "whole":
            return self._stack(parts)
        raise KeyError(f"{param}: no part {part!r} of expert {expert}")

    def _stack(self, parts: Mapping[tuple[str, int | None], str]) -> Array:
        """The fused parameter [experts, n, k] out of per-expert tensors: a copy."""
        experts = 1 + max(e for _, e in parts if e is not None)
        rows = []
        for e in range(experts):
            kinds = ("gate", "up") if ("gate", e) in parts else ("down",)
            rows.append(np.concatenate([self._read(parts[(kind, e)]) for kind in kinds]))
        return np.stack(rows)

    def _read(self, key: str) -> Array:
        array = self.checkpoint.read(key)
        return array.astype(np.float32) if array.dtype == np.float16 else array


def slice_fused(fused: Array, part: str, expert: int | None) -> Array:
    """One expert's gate, up or down matrix of a fused parameter [experts, n, k]."""
    matrix: Array = fused[expert]
    half = matrix.shape[0] // 2
    return {"gate": matrix[:half], "up": matrix[half:], "down": matrix}[part]


class DummyWeights:
    """Random weights of the right shapes, for a configuration without a checkpoint.

    The same name, seed and dtype always give the same bits, on every machine. Matrices have unit
    gain, those that write into the residual stream are scaled down by its depth, and gates spread
    their logits, so that routing does not collapse. Every tensor is a stretch of one block of
    normal noise, whose length is a prime (so rows do not repeat): this fills memory at the speed of
    a copy.
    """

    def __init__(self, meta_model: Any, dtype: str = "bfloat16", seed: int = 0) -> None:
        if dtype not in ("bfloat16", "float32"):
            raise ModelError(f"dummy weights: dtype is {dtype!r}, expected bfloat16 or float32")
        self.dtype = dtype
        self.seed = seed
        self.shapes = {k: tuple(v.shape) for k, v in meta_model.state_dict().items()}
        self.layers = int(meta_model.config.num_hidden_layers)
        rank = (np.arange(65536, dtype=np.float64) + 0.5) / 65536
        index = (
            np.random.SFC64(seed).random_raw(-(-NOISE // 4)).astype("<u8", copy=False).view("<u2")
        )
        self._noise = _normal_quantile(rank).astype(np.float32)[index[:NOISE]]
        self._blocks: dict[tuple[float, float], Array] = {}

    def dtype_of(self, param: str) -> str:
        if param not in self.shapes:
            raise KeyError(param)
        return self.dtype

    def get(self, param: str, part: str = "whole", expert: int | None = None) -> Array:
        """As Weights.get."""
        shape = self.shapes[param]
        if len(shape) == 3 and part == "whole":
            kinds = ("gate", "up") if param.endswith("gate_up_proj") else ("down",)
            return np.stack(
                [
                    np.concatenate([self.get(param, kind, e) for kind in kinds])
                    for e in range(shape[0])
                ]
            )
        if part in ("gate", "up"):
            shape = (shape[1] // 2, shape[2])
        elif part == "down":
            shape = shape[1:]
        return self._draw(f"{param}/{part}/{expert}", shape, *self._moments(param, shape))

    def _moments(self, param: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Mean and standard deviation."""
        if len(shape) == 1:
            return (1.0, 0.0) if param.endswith("norm.weight") else (0.0, 0.02)
        if param.endswith("embed_tokens.weight"):
            return 0.0, 1.0
        gain = float(shape[-1]) ** -0.5
        if param.endswith("gate.weight"):
            return 0.0, 2.0 * gain
        if re.search(r"(o_proj\.weight|down_proj(\.weight)?)$", param):
            return 0.0, gain * (2.0 * self.layers) ** -0.5
        return 0.0, gain

    def _draw(self, name: str, shape: tuple[int, ...], mean: float, deviation: float) -> Array:
        """A stretch of the noise block; name and seed say where it starts."""
        key = (mean, deviation)
        if key not in self._blocks:
            block = self._noise * np.float32(deviation) + np.float32(mean)
            self._blocks[key] = block if self.dtype == "float32" else to_bf16(block)
        count = math.prod(shape)
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        start = int.from_bytes(digest[:8], "little") % NOISE
        out = np.empty(count, dtype=self._blocks[key].dtype)
        done = 0
        while done < count:
            piece = self._blocks[key][start : start + count - done]
            out[done : done + piece.size] = piece
            done, start = done + piece.size, 0
        return out.reshape(shape)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bits of finite float32 values, rounded to nearest even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def _normal_quantile(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Inverse of the normal distribution function, interpolated in a table of erf."""
    grid = np.linspace(-5.0, 5.0, 20001)
    cdf = np.array([0.5 * (1.0 + math.erf(x / math.sqrt(2.0))) for x in grid])
    return np.interp(p, cdf, grid)


def check_finite(name: str, array: Array) -> None:
    """ModelError naming tensor and index of the first NaN or infinity; uint16 is bf16 bits."""
    flat = array.reshape(-1)
    step = 1 << 22  # bounded memory
    for start in range(0, flat.size, step):
        block = flat[start : start + step]
        if block.dtype == np.uint16:
            bad = (block & np.uint16(0x7F80)) == np.uint16(0x7F80)
        else:
            bad = ~np.isfinite(block)
        if bad.any():
            index = np.unravel_index(start + int(bad.argmax()), array.shape)
            value = _value_of(block[int(bad.argmax())])
            raise ModelError(
                f"tensor {name}: {value} at index {[int(i) for i in index]}, expected finite "
                f"weights; {AGAIN}, or take another checkpoint"
            )


def _value_of(element: Any) -> str:
    if element.dtype != np.uint16:
        return str(float(element))
    return str(float(np.array([int(element) << 16], dtype=np.uint32).view(np.float32)[0]))
