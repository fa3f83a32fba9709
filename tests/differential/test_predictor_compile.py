"""Compiles that train predictors, and what `pdscope-inspect --predictor --on` measures on a text.

Holds the issue's point 7 ("`--on FILE` evaluates on any text through the compiled plan") and of
points 1 to 4: "resumable, cached by content", "written to the plan", "the budget is a flag".
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support.assets import BUNDLED
from support.commands import run_here
from support.damage import edit_plan
from support.traces import MemoryStore, MemoryTrace

import pdscope
from pdscope.compiler.driver import compile_model
from pdscope.compiler.passmanager import PassResult
from pdscope.compiler.phaseper import calibration
from pdscope.compiler.phaseper.build import build_predictors
from pdscope.compiler.phaseper.corpus import PHASES
from pdscope.compiler.phaseper.evaluate import choice_scores, plan_gates
from pdscope.compiler.phaseper.predictor_file import PredictorFiles
from pdscope.compiler.phaseper.rivals import choice_scores as torch_choice
from pdscope.compiler.phaseper.rivals import transition_scores
from pdscope.compiler.phaseper.rows import PhaseRows
from pdscope.compiler.phaseper.select import evaluate
from pdscope.compiler.phaseper.store import Gate
from pdscope.compiler.phaseper.train import TrainOptions
from pdscope.compiler.quantise import to_bfloat16, to_float32
from pdscope.documents import read_documents
from pdscope.errors import BudgetError, InputError
from pdscope.ir.graph import GateAttrs
from pdscope.plan import Plan
from pdscope.routing_records import RoutingReader

MODEL = BUNDLED / "tiny-mixtral"
EXPERTS, TOP_K = 8, 2


def write_chats(file: Path, first: int, count: int) -> Path:
    """Some prompts of our own, with answers of many lengths."""
    with file.open("w") as out:
        for number in range(first, first + count):
            answer = " ".join(calibration.PROMPTS[number : number + 8])
            messages = [
                {"role": "user", "content": calibration.PROMPTS[number]},
                {"role": "assistant", "content": answer},
            ]
            out.write(json.dumps({"messages": messages}) + "\n")
    return file


class Compiled:
    def __init__(self, folder: Path) -> None:
        self.chats = write_chats(folder / "chats.jsonl", 0, 12)
        self.said = run_here(
            "pdscope-compile", MODEL, "-o", folder / "p", "--calibration", self.chats,
            "--trace-records", 200, "--predictor-device", "cpu",
        )  # fmt: skip
        assert self.said.status == 0, self.said.err
        self.plan = folder / "p"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("predictors"))


def test_the_plan_holds_predictors(compiled: Compiled) -> None:
    """Files, all listed; the summary's line; and the plan is the one without them."""
    plan = Plan.open(compiled.plan, verify=True)
    names = {f"phaseper/layer{n:03d}.safetensors" for n in range(5)}
    assert names | {"phaseper.json", "report.html", "phaseper/traces.json"} <= plan.files.keys()
    assert run_here("pdscope-inspect", compiled.plan, "--verify").status == 0
    counted = plan.memory_table()["predictors"]
    with pdscope.load(plan) as engine:
        assert engine.info.net_bytes == counted["total_bytes"] > 0
    (line,) = [x for x in compiled.said.out.splitlines() if x.startswith("predictors ")]
    assert "hit rate" in line and "trained in" in line and "middle" in line
    report = (compiled.plan / "report.html").read_text()
    assert "Trained on 200 prefill rows and 200 decode rows of chats.jsonl." in report
    assert len(report) < 100_000
    data = json.loads((compiled.plan / "phaseper.json").read_text())
    assert data["rows"] == {"prefill": 200, "decode": 200}
    assert len(data["layers"]) == 10 and data["options"]["size_budget"] == 4_200_000


