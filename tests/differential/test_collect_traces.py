"""Compiles that collect traces: what they keep, how they resume, what they say.

Holds the issue's lines "runs calibration text through the compiled runtime itself", "`--calibration
FILE`", "without one, a built-in default of generated prompts and a warning that says what is lost",
"Progress bar, resumable, cached by content" and "killing and restarting any pass loses at most one
chunk".
"""

import json
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.assets import BUNDLED
from support.commands import run_here
from support.plans import PlanStore

import pdscope
from pdscope.compiler.driver import CompileResult, compile_model
from pdscope.compiler.passes import collect_traces
from pdscope.compiler.passes.collect_traces import default_rows
from pdscope.compiler.passmanager import PassResult
from pdscope.compiler.phaseper import calibration
from pdscope.compiler.phaseper.corpus import PHASES
from pdscope.compiler.phaseper.traces import TraceShape, TraceStore
from pdscope.compiler.pipeline import Pipeline
from pdscope.compiler.quantise import to_bfloat16
from pdscope.documents import read_documents
from pdscope.errors import BudgetError, InputError
from pdscope.routing_records import RoutingReader

MODEL = BUNDLED / "tiny-mixtral"
DOCUMENTS = 12


@pytest.fixture(autouse=True)
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes of the traces is a matter of test_predictor_compile.py, and takes its time."""
    monkeypatch.setattr(Pipeline, "_train_predictors", lambda *_: None)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some prompts of our own, with answers of many lengths."""
    file = tmp_path_factory.mktemp("text") / "chats.jsonl"
    with file.open("w") as out:
        for number, prompt in enumerate(calibration.PROMPTS[:DOCUMENTS]):
            answer = " ".join(calibration.PROMPTS[number : 2 * number + 1])
            messages = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]
            out.write(json.dumps({"messages": messages}) + "\n")
    return file


class Watch:
    """Progress that counts, and may end the compile as a kill would."""

    def __init__(self, stage: str = "", kill_at: float = np.inf) -> None:
        self.stage, self.kill_at = stage, kill_at
        self.first: dict[str, int] = {}  # what a stage began with
        self.done: dict[str, int] = {}
        self.total: dict[str, tuple[int, str]] = {}

    def start(self, what: str, total: int, unit: str = "bytes") -> None:
        self.now = what
        self.done[what] = 0
        self.total[what] = (total, unit)

    def advance(self, amount: int) -> None:
        self.first.setdefault(self.now, amount)
        self.done[self.now] += amount
        if self.now == self.stage and self.done[self.now] >= self.kill_at:
            raise KeyboardInterrupt


