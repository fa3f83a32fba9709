"""pdscope-inspect --predictor: how well a plan's predictors do, as tables and JSON.

May import click, pdscope.{dummy_predictor,errors,plan,predictor_figures,predictor_html,cli.format};
what runs the plan when a text is given.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdscope.cli.format import human_bytes, pairs, table
from pdscope.errors import InputError, PlanError, disk_fault
from pdscope.predictor_figures import (
    JSON,
    PHASEPER,
    RIVALS,
    Figures,
    Layer,
    Predictors,
    Summary,
    summaries,
)

if TYPE_CHECKING:
    from pdscope.compiler.phaseper.evaluate import Evaluation
    from pdscope.dummy_predictor import DummyPredictor
    from pdscope.plan import Plan

_TITLES = {PHASEPER: "PhasePer"}


def print_predictors(plan: "Plan", on: Path | None, html: Path | None, as_json: bool) -> None:
    """on: a text to measure on; None: the calibration's validation rows, as the compile did."""
    if dummy := _dummy(plan):
        _print_dummy(plan, dummy, on or html, as_json)
        return
    predictors = Predictors.open(plan)
    found = None if on is None else _evaluate(plan, predictors, on, as_json)
    layers = predictors.layers if found is None else found.layers
    if html is not None:
        from pdscope.predictor_html import report

        _write(html, report(predictors, layers, "" if on is None else on.name))
    if as_json:
        click.echo(json.dumps([layer.as_dict() for layer in layers], indent=2))
        return
    click.echo(pairs(_heading(predictors, on, found)))
    click.echo("\nhit rate / rank accuracy in percent, means of the layers")
    if any(PHASEPER not in x.figures for x in layers):
        click.echo("PhasePer: of those layers whose net the plan holds, as it was chosen")
    if any(x.phase == "prefill" for x in layers):
        click.echo("previous: never chosen for prefill, which does not know it in time")
    click.echo(table(_group_rows(summaries(layers))))
    click.echo()
    click.echo(table(_layer_rows(predictors, layers)))
    if html is not None:
        click.echo(f"\nplots are in {html}")


def _dummy(plan: "Plan") -> "DummyPredictor | None":
    """What stands in for predictors; it needs numpy, which other plans' figures do without."""
    if JSON not in plan.files or '"dummy"' not in plan.read_text(JSON):
        return None
    from pdscope.dummy_predictor import DummyPredictor

    return DummyPredictor.of(plan)


def _print_dummy(plan: "Plan", dummy: "DummyPredictor", asked: Path | None, as_json: bool) -> None:
    if asked is not None:
        raise InputError(
            f"{plan.path}: its predictor is a dummy, of which there is nothing to measure on "
            f"{asked}: compile a model with weights and a --calibration"
        )
    if as_json:
        click.echo(json.dumps({"dummy": dummy.as_dict()}, indent=2))
    else:
        click.echo(pairs([("predictor", f"DUMMY: {dummy.describe()}")]))


def _evaluate(plan: "Plan", predictors: Predictors, on: Path, quiet: bool) -> "Evaluation":
    if "numpy" not in sys.modules:
        # Its products are small here: threads that wait for each other, and for the plan's workers,
        # take many times as long.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from pdscope.compiler.phaseper.evaluate import evaluate
    from pdscope.documents import read_documents
    from pdscope.engine import load
    from pdscope.tokens import Tokenizer

    if plan.data["tokenizer"]["file"] is None:
        raise PlanError(
            f"{plan.path}: the plan has no tokenizer to read {on} with: compile a model directory "
            "that has a tokenizer.json"
        )
    documents = list(read_documents(Tokenizer(plan), on))
    total = sum(len(d.ids) for d in documents)
    shown = sys.stderr.isatty() and not quiet
    bar: Any = click.progressbar(length=total, label=f"{total:,} tokens", file=sys.stderr)
    with load(plan, predictor="off", device="cpu") as engine, bar if shown else nullcontext():
        try:
            return evaluate(
                engine, predictors.layers, documents, bar.update if shown else lambda _: None
            )
        except InputError as error:
            raise InputError(f"{on}: {error}") from None


def _write(file: Path, page: str) -> None:
    aside = file.with_name(file.name + ".part")
    try:
        aside.write_text(page, encoding="utf-8")
        aside.replace(file)
    except OSError as error:
        full = disk_fault(error, "the disk is full; free some space or choose another file")
        reason = full or f"{error.strerror}; give a file in a directory that can be written to"
        aside.unlink(missing_ok=True)
        raise PlanError(f"{file}: cannot be written: {reason}") from None


def _heading(
    predictors: Predictors, on: Path | None, found: "Evaluation | None"
) -> list[tuple[str, str]]:
    name = predictors.traces.get("calibration") or "the model's own answers to built-in prompts"
    rows = ", ".join(f"{n:,} {phase}" for phase, n in predictors.rows.items())
    if found is not None:
        count = ", ".join(f"{n:,} {phase}" for phase, n in found.rows.items())
        of = f"{on}: {count} rows"
    else:
        kept = predictors.validation
        count = ", ".join(f"{n:,} {phase}" for phase, n in kept.items())
        of = f"the calibration's validation rows: {count}"
        if not all(kept.values()):
            of += "; without any, those that were trained on"
    cosines = zip(predictors.moe_layers, predictors.similarity, strict=False)
    return [
        ("trained on", f"{name}: {rows} rows"),
        ("figures of", of),
        ("groups", ", ".join(_ranges(predictors))),
        ("similarity", ", ".join(f"{n}: {s:.3f}" for n, s in cosines)),
    ]


def _ranges(predictors: Predictors) -> list[str]:
    """Each group's first and last MoE layer."""
    named: dict[str, list[int]] = {}
    for number, group in zip(predictors.moe_layers, predictors.groups, strict=True):
        named.setdefault(group, []).append(number)
    return [f"{g} {n[0]}" + (f"-{n[-1]}" if len(n) > 1 else "") for g, n in named.items()]


def _group_rows(rows: Sequence[Summary]) -> list[tuple[str, ...]]:
    names = (PHASEPER, *RIVALS)
    titles = (_TITLES.get(n, n) for n in names)
    out: list[tuple[str, ...]] = [("phase", "group", "layers", "plan", *titles)]
    for s in rows:
        figures = (_percent(s.figures.get(n)) for n in names)
        out.append((s.phase, s.group, str(s.layers), _percent(s.plan), *figures))
    return out


def _layer_rows(predictors: Predictors, layers: Sequence[Layer]) -> list[tuple[str, ...]]:
    """One of each layer and phase; bytes and reads are those of the chosen predictor."""
    out: list[tuple[str, ...]] = [
        ("layer", "predicts", "group", "phase", "chosen", "plan", "R_hit", "net", "reads a token")
    ]
    for x in layers:
        stored = x.chosen == PHASEPER
        out.append(
            (
                str(x.layer),
                str(x.next),
                x.group,
                x.phase,
                _TITLES.get(x.chosen, x.chosen),
                _percent(x.figures[x.chosen]),
                f"{100 * x.r_hit:.1f}",
                human_bytes(x.net["bytes"]) if stored else "-",
                human_bytes(x.reads[x.chosen]),
            )
        )
    return out


def _percent(f: Figures | None) -> str:
    return "-" if f is None else f"{100 * f.hit:.1f} / {100 * f.rank_hit:.1f}"
