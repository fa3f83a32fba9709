"""Records of what the gates were given and chose, against transformers and against decoding.

Holds the issue's lines "runs calibration text through the compiled runtime itself ... prefill and
decode apart (decode records are the assistant's positions, teacher-forced in one pass, never a
serial decode; checked against truly decoded ones on a sample)".
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from support.assets import TRAINED, model_path, recorded_texts
from support.hf_reference import load_reference, run_reference
from support.plans import PlanStore

import pdscope
from pdscope.documents import Document
from pdscope.engine import Engine
from pdscope.errors import InputError
from pdscope.ir.isa import NormSite, Opcode
from pdscope.observe import TapEvent
from pdscope.routing_records import LayerRecords, Records, RoutingReader, moe_layers

FIELDS = ("token", "document", "position", "prefill", "decode")


def texts(name: str, count: int = 6) -> list[Document]:
    """Prompts and the greedy continuations that the references hold, the latter the assistant's."""
    found = []
    for ids in recorded_texts(name)[:count]:
        wrote = np.arange(len(ids)) >= len(ids) // 2
        found.append(Document.of_chat(np.array(ids, np.int32), wrote))
    return found


def read(engine: Engine, documents: list[Document]) -> Records:
    """The records of all steps as one."""
    with RoutingReader(engine) as reader:
        steps = []
        for r in reader.read(documents):
            layers = {
                number: LayerRecords(layer.a.copy(), layer.w, layer.e, layer.prev)
                for number, layer in r.layers.items()
            }
            steps.append(Records(*(getattr(r, name) for name in FIELDS), layers))
    names = ("a", "w", "e", "prev")
    return Records(
        *(np.concatenate([getattr(s, name) for s in steps]) for name in FIELDS),
        {
            layer: LayerRecords(
                *(np.concatenate([getattr(s.layers[layer], n) for s in steps]) for n in names)
            )
            for layer in steps[0].layers
        },
    )


