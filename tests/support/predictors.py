"""Predictor files of random numbers for a compiled plan, without any training."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from pdscope.compiler.phaseper.nets import BLOCKS, NetShape
from pdscope.compiler.phaseper.predictor_file import layer_bytes, layer_file
from pdscope.compiler.phaseper.rivals import Tables
from pdscope.plan import Plan

Tensors = dict[str, torch.Tensor]


def reference(
    shape: NetShape, tensors: dict[str, torch.Tensor], a: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """A net in torch, from its file's tensors, all in fp32: what the runtime is checked against.

    a: [rows, hidden]; features: [rows, blocks * experts], w_r or 1 where a row is set. Gives
    [rows, experts].
    """
    t = {name: tensor.float() for name, tensor in tensors.items()}
    a, features = a.float(), features.float()
    u = a @ t["in.weight"].T + t["in.bias"] + features @ t["features.weight"]
    h = functional.silu(u[:, : shape.width])
    if shape.deep:
        gate = torch.sigmoid(a @ t["gate.weight"].T + t["gate.bias"])
        h = h + gate * functional.silu(h @ t["block.weight"].T + t["block.bias"])
    return u[:, shape.width :] + h @ t["out.weight"].T


def random_net(shape: NetShape, rng: np.random.Generator) -> Tensors:
    """As a file holds it: matrices bf16, vectors fp32; logits of size 1 to 10."""
    made = {}
    for name, size in shape.tensors().items():
        scale = 1.0 if name == "features.weight" or len(size) == 1 else 2 * size[-1] ** -0.5
        values = torch.from_numpy(np.float32(rng.normal(0, scale, size)))
        made[name] = values if len(size) == 1 else values.bfloat16()
    return made


def random_tables(experts: int, rng: np.random.Generator) -> Tables:
    return Tables(np.float32(rng.random(experts)), np.float32(rng.random((experts, experts))))


def moe_layers(plan: Path) -> list[int]:
    texts = sorted((plan / "programs").glob("layer*.decode.plan"))
    return [int(t.name[5:8]) for t in texts if "gate" in t.read_text(encoding="utf-8")]


def with_predictors(
    plan: Path,
    target: Path,
    chosen: Callable[[int, str], str] = lambda layer, phase: "phaseper",
    damage: Callable[[Tensors], None] = lambda net: None,
    width: int = 40,
    seed: int = 0,
) -> Path:
    """A copy of the plan, with a predictor for each layer and phase: what `chosen` says of the
    layer's index among those with experts. Nets of even ones are deep. plan.json does not list the
    files."""
    shutil.copytree(plan, target)
    write_predictors(target, chosen, damage, width, seed)
    return target


def write_predictors(
    plan: Path,
    chosen: Callable[[int, str], str] = lambda layer, phase: "phaseper",
    damage: Callable[[Tensors], None] = lambda net: None,
    width: int = 40,
    seed: int = 0,
) -> None:
    model = Plan.open(plan).model
    rng = np.random.default_rng(seed)
    layers = moe_layers(plan)
    entries: list[dict[str, Any]] = []
    (plan / "phaseper").mkdir(exist_ok=True)
    for i, layer in enumerate(layers[:-1]):
        parts: dict[str, tuple[Tensors, Tables]] = {}
        for phase, blocks in BLOCKS.items():
            shape = NetShape(model["hidden"], model["experts"], width, i % 2 == 0, blocks)
            name, net = chosen(i, phase), random_net(shape, rng)
            damage(net)
            stored = name == "phaseper"
            parts[phase] = (net if stored else {}, random_tables(shape.experts, rng))
            about = {"stored": stored, "width": width, "deep": shape.deep, "blocks": list(blocks)}
            entry = {"layer": layer, "next": layers[i + 1], "phase": phase, "chosen": name}
            entries.append(entry | {"net": about})
        (plan / layer_file(layer)).write_bytes(layer_bytes(parts))
    about = {key: model[key] for key in ("hidden", "experts", "top_k")}
    data = {"format_version": 1, **about, "layers": entries}
    (plan / "phaseper.json").write_text(json.dumps(data), encoding="utf-8")