def routed(plan: Path, text: Path) -> MemoryStore:
    """All rows of a text, as a trace store."""
    found: dict[tuple[str, int], list[MemoryTrace]] = {}
    with pdscope.load(plan) as engine, RoutingReader(engine) as reader:
        for records in reader.read(read_documents(engine.tokenizer, text)):
            for phase in PHASES:
                at = np.flatnonzero(getattr(records, phase))
                for number, x in records.layers.items():
                    one = MemoryTrace(to_bfloat16(x.a[at]), x.w[at], x.e[at], x.prev[at])
                    found.setdefault((phase, number), []).append(one)
    traces = {
        key: MemoryTrace(
            *(np.concatenate([getattr(p, n) for p in parts]) for n in ("a", "w", "e", "prev"))
        )
        for key, parts in found.items()
    }
    return MemoryStore(traces, EXPERTS, 0.0)


def model_gates() -> dict[int, Gate]:
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        name = "model.layers.{}.block_sparse_moe.gate.weight"
        weights = {n: file.get_tensor(name.format(n)).float().numpy() for n in range(6)}
    attrs = GateAttrs.softmax(EXPERTS, TOP_K)
    return {n: Gate(attrs, weight, None) for n, weight in weights.items()}


def test_gates_of_a_plan_are_the_model_s(compiled: Compiled) -> None:
    found = plan_gates(Plan.open(compiled.plan))
    for number, gate in model_gates().items():
        assert np.array_equal(found[number].weight, gate.weight)
        assert (found[number].attrs.experts, found[number].attrs.top_k) == (EXPERTS, TOP_K)


def test_on_a_text_is_what_torch_measures(compiled: Compiled, tmp_path: Path) -> None:
    """Whole windows of 512 rows and a rest, in both phases; every predictor, layer by layer."""
    text = write_chats(tmp_path / "other.jsonl", 4, 16)
    page = tmp_path / "page.html"
    out = run_here(
        "pdscope-inspect", compiled.plan, "--predictor", "--on", text, "--html", page, "--json"
    ).out
    ours = {(x["layer"], x["phase"]): x for x in json.loads(out)}
    store, gates, files = routed(compiled.plan, text), model_gates(), PredictorFiles(compiled.plan)
    assert store.rows("decode") > 3 * 512 and store.rows("prefill") > 100
    for phase in PHASES:
        rows = PhaseRows(store, phase, gates, torch.device("cpu"), torch.float32)
        theirs = evaluate(rows, np.arange(store.rows(phase)), files)
        assert len(theirs) == 5
        for x in theirs:
            mine = ours.pop((x["layer"], phase))
            assert {k: mine[k] for k in ("group", "chosen")} == {
                k: x[k] for k in ("group", "chosen")
            }
            pairs = [(mine, x), *((mine["rivals"][n], f) for n, f in x["rivals"].items())]
            assert mine["rivals"].keys() == x["rivals"].keys()
            for a, b in pairs:
                assert a["hit"] == pytest.approx(b["hit"], abs=2e-3)  # ties may fall otherwise
                assert a["rank_hit"] == pytest.approx(b["rank_hit"], abs=0.03)
            if phase == "decode":
                assert mine["rivals"]["cross_gate"]["hit"] == pytest.approx(
                    by_hand(store, gates, x)
                )
    assert not ours
    assert "Figures are of other.jsonl." in page.read_text()


def by_hand(store: MemoryStore, gates: dict[int, Gate], x: dict[str, Any]) -> float:
    """The cross-layer gate's hit rate, row by row."""
    layer, following = (store.layer("decode", n) for n in (x["layer"], x["layer"] + 1))
    logits = to_float32(layer.a) @ gates[x["layer"] + 1].weight.T
    both = zip(np.argsort(-logits, axis=1)[:, :TOP_K].tolist(), following.e.tolist(), strict=True)
    return float(np.mean([len(set(a) & set(b)) / TOP_K for a, b in both]))


def test_tables_of_a_text(compiled: Compiled) -> None:
    out = run_here("pdscope-inspect", compiled.plan, "--predictor", "--on", compiled.chats).out
    assert f"figures of  {compiled.chats}: " in out


