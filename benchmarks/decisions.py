"""How good decisions are, and how long one takes.

Ends of two layers (compiler/optimum.py has the model) over layers of real models on real machines,
at most 12 experts each: of every policy, over the exact optimum. Then with predictions that are
only partly right: the default's end over its end with all of them right, and over its end without
any. Last, microseconds of one decision in C on one core.

    python benchmarks/decisions.py [--layers N]
"""

import argparse
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from pdscope.compiler.build import find_compiler
from pdscope.compiler.decision import ONE_Q16, Due, Inputs, Policy
from pdscope.compiler.optimum import lower_bound, optimum, two_layers
from pdscope.compiler.passes.schedule import decide
from pdscope.ir.isa import Phase
from pdscope.runtime_c import DECISION_SOURCES, INCLUDE_DIRS, ROOT

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
from support.layers import MACHINES, a_layer  # noqa: E402


def row(name: str, found: list[float]) -> str:
    found = sorted(found)
    n = len(found)
    figures = (sum(found) / n, found[n // 2], found[n * 9 // 10], found[-1])
    far = sum(x > 1.25 for x in found) / n
    return f"| {name} | " + " | ".join(f"{x:.3f}" for x in figures) + f" | {far:.1%} |"


def distances(phase: Phase, n: int) -> None:
    print(f"\n{phase.name.lower()}, {n} layers: end over the optimum's")
    print("| policy | mean | median | p90 | worst | over 25 % |\n|---|---|---|---|---|---|")
    found: dict[Policy, list[float]] = {policy: [] for policy in Policy}
    bound = []
    for seed in range(n):
        r = random.Random(seed)
        layer = a_layer(r, MACHINES[seed % len(MACHINES)], phase, most=r.choice((4, 8, 12)))
        best = optimum(layer).next
        bound.append(best / lower_bound(layer))
        for policy, ends in found.items():
            ends.append(two_layers(replace(layer, policy=policy), decide).next / best)
    for policy, ends in found.items():
        print(row(policy.value, ends))
    print(row("(optimum over bound)", bound))


def partly(r: random.Random, given: Inputs, right: float) -> list[Due]:
    """The experts due when `right` of the predicted ones are; others in the place of the rest."""
    return [
        due if r.random() < right else replace(due, expert=10_000 + due.expert)
        for due in given.next
    ]


def degraded(phase: Phase, n: int) -> None:
    print(f"\n{phase.name.lower()}, {n} whole layers: predictions partly right")
    print("| right | over all right | worst | over none predicted | worst |\n|---|---|---|---|---|")
    for right in (0.97, 0.9, 0.8, 0.7, 0.6, 0.45, 0.2, 0.0):
        to_all, to_none = [], []
        for seed in range(n):
            r = random.Random(seed)
            machine = MACHINES[seed % len(MACHINES)]
            parts = machine.model.parts
            layer = a_layer(r, machine, phase)
            layer = replace(layer, free_slots=max(layer.free_slots, 16))
            truth = partly(r, layer, right)
            known = replace(layer, hit_q16=round(right * ONE_Q16))
            end = two_layers(known, decide, truth, parts).next
            to_all.append(end / two_layers(layer, decide).next)
            to_none.append(end / two_layers(replace(layer, next=()), decide, truth).next)
        means = [f"{sum(x) / n:.3f} | {max(x):.3f}" for x in (to_all, to_none)]
        print(f"| {right:.0%} | {means[0]} | {means[1]} |")


def time_in_c() -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "decide_time")
        sources = [str(HERE / "decide_time.c"), *(str(ROOT / s) for s in DECISION_SOURCES)]
        include = [f"-I{ROOT / d}" for d in INCLUDE_DIRS]
        command = [*find_compiler().command, "-O2", *include, *sources, "-o", program]
        subprocess.run(command, check=True)
        print("\n" + subprocess.run([program], check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=500)
    n = parser.parse_args().layers
    for phase in Phase:
        distances(phase, n)
    for phase in Phase:
        degraded(phase, n)
    time_in_c()


if __name__ == "__main__":
    main()
