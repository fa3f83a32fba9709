"""A phaseper.json that was never trained: three MoE layers of the stand-in plan, both phases."""

import json
from pathlib import Path
from typing import Any

from support import fake_plan

HIT = {
    ("prefill", 0): 0.8,
    ("prefill", 1): 0.9,
    ("decode", 0): 0.7,
    ("decode", 1): 0.6,
}


def entry(layer: int, phase: str) -> dict[str, Any]:
    """Decode of layer 1 is served by the next layer's gate, all else by a net."""
    hit = HIT[phase, layer]
    net = (phase, layer) != ("decode", 1)
    names = ("cross_gate", "previous", "frequency", "transition")
    rivals = {n: {"hit": 0.6 - 0.1 * i, "rank_hit": 1 - 0.25 * i} for i, n in enumerate(names)}
    bins = [(0.05 + 0.1 * i, 0.1 * i, 10 * (i % 3)) for i in range(10)]
    predicted, observed, pairs = ([b[i] for b in bins] for i in range(3))
    return {
        "layer": layer,
        "next": layer + 1,
        "phase": phase,
        "group": ("input", "middle")[layer],
        "chosen": "phaseper" if net else "cross_gate",
        "rivals": rivals,
        "net": {
            **{"hit": hit if net else 0.5, "rank_hit": 0.75, "stored": net, "width": 16},
            **{"deep": layer == 1, "blocks": ["routed", "previous"], "bytes": 2048},
        },
        "r_hit": 0.85,
        "temperatures": dict.fromkeys(("phaseper", *names), 0.5),
        "reads": {"phaseper": 1536, **dict.fromkeys(names, 64)},
        "reliability": {"predicted": predicted, "observed": observed, "pairs": pairs, "error": 0.1},
    }


def figures() -> dict[str, Any]:
    return {
        **{"format_version": 1, "hidden": 8, "experts": 4, "top_k": 2},
        "rows": {"prefill": 1000, "decode": 400},
        "validation": {"prefill": 100, "decode": 40},
        "groups": {
            "layers": [0, 1, 2],
            "similarity": [0.25, 0.875],
            "names": ["input", "middle", "middle"],
        },
        "layers": [entry(layer, phase) for phase, layer in HIT],
    }


def write_plan(folder: Path, data: dict[str, Any] | str | None) -> Path:
    """A plan directory without a library, and with `data` as its phaseper.json."""
    (folder / "phaseper").mkdir(parents=True)
    (folder / "memory.json").write_text('{"session": {"total_bytes": 1}}')
    (folder / "phaseper/traces.json").write_text('{"calibration": "chats.jsonl"}')
    if data is not None:
        text = data if isinstance(data, str) else json.dumps(data)
        (folder / "phaseper.json").write_text(text)
    fake_plan.write_manifest(folder)
    return folder