def test_inspecting_a_text_loads_no_torch(compiled: Compiled) -> None:
    """Holds "Running a plan imports neither torch nor transformers", for --on too."""
    arguments = [str(compiled.plan), "--predictor", "--on", str(compiled.chats)]
    code = (
        f"import sys, pdscope.cli.inspect as c\ntry: c.main({arguments})\n"
        "except SystemExit as e: assert e.code == 0\n"
        "print(*{m.split('.')[0] for m in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.splitlines()[-1].split())
    assert "numpy" in loaded and not loaded & {"torch", "transformers", "safetensors"}


def test_faults_of_a_text(compiled: Compiled, tmp_path: Path) -> None:
    def fault(text: Path) -> str:
        return run_here("pdscope-inspect", compiled.plan, "--predictor", "--on", text).fault()

    assert f"{tmp_path / 'missing'}: No such file" in fault(tmp_path / "missing")
    assert "Is a directory" in fault(tmp_path)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n{"txt": 1}\n')
    assert f"{bad}:2: expected" in fault(bad)
    bad.write_text("")
    assert f"{bad}: holds no text" in fault(bad)


def test_damaged_predictors(compiled: Compiled, tmp_path: Path) -> None:
    """The line names the predictor's file, not the text."""
    plan = tmp_path / "p"
    shutil.copytree(compiled.plan, plan)

    def fault() -> str:
        return run_here("pdscope-inspect", plan, "--predictor", "--on", compiled.chats).fault()

    file = plan / "phaseper/layer001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"decode.frequency", b"decode.frequencx", 1))
    assert fault().startswith(f"error: {file}: has no tensor decode.frequency: compile the plan")
    file.write_bytes(whole[:8] + b"?" + whole[9:])
    assert fault().startswith(f"error: {file}: cannot be read")
    file.write_bytes(whole.replace(b'"shape":[8,8]', b'"shape":[4,16]'[:13], 1))
    assert fault().startswith(f"error: {file}: cannot be read")
    data = json.loads((plan / "phaseper.json").read_text())
    data["groups"]["layers"] = [n + 3 for n in data["groups"]["layers"]]
    for entry in data["layers"]:
        entry["layer"], entry["next"] = entry["layer"] + 3, entry["next"] + 3
    (plan / "phaseper.json").write_text(json.dumps(data))
    refresh(plan, "phaseper.json")
    assert "phaseper.json: layer 6 of the model has no experts: compile the plan" in fault()


def refresh(plan: Path, name: str) -> None:
    """plan.json gets the size and hash of a changed file."""
    content = (plan / name).read_bytes()
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit_plan(plan, lambda d: d["files"].update({name: entry}))


@pytest.mark.parametrize(
    ("attrs", "biased"),
    [
        (GateAttrs.softmax(8, 2), False),
        (GateAttrs(8, 2, "sigmoid", True, 0.0, 1.0, 4, 2, "top2", 0.0), True),
        (GateAttrs(8, 2, "softmax", True, 0.0, 1.0, 4, 2, "max", -np.inf), False),
    ],
)
def test_scores_of_rivals_are_those_of_training(attrs: GateAttrs, biased: bool) -> None:
    rng = np.random.default_rng(1)
    bias = rng.standard_normal(8).astype(np.float32) if biased else None
    gate = Gate(attrs, rng.standard_normal((8, 4)).astype(np.float32), bias)
    logits = rng.standard_normal((50, 8)).astype(np.float32)
    expected = torch_choice(gate, torch.from_numpy(logits)).numpy()
    assert choice_scores(gate, logits) == pytest.approx(expected, abs=1e-6)
    table, source = rng.random((8, 8), np.float32), rng.integers(0, 8, (50, 2))
    weights = rng.random((50, 2), np.float32)
    share = weights / weights.sum(1, keepdims=True)
    expected = np.stack([share[i] @ table[source[i]] for i in range(50)])
    assert transition_scores(table, source, weights) == pytest.approx(expected, abs=1e-6)


def test_a_killed_compile_does_not_train_again(compiled: Compiled, tmp_path: Path) -> None:
    """Nor do other options take another's predictors."""
    options: dict[str, Any] = {"calibration": compiled.chats, "trace_records": 60}
    made: list[PassResult] = []

    def after(result: PassResult) -> None:
        if result.name == "train-phaseper":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_model(MODEL, tmp_path / "p", after_pass=after, **options)
    result = compile_model(MODEL, tmp_path / "p", after_pass=lambda r: made.append(r), **options)
    cached = {r.name for r in made if r.cached}
    assert {"collect-traces", "train-phaseper"} <= cached
    assert result.plan is not None and "report.html" in result.manifest["files"]
    with pytest.raises(KeyboardInterrupt):
        compile_model(MODEL, tmp_path / "q", after_pass=after, **options)
    made.clear()
    smaller = {**options, "predictor_budget": "60 kB"}
    compile_model(MODEL, tmp_path / "q", after_pass=lambda r: made.append(r), **smaller)
    cached = {r.name for r in made if r.cached}
    assert "collect-traces" in cached and "train-phaseper" not in cached
    data = json.loads((tmp_path / "q/phaseper.json").read_text())
    assert all(x["net"]["bytes"] <= 30_000 for x in data["layers"])


def test_faults_of_options_come_before_the_weights(compiled: Compiled, tmp_path: Path) -> None:
    seen: list[str] = []

    def compiles(**options: Any) -> None:
        compile_model(MODEL, tmp_path / "p", after_pass=lambda r: seen.append(r.name), **options)

    text = {"calibration": compiled.chats}
    with pytest.raises(BudgetError, match="500 bytes a layer .* raise --predictor-budget"):
        compiles(predictor_budget=1000, **text)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="predictor_device: cuda is wanted, but this machine"):
            compiles(predictor_device="cuda", **text)
    assert not [name for name in seen if name.startswith("pack")]
    for value in ("4 parsecs", "-1", 1.5, 0, True):
        with pytest.raises(InputError, match="predictor_budget"):
            compiles(predictor_budget=value, **text)
    with pytest.raises(InputError, match="predictor_device: 'tpu' is unknown; expected one of"):
        compiles(predictor_device="tpu", **text)
    for name, value in (("predictor_budget", "4MB"), ("predictor_device", "cpu")):
        with pytest.raises(InputError, match=f"{name}: .* wanted, but no predictor: give a"):
            compiles(**{name: value})


