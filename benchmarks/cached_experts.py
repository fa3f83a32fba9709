"""How many activated experts lie in slots, by policy: decode's routing of a text through the order
in which each policy gives up its cached experts (pdscope.compiler.policies).

The plan reads the text; popularity comes from the first half of its decode positions, and the next
`--tokens` ones are counted. Slots begin with the most popular experts; what is missing is loaded.

    python benchmarks/cached_experts.py PLAN --text FILE [--tokens N]
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import pdscope
from pdscope.compiler.decision import ONE_Q16, Cached, Policy
from pdscope.compiler.policies import score, victim
from pdscope.documents import read_documents
from pdscope.ir.isa import Phase
from pdscope.routing_records import RoutingReader
from pdscope.tokens import Tokenizer

COMPARED = (Policy.LRU, Policy.FATE, Policy.PAPER, Policy.HYBRIMOE, Policy.APEX, Policy.ADAPTSCHED)


def routing(plan: str, text: Path) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """(experts, weights) of decode positions in order: [layers, positions, top_k]."""
    experts: dict[int, list[NDArray[np.int32]]] = {}
    weights: dict[int, list[NDArray[np.float32]]] = {}
    keys = []
    with pdscope.load(plan) as engine, RoutingReader(engine) as reader:
        for records in reader.read(list(read_documents(Tokenizer(engine.plan), text))[:60]):
            rows = records.decode
            keys.append(np.stack([records.document[rows], records.position[rows]]))
            for layer, of_layer in records.layers.items():
                experts.setdefault(layer, []).append(of_layer.e[rows].copy())
                weights.setdefault(layer, []).append(of_layer.w[rows].copy())
    document, position = np.concatenate(keys, axis=1)
    order = np.lexsort((position, document))
    e = np.stack([np.concatenate(experts[layer])[order] for layer in sorted(experts)])
    w = np.stack([np.concatenate(weights[layer])[order] for layer in sorted(experts)])
    return e, w


def hits(
    policy: Policy, e: NDArray[np.int32], w: NDArray[np.float32], part: float, n: int
) -> float:
    layers, positions, _ = e.shape
    count, half = int(e.max()) + 1, positions // 2
    popularity = np.stack([np.bincount(x[:half].ravel(), minlength=count) for x in e])
    popularity = popularity * ONE_Q16 // half
    heat = {(la, x): (int(popularity[la, x]), half) for la in range(layers) for x in range(count)}
    hottest = sorted(heat, key=lambda which: -heat[which][0])[: int(part * layers * count)]
    slots = [Cached(*which, heat[which][0], half, heat[which][0]) for which in hottest]
    where = {(slot.layer, slot.expert): i for i, slot in enumerate(slots)}
    found = asked = 0
    for now in range(half, min(half + n, positions)):
        for layer in range(layers):
            due = [int(x) for x in e[layer, now]]
            for expert, weight in zip(due, w[layer, now], strict=True):
                which = (layer, expert)
                old, used = heat[which]
                new = score(policy, old, int(weight * ONE_Q16), now - used)
                heat[which] = new, now
                asked += 1
                if which in where:
                    found += 1
                    i = where[which]
                    slots[i] = replace(slots[i], used=now, score=new, kept=True)
            for which in ((layer, expert) for expert in due if (layer, expert) not in where):
                i = victim(policy, Phase.DECODE, slots, layer, layers, now)
                if i is None:
                    continue
                del where[slots[i].layer, slots[i].expert]
                where[which] = i
                slots[i] = Cached(*which, int(popularity[which]), now, heat[which][0], True)
            for expert in due:
                if (layer, expert) in where:
                    i = where[layer, expert]
                    slots[i] = replace(slots[i], kept=False)
    return found / asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=200)
    given = parser.parse_args()
    e, w = routing(given.plan, given.text)
    print("| policy | slots for 1/4 | 1/2 |\n|---|---|---|")
    for policy in COMPARED:
        found = (hits(policy, e, w, part, given.tokens) for part in (0.25, 0.5))
        print(f"| {policy.value} | " + " | ".join(f"{x:.3f}" for x in found) + " |")


if __name__ == "__main__":
    main()