@torch.no_grad()
def reference_gates(model: Any, ids: list[int]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Of each gate of transformers' model what it was given, fp32 [n, hidden], and the experts it
    chose, ascending [n, top_k]."""
    found = []

    def hook(_module: Any, args: Any, out: Any) -> None:
        a = args[0].reshape(len(ids), -1).float().numpy()
        found.append((a, np.sort(out[-1].reshape(len(ids), -1).numpy())))

    gates = [m for name, m in model.named_modules() if name.endswith((".mlp.gate", "_moe.gate"))]
    handles = [gate.register_forward_hook(hook) for gate in gates]
    model(torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", TRAINED)
def test_records_are_transformers(plans: PlanStore, name: str) -> None:
    """Gate inputs of an fp32 plan, and the experts chosen, but for rows whose routing hangs on a
    near tie of some layer."""
    documents = texts(name, 4)
    model = load_reference(model_path(name))
    with pdscope.load(plans.compile(model_path(name), dtype="fp32")) as engine:
        records = read(engine, documents)
        assert list(records.layers) == moe_layers(engine.plan)
    assert records.token.tolist() == [i for d in documents for i in d.ids.tolist()]
    assert (records.prefill ^ records.decode).all()
    at = 0
    for document in documents:
        ids = document.ids.tolist()
        clear = ~run_reference(model, ids).near_tie
        assert clear.mean() > 0.9
        gates = reference_gates(model, ids)
        assert len(gates) == len(records.layers)
        rows = slice(at, at + len(ids))
        for (a, e), layer in zip(gates, records.layers.values(), strict=True):
            error = np.abs(layer.a[rows] - a).max(1) / np.abs(a).max(1)
            assert error[clear].max() < 2e-4
            assert (np.sort(layer.e[rows]) == e)[clear].all()
            assert (np.diff(layer.w[rows], axis=1) <= 0).all()  # in rank order
        at += len(ids)


def gate_scores(name: str, layer: int, a: NDArray[np.float32]) -> NDArray[np.float32]:
    """softmax of the gate's logits [n, experts], from the checkpoint's own weights."""
    pattern = re.compile(rf"layers\.{layer}\.(mlp|block_sparse_moe)\.gate\.weight$")
    for file in sorted(Path(model_path(name)).glob("*.safetensors")):
        for key, value in load_file(file).items():
            if pattern.search(key):
                logits = a @ value.float().numpy().T
                exp = np.exp(logits - logits.max(1, keepdims=True))
                return np.asarray(exp / exp.sum(1, keepdims=True))
    raise AssertionError(f"no gate of layer {layer}")


@pytest.mark.parametrize("name", TRAINED)
def test_teacher_forced_records_are_those_of_decoding(plans: PlanStore, name: str) -> None:
    """The same tokens one by one through the decode programs of a bf16 plan: a within bf16's
    rounding, ids equal but where the k-th and the next score are within 1 %."""
    documents = texts(name, 3)
    with pdscope.load(plans.compile(model_path(name), dtype="bf16")) as engine:
        forced = read(engine, documents)
        layers = moe_layers(engine.plan)
        a_of: dict[int, list[NDArray[Any]]] = {layer: [] for layer in layers}
        e_of: dict[int, list[NDArray[Any]]] = {layer: [] for layer in layers}

        def tap(event: TapEvent) -> None:
            if event.opcode == Opcode.GATE:
                assert event.ids is not None
                e_of[event.layer].append(event.ids[0].copy())
            elif (event.opcode, event.arg) == (Opcode.NORM, NormSite.MLP) and event.layer in a_of:
                a_of[event.layer].append(event.data[0, : engine.plan.model["hidden"]].copy())

        with engine.session() as session, session.tap(tap):
            for document in documents:
                session.reset()
                for token in document.ids.tolist():
                    session.decode(token)
    rows = np.flatnonzero(forced.decode)
    assert len(rows) > 50
    for layer, found in forced.layers.items():
        a, e = (np.stack(part)[rows] for part in (a_of[layer], e_of[layer]))
        error = np.linalg.norm(found.a[rows] - a, axis=1) / np.linalg.norm(a, axis=1)
        assert np.median(error) < 2**-8 and (error < 2**-5).mean() > 0.98
        ranked = np.sort(gate_scores(name, layer, a))[:, ::-1]
        last, next_one = ranked[:, e.shape[1] - 1], ranked[:, e.shape[1]]
        clear = last - next_one > 0.01 * last
        assert clear.mean() > 0.75
        assert (np.sort(found.e[rows]) == np.sort(e)).all(1)[clear].all()


@pytest.fixture(scope="module")
def short(plans: PlanStore) -> Path:
    """A plan with a context of 64 tokens and steps of 40 rows."""
    return plans.compile(model_path("tiny-mixtral"), max_context=64, max_rows=40)


def random_texts(*lengths: int) -> list[Document]:
    rng = np.random.default_rng(7)
    return [Document.of_text(rng.integers(3, 4000, n, dtype=np.int32)) for n in lengths]


def same(a: Records, b: Records, rows: slice = slice(None)) -> bool:
    """Whether `b` is `a[rows]` to the bit."""
    return all(
        np.array_equal(getattr(a.layers[layer], name)[rows], getattr(b.layers[layer], name))
        for layer in a.layers
        for name in ("a", "w", "e", "prev")
    )


def test_previous_tokens_windows_and_steps(short: Path) -> None:
    """Holds "previous token's experts kept with each row", -1 where a context begins, though steps
    cut documents; and that documents longer than the context are read in windows."""
    documents = random_texts(150, 1, 39, 40, 41, 5)
    with pdscope.load(short) as engine:
        records = read(engine, documents)
        alone = [read(engine, [d]) for d in documents]
        (window,) = random_texts(150)
        window = Document.of_text(window.ids[64:128])
        assert same(alone[0], read(engine, [window]), slice(64, 128))
    lengths = [len(d.ids) for d in documents]
    assert records.document.tolist() == np.repeat(np.arange(6), lengths).tolist()
    assert records.position.tolist() == [i for n in lengths for i in range(n)]
    first = records.position % 64 == 0
    for layer in records.layers.values():
        assert (layer.prev[first] == -1).all()
        after = np.flatnonzero(~first)
        assert (layer.prev[after] == layer.e[after - 1]).all()
    at = 0
    for document, own in zip(documents, alone, strict=True):
        for layer, theirs in own.layers.items():
            ours = records.layers[layer].a[at : at + len(document.ids)]
            assert np.abs(ours - theirs.a).max() <= 2**-5 * np.abs(ours).max()
        at += len(document.ids)


def test_more_documents_than_sequences(short: Path) -> None:
    """A step has so many sequences at most; none sees another's tokens."""
    documents = random_texts(*[1] * 70, 64, *[2] * 40)
    with pdscope.load(short) as engine:
        records = read(engine, documents)
        own = read(engine, [documents[70]])
    assert len(records.token) == 70 + 64 + 80
    ours = records.layers[0].a[70:134]
    assert np.abs(ours - own.layers[0].a).max() <= 2**-5 * np.abs(ours).max()


def test_records_do_not_depend_on_threads(short: Path) -> None:
    """Holds "result independent of thread count": the same bits."""
    documents = random_texts(50, 30, 100)
    found = []
    for threads in (1, 2):
        with pdscope.load(short, threads=threads) as engine:
            found.append(read(engine, documents))
    assert same(*found)


def test_dense_layers_have_no_records(plans: PlanStore) -> None:
    """deepseek's first layer is dense: MoE layers go by their numbers in the model."""
    with pdscope.load(plans.compile(model_path("tiny-deepseek-v2"))) as engine:
        records = read(engine, random_texts(10))
    assert list(records.layers) == [1, 2, 3, 4, 5, 6]


def test_foreign_ids_are_refused_and_the_reader_lives_on(short: Path) -> None:
    with pdscope.load(short) as engine, RoutingReader(engine) as reader:
        bad = Document.of_text(np.array([5, 10**6], np.int32))
        with pytest.raises(InputError, match="token id 1000000"):
            list(reader.read([bad]))
        assert len(list(reader.read(random_texts(50)))) == 2
        cut = reader.read(random_texts(100))
        next(cut)
        cut.close()
        assert len(list(reader.read(random_texts(50)))) == 2