def collected(
    out: Path, keep: Path | None = None, watch: Watch | None = None, **options: Any
) -> CompileResult:
    """Compiles; the trace store, which goes with the workspace, is copied to `keep`."""

    def after(result: PassResult) -> None:
        if result.name == "collect-traces" and keep is not None:
            shutil.copytree(out.with_name(f".{out.name}.partial") / "scratch/traces", keep)

    return compile_model(MODEL, out, progress=watch, after_pass=after, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of about one document each."""
    monkeypatch.setattr(collect_traces, "CHUNK", 60)


def test_the_store_has_what_the_plan_does(
    plans: PlanStore, tmp_path: Path, chats: Path, chunks: None
) -> None:
    """Every row is that of the finished plan reading the file; the plan holds a summary alone, and
    computes what it would without a calibration."""
    watch = Watch()
    result = collected(tmp_path / "p", tmp_path / "s", watch, calibration=str(chats))
    store = TraceStore.open(tmp_path / "s")
    assert result.plan is not None
    with pdscope.load(result.plan) as engine, RoutingReader(engine) as reader:
        documents = list(read_documents(engine.tokenizer, chats))
        tokens = sum(len(d.ids) for d in documents)
        assert store.layers == [0, 1, 2, 3, 4, 5] and store.hidden == 128
        assert (store.experts, store.top_k) == (8, 2)
        for phase in PHASES:
            numbers, positions = store.document(phase), store.position(phase)
            ours = {name: {x: [] for x in store.layers} for name in ("a", "w", "e", "prev")}
            for number, document in enumerate(documents):
                (records,) = reader.read([document])
                at = np.flatnonzero(getattr(records, phase))
                assert positions[numbers == number].tolist() == at.tolist()
                assert store.token(phase)[numbers == number].tolist() == document.ids[at].tolist()
                assert len(set(store.split(phase)[numbers == number].tolist())) <= 1
                for layer, found in records.layers.items():
                    for name, arrays in ours.items():
                        arrays[layer].append(getattr(found, name)[at].copy())
            for layer in store.layers:
                trace = store.layer(phase, layer)
                for name, arrays in ours.items():
                    wanted = np.concatenate(arrays[layer])
                    if name == "a":
                        wanted = to_bfloat16(wanted)
                    assert np.array_equal(getattr(trace, name), wanted), (phase, layer, name)
    assert watch.total["collect traces"] == (tokens, "tokens")
    assert watch.done["collect traces"] == tokens
    summary = json.loads((result.plan / "phaseper/traces.json").read_text())
    assert summary["calibration"] == "chats.jsonl" and summary["documents"] == DOCUMENTS
    assert sum(summary["rows"].values()) == summary["tokens"] == tokens
    assert not list(tmp_path.glob(".*"))
    plain = json.loads((plans.compile(MODEL) / "plan.json").read_text())
    assert plain["plan_hash"] == result.manifest["plan_hash"]
    assert "phaseper/traces.json" in result.manifest["files"]
    assert run_here("pdscope-inspect", result.plan, "--verify").status == 0


def test_trace_records_bounds_the_rows(tmp_path: Path, chats: Path, chunks: None) -> None:
    """Holds "a reservoir of at most `--trace-records` rows a layer": rows of the whole store, the
    same in all layers."""
    collected(tmp_path / "p", tmp_path / "all", calibration=chats)
    collected(tmp_path / "q", tmp_path / "some", calibration=chats, trace_records=40)
    whole, part = TraceStore.open(tmp_path / "all"), TraceStore.open(tmp_path / "some")
    for phase in PHASES:
        assert part.rows(phase) == 40 < whole.rows(phase)
        names = list(zip(whole.document(phase), whole.position(phase), strict=True))
        wanted = zip(part.document(phase), part.position(phase), strict=True)
        rows = [names.index(row) for row in wanted]
        assert rows == sorted(rows)
        for layer in part.layers:
            assert np.array_equal(part.layer(phase, layer).e, whole.layer(phase, layer).e[rows])
            # Other steps: fewer documents may have been read.
            a, b = part.layer(phase, layer).a, whole.layer(phase, layer).a[rows]
            assert (a == b).mean() > 0.9


@pytest.mark.parametrize("stage", ["collect traces", "pack weights"])
def test_resumes_behind_the_last_chunk(
    tmp_path: Path, chats: Path, chunks: None, stage: str
) -> None:
    """Killed halfway, the next run begins with what is done, and gives the same bytes."""
    whole = Watch()
    collected(tmp_path / "p", tmp_path / "whole", whole, calibration=chats)
    half = whole.total[stage][0] // 2
    with pytest.raises(KeyboardInterrupt):
        collected(tmp_path / "q", None, Watch(stage, half), calibration=chats)
    again = Watch()
    result = collected(tmp_path / "q", tmp_path / "again", again, calibration=chats)
    assert content(tmp_path / "again") == content(tmp_path / "whole")
    assert content(tmp_path / "q") == content(tmp_path / "p")
    assert {p.name for p in result.passes if p.cached} >= {"read-calibration"}
    assert again.done["collect traces"] == whole.done["collect traces"]
    if stage == "collect traces":
        longest = 500  # of a document; a chunk ends with the one that fills it
        assert half - longest < again.first[stage] < whole.total[stage][0]


KILLER = """
import os, signal, sys
from pdscope.compiler.driver import compile_model
from pdscope.compiler.passes import collect_traces
collect_traces.CHUNK = 60
class Progress:
    def start(self, what, total, unit="bytes"):
        self.what, self.calls = what, 0
    def advance(self, amount):
        self.calls += 1
        if self.what == "collect traces" and self.calls == 5:
            os.kill(os.getpid(), signal.SIGKILL)
compile_model(sys.argv[1], sys.argv[2], calibration=sys.argv[3], progress=Progress())
"""


def test_resumes_after_sigkill(tmp_path: Path, chats: Path, chunks: None) -> None:
    command = [sys.executable, "-c", KILLER, str(MODEL), str(tmp_path / "p"), str(chats)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    progress = tmp_path / ".p.partial/scratch/traces/progress.json"
    done = json.loads(progress.read_text())["done"]
    assert 1 <= done < DOCUMENTS
    watch = Watch()
    collected(tmp_path / "p", tmp_path / "s", watch, calibration=chats)
    assert watch.first["collect traces"] > 0
    collected(tmp_path / "q", tmp_path / "whole", calibration=chats)
    assert content(tmp_path / "s") == content(tmp_path / "whole")


def test_another_text_or_number_is_another_key(tmp_path: Path, chats: Path, chunks: None) -> None:
    """A compile that was killed behind its traces, and goes on with other options."""

    def interrupted(**options: Any) -> None:
        def after(result: PassResult) -> None:
            if result.name == "collect-traces":
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            compile_model(MODEL, tmp_path / "p", after_pass=after, **options)

    other = tmp_path / "other.txt"
    other.write_text("A plain text.\n" * 30)
    interrupted(calibration=chats)
    interrupted(calibration=chats, trace_records=9)
    interrupted(calibration=other)
    result = collected(tmp_path / "p", tmp_path / "s", calibration=chats)
    cached = {p.name for p in result.passes if p.cached}
    assert "pack-layer000" in cached and not cached & {"read-calibration", "collect-traces"}
    collected(tmp_path / "q", tmp_path / "whole", calibration=chats)
    assert content(tmp_path / "s") == content(tmp_path / "whole")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "PROMPTS", calibration.PROMPTS[:5])
    monkeypatch.setattr(calibration, "LENGTH", 12)
    monkeypatch.setattr(calibration, "TOGETHER", 2)


def test_without_a_calibration_the_model_writes_one(
    tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a note says what is lost. Killed, at most one chunk of answers is written again; the
    answers are the same whenever they are drawn."""
    result = collected(tmp_path / "p", tmp_path / "s", predictor="auto")
    (note,) = result.notes
    assert note.startswith("no --calibration: predictors are trained on the model's own answers")
    store = TraceStore.open(tmp_path / "s")
    assert 0 < store.rows("decode") <= 5 * 12 < store.rows("prefill")
    assert set(store.document("decode").tolist()) == {0, 1, 2, 3, 4}
    with pytest.raises(KeyboardInterrupt):
        collected(tmp_path / "q", None, Watch("generate calibration", 48), predictor="auto")
    answers = tmp_path / ".q.partial/scratch/answers"
    assert [p.name for p in sorted(answers.iterdir())] == ["0000.json", "0002.json"]
    drawn = []
    draw = calibration._answers
    monkeypatch.setattr(calibration, "_answers", lambda *a: drawn.append(a[3]) or draw(*a))
    watch = Watch()
    collected(tmp_path / "q", tmp_path / "t", watch, predictor="auto")
    assert drawn == [4] and watch.total["generate calibration"] == (60, "tokens")
    assert content(tmp_path / "s") == content(tmp_path / "t")


def test_answers_are_what_generate_gives(plans: PlanStore, tmp_path: Path, few: None) -> None:
    """Side by side or alone: the same sampler, seed and draw for each answer."""
    with pdscope.load(plans.compile(MODEL, dtype="fp32")) as engine:
        made = list(calibration.generated(engine, tmp_path, "key", lambda _: None))
        for number, (document, prompt) in enumerate(zip(made, calibration.PROMPTS, strict=True)):
            alone = engine.generate(
                messages=[{"role": "user", "content": prompt}],
                max_new_tokens=12,
                temperature=1.0,
                top_p=0.95,
                seed=calibration.SEED + number,
            )
            answer = [t for t in alone.tokens if t not in engine.plan.eos]
            assert document.ids[document.decode].tolist() == answer
            assert document.prefill.all()


def no_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


@pytest.mark.parametrize(
    ("options", "change", "says"),
    [
        ({"load_format": "dummy"}, None, "no predictor: dummy weights choose experts at random"),
        ({}, no_tokenizer, "no predictor: the model has no tokenizer.json to read a calibration"),
    ],
)
def test_no_traces_and_a_note_why(
    tmp_path: Path,
    chats: Path,
    options: dict[str, Any],
    change: Callable[[Path], None] | None,
    says: str,
) -> None:
    """Holds "with dummy weights or without tokenizer: no traces, a note says so"."""
    shutil.copytree(MODEL, tmp_path / "model")
    if change:
        change(tmp_path / "model")
    result = compile_model(tmp_path / "model", tmp_path / "p", calibration=chats, **options)
    assert [note for note in result.notes if note.startswith(says)]
    assert not [p.name for p in result.passes if "calib" in p.name or "traces" in p.name]


def test_a_phase_without_text_is_told(tmp_path: Path) -> None:
    """Prompts alone: the store's other phase is empty, and a note says so."""
    file = tmp_path / "prompts.jsonl"
    message = {"role": "user", "content": "Hello there."}
    file.write_text(json.dumps({"messages": [message]}) + "\n")
    result = collected(tmp_path / "p", tmp_path / "s", calibration=file)
    (note,) = result.notes
    assert note.startswith(f"{file}: holds nothing that the assistant wrote, so the decode phase")
    store = TraceStore.open(tmp_path / "s")
    assert store.rows("prefill") > 0 == store.rows("decode")
    assert store.layer("decode", 5).a.shape == (0, 128) and not len(store.token("decode"))


def test_a_plan_for_another_cpu_cannot_be_run(
    tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdscope.plan.cpu_features", lambda: frozenset({"sse2"}))
    result = compile_model(MODEL, tmp_path / "p", calibration=chats, target="avx2,fma,f16c")
    (note,) = result.notes
    assert note.startswith("no predictor: it needs a run of the plan, and ")
    assert "avx2, fma, f16c, which this CPU lacks" in note


def test_off_is_the_default_and_costs_nothing(tmp_path: Path) -> None:
    for number, options in enumerate(({}, {"predictor": "off"})):
        result = compile_model(MODEL, tmp_path / str(number), **options)
        assert not [p.name for p in result.passes if "calib" in p.name or "traces" in p.name]
        assert not result.notes


def test_faults_of_the_text_come_before_the_weights(tmp_path: Path) -> None:
    """One line that names file and line; nothing was packed, and nothing is left behind."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n{"txt": 1}\n')
    watch = Watch()
    with pytest.raises(InputError, match=r"bad.jsonl:2: expected .* but there is neither"):
        collected(tmp_path / "out/p", None, watch, calibration=bad)
    assert "pack weights" not in watch.total
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--calibration", "missing.txt"], "calibration: missing.txt: no such file; expected a"),
        (["--calibration", "."], "calibration: .: is no file; expected a text, or jsonl with"),
        (["--calibration", __file__, "--predictor", "off"], "predictor is 'off', which uses none"),
        (["--trace-records", "5"], "5 rows are wanted, but no predictor: give a --calibration, or"),
    ],
)
def test_faults_of_options(tmp_path: Path, arguments: list[str], says: str) -> None:
    ran = run_here("pdscope-compile", MODEL, "-o", tmp_path / "p", *arguments)
    assert says in ran.fault()
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("value", [0, 2**31, 1.5, True, "9"])
def test_trace_records_out_of_range(tmp_path: Path, value: object) -> None:
    with pytest.raises(InputError, match="trace_records"):
        compile_model(MODEL, tmp_path / "p", trace_records=value)
    with pytest.raises(InputError, match="predictor: 'on' is unknown; expected one of auto, off"):
        compile_model(MODEL, tmp_path / "p", predictor="on")


def test_a_full_disk_is_foreseen(
    tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packed weights are kept for the next try."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(collect_traces.shutil, "disk_usage", lambda _: usage(9, 9, 10**5))
    monkeypatch.setattr("pdscope.compiler.driver._check_space", lambda *_: None)
    with pytest.raises(BudgetError, match="free some space, or choose a lower --trace-records"):
        collected(tmp_path / "p", calibration=chats)
    monkeypatch.undo()
    result = collected(tmp_path / "p", calibration=chats)
    assert "pack-layer000" in {p.name for p in result.passes if p.cached}


def test_the_default_is_bounded_by_the_disk() -> None:
    """16 GiB at most, also at 48 layers of 2048 with 128 experts; --help says what a row takes."""
    none = {"prefill": 0, "decode": 0}
    wide = TraceShape(2048, 128, 8, tuple(range(48)), none, none)
    rows = default_rows(wide)
    assert 40_000 < rows < 131_072
    assert 2 * rows * wide.row_bytes() <= 16 << 30
    assert default_rows(TraceShape(256, 32, 4, tuple(range(8)), none, none)) == 1 << 20
    per_layer = (wide.row_bytes() - 13) / 48
    assert per_layer == 2 * 2048 + 8 * 8
    help_text = " ".join(run_here("pdscope-compile", "--help").out.split())
    assert "2 bytes x hidden size + 8 x top-k a MoE layer" in help_text
    assert round(2 * 10_000 * wide.row_bytes() / 2**30, 1) == 3.7 and "3.7 GiB" in help_text


def test_memory_is_bounded(
    plans: PlanStore, tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No array is as long as the text or the sample: what is written at once is a step's rows."""
    sizes = []
    write = collect_traces.TraceWriter.add

    def add(self: Any, phase: str, layers: Any) -> None:
        sizes.append(len(layers[0]["a"]))
        write(self, phase, layers)

    monkeypatch.setattr(collect_traces.TraceWriter, "add", add)
    long = tmp_path / "long.jsonl"
    long.write_text(chats.read_text() * 3)
    collected(tmp_path / "p", calibration=long, max_rows=64)
    assert max(sizes) <= 64 and sum(sizes) > 20 * 64
