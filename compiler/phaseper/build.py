"""From a trace store to predictors: groups, training, choice, files.

May import numpy, torch, pdscope.errors and pdscope.compiler.phaseper.*.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from pdscope.compiler.phaseper.groups import find_groups
from pdscope.compiler.phaseper.predictor_file import FORMAT, layer_bytes, layer_file
from pdscope.compiler.phaseper.rows import PhaseRows
from pdscope.compiler.phaseper.select import entry, select
from pdscope.compiler.phaseper.store import Gate, Store
from pdscope.compiler.phaseper.train import TrainOptions, one_thread_each, train_phases
from pdscope.errors import InputError


def build_predictors(
    store: Store,
    gates: Mapping[int, Gate],
    options: TrainOptions,
    device: str = "auto",
    threads: int = 1,
    start: Callable[[int], None] = lambda _: None,
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What phaseper.json holds, and the layers' files by relative path.

    The same store, options and kind of device give the same bytes, whatever `threads`. start:
    receives the most rows that may be trained on; advance: rows trained on since its last call.
    Raises InputError for a phase without rows, BudgetError when no net fits the size budget.
    """
    for phase in store.phases:
        if store.rows(phase) == 0:
            raise InputError(
                f"calibration text: gave no {phase} rows, expected prompts and assistant answers: "
                "give a file of conversations (jsonl with messages)"
            )
    groups = find_groups(store)
    where = pick_device(device)
    rows = {p: PhaseRows(store, p, gates, where, product_type(where)) for p in store.phases}
    start(sum(most_rows(r, options) for r in rows.values()))
    entries: list[dict[str, Any]] = []
    files: dict[str, bytes] = {}
    with one_thread_each():
        trained = train_phases(rows, groups.names, options, threads, advance)
        for pair in range(len(store.layers) - 1):
            parts = {}
            for phase in store.phases:
                chosen = select(rows[phase], trained[phase][pair])
                entries.append(entry(rows[phase], chosen, groups.names[pair]))
                tensors = chosen.net.tensors if chosen.net is not None else {}
                parts[phase] = tensors, rows[phase].tables(pair)
            files[layer_file(store.layers[pair])] = layer_bytes(parts)
    about = {
        "format_version": FORMAT,
        "hidden": store.hidden,
        "experts": store.experts,
        "top_k": store.top_k,
        "rows": {phase: store.rows(phase) for phase in store.phases},
        "options": asdict(options),
        "groups": asdict(groups),
        "layers": entries,
    }
    return about, files


def most_rows(rows: PhaseRows, options: TrainOptions) -> int:
    """Rows times nets that a phase may be trained on, were there four candidates a layer."""
    per_pair = options.rows + sum(
        count * max(1, 4 >> at) for at, count in enumerate(options.search_rows)
    )
    return min(per_pair, options.epochs * len(rows.train)) * len(rows.pairs)


def pick_device(name: str) -> torch.device:
    """auto: a GPU where there is one. Raises InputError for cuda without one."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("device cuda: this machine has no GPU that torch can use: choose cpu")
    return torch.device("cuda")


def product_type(device: torch.device) -> torch.dtype:
    """Of matrix products in training: bf16 where that is fast."""
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return torch.bfloat16
