"""Ways to damage a model directory or a plan directory, each as a user may meet it."""

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pdscope.plan_hash import plan_hash

Header = dict[str, Any]


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def edit_plan(plan: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edits plan.json, and puts its plan hash right, unless the edit is of the hash or leaves
    nothing to make one of."""

    def both(data: dict[str, Any]) -> None:
        before = data["plan_hash"]
        change(data)
        if data.get("plan_hash") == before and data.keys() >= {"model", "files"}:
            with suppress(TypeError, AttributeError):
                data["plan_hash"] = plan_hash(data)

    edit_json(plan / "plan.json", both)


def edit_header(path: Path, change: Callable[[Header], object]) -> None:
    """Rewrites the header of a safetensors file; the payload stays as it is."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def tensors_of(path: Path) -> list[str]:
    """Names in a safetensors file, in the order of their payloads."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    return sorted(header, key=lambda name: header[name]["data_offsets"])


def cut(path: Path, fewer: int) -> None:
    """Drops the last bytes of a file."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - fewer)


def flip(path: Path, at: int = -1) -> None:
    """Inverts one byte of a file; by default in its middle."""
    raw = bytearray(path.read_bytes())
    raw[at if at >= 0 else len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)