def test_a_single_document_and_a_single_phase() -> None:
    """Rows that are all for validation are trained on; a phase without rows has no predictor."""
    store, gates = one_document(), model_gates()
    about, files = build_predictors(store, gates, TrainOptions(search_rows=(64,)), "cpu")
    assert about["rows"] == {"decode": 40} and about["validation"] == {"decode": 0}
    assert {x["phase"] for x in about["layers"]} == {"decode"} and len(files) == 1


def test_prompts_alone_predict_prefill_alone(tmp_path: Path) -> None:
    """The compile ends well, and a text without prompts is told that there is nothing to see."""
    file = tmp_path / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": p}]} for p in calibration.PROMPTS[:3]]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = compile_model(MODEL, tmp_path / "p", calibration=file)
    (note,) = result.notes
    assert note.startswith(f"{file}: holds nothing that the assistant wrote")
    said = run_here("pdscope-inspect", tmp_path / "p", "--predictor", "--on", file).out
    assert "prefill" in said and "decode     all" not in said
    listed = json.loads((tmp_path / "p/phaseper.json").read_text())["layers"]
    assert {x["phase"] for x in listed} == {"prefill"}


def one_document() -> MemoryStore:
    rng = np.random.default_rng(0)
    traces = {}
    for phase, n in (("prefill", 0), ("decode", 40)):
        for layer in (0, 1):
            a = to_bfloat16(rng.standard_normal((n, 128)).astype(np.float32))
            e = np.tile(np.array([1, 2], np.int32), (n, 1))
            traces[phase, layer] = MemoryTrace(a, np.full((n, 2), 0.5, np.float32), e, e)
    return MemoryStore(traces, EXPERTS, 1.0)
