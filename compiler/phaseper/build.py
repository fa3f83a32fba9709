"""From a trace store to predictors: groups, training, choice, files.

May import numpy, torch, pdscope.errors and pdscope.compiler.phaseper.*.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdscope.compiler.phaseper.checkpoints import Checkpoints
from pdscope.compiler.phaseper.groups import find_groups
from pdscope.compiler.phaseper.predictor_file import FORMAT, layer_bytes, layer_file
from pdscope.compiler.phaseper.rows import PhaseRows
from pdscope.compiler.phaseper.select import bytes_read, entry, select
from pdscope.compiler.phaseper.store import Gate, Store, Trace
from pdscope.compiler.phaseper.train import (
    NOT_SAVED,
    TrainOptions,
    one_thread_each,
    train_phases,
)
from pdscope.errors import InputError


def build_predictors(
    store: Store,
    gates: Mapping[int, Gate],
    options: TrainOptions,
    device: str = "auto",
    threads: int = 1,
    start: Callable[[int], None] = lambda _: None,
    advance: Callable[[int], None] = lambda _: None,
    saved: tuple[Path, str] | None = None,
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What phaseper.json holds, and the layers' files by relative path.

    The same store, options and kind of device give the same bytes, whatever `threads`. start:
    receives the most rows that may be trained on; advance: rows trained on since its last call.
    saved: a directory, and the identity of store and gates: what a call that was killed has left
    there is gone on with.
    A phase without rows gets no predictor. Raises InputError where none has any, BudgetError when
    no net fits the size budget.
    """
    store = _Trainable(store)
    if not store.phases:
        raise InputError(
            "calibration text: gave no rows, expected prompts and assistant answers: give a file "
            "of conversations (jsonl with messages), or of texts"
        )
    groups = find_groups(store)
    where = pick_device(device)
    rows = {p: PhaseRows(store, p, gates, where, product_type(where)) for p in store.phases}
    states = NOT_SAVED
    if saved is not None:
        what = (saved[1], asdict(options), where.type, str(product_type(where)), torch.__version__)
        states = Checkpoints(saved[0], json.dumps(what))
    start(sum(most_rows(r, options) for r in rows.values()))
    entries: list[dict[str, Any]] = []
    files: dict[str, bytes] = {}
    with one_thread_each():
        trained = train_phases(rows, groups.names, options, threads, advance, states)
        work = [(p, pair) for pair in range(len(store.layers) - 1) for p in store.phases]
        with ThreadPoolExecutor(max(1, threads)) as pool:  # each apart: their order changes nothing
            made_of = pool.map(lambda w: select(rows[w[0]], trained[w[0]][w[1]]), work)
            selected = dict(zip(work, made_of, strict=True))
        for pair in range(len(store.layers) - 1):
            parts = {}
            for phase in store.phases:
                chosen = selected[phase, pair]
                about = entry(rows[phase], chosen, groups.names[pair])
                shape = chosen.trained.job.candidate.shape
                entries.append({**about, "reads": bytes_read(rows[phase], shape)})
                tensors = chosen.net.tensors if chosen.net is not None else {}
                parts[phase] = tensors, rows[phase].tables(pair)
            files[layer_file(store.layers[pair])] = layer_bytes(parts)
    made = {
        "format_version": FORMAT,
        "hidden": store.hidden,
        "experts": store.experts,
        "top_k": store.top_k,
        "rows": {phase: store.rows(phase) for phase in store.phases},
        "validation": {phase: len(r.validation) for phase, r in rows.items()},
        "options": asdict(options),
        "groups": asdict(groups),
        "layers": entries,
    }
    return made, files


class _Trainable:
    """The phases of a store that have rows. Where all of them are for validation, as those of a
    single document may be, they are there to train on instead."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.phases = tuple(phase for phase in store.phases if store.rows(phase))
        self.layers, self.hidden = store.layers, store.hidden
        self.experts, self.top_k = store.experts, store.top_k

    def rows(self, phase: str) -> int:
        return self._store.rows(phase)

    def layer(self, phase: str, layer: int) -> Trace:
        return self._store.layer(phase, layer)

    def split(self, phase: str) -> NDArray[np.bool_]:
        split = self._store.split(phase)
        return np.zeros_like(split) if split.all() else split


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
        raise InputError(
            "predictor_device: cuda is wanted, but this machine has no GPU that torch can use: "
            "choose cpu or auto"
        )
    return torch.device("cuda")


def product_type(device: torch.device) -> torch.dtype:
    """Of matrix products in training: bf16 where that is fast."""
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return torch.bfloat16
