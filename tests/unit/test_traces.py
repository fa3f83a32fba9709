"""The sample of a text's positions, and the store that keeps their traces.

Holds the issue's lines "keeps (a, w, e) per MoE layer as a reservoir of at most `--trace-records`
rows a layer in bf16 on disk" and "killing and restarting any pass loses at most one chunk".
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdscope.compiler.phaseper import corpus as corpora
from pdscope.compiler.phaseper.corpus import PHASES, Corpus, choose, token_arrays
from pdscope.compiler.phaseper.traces import (
    LAYER_ARRAYS,
    TOKEN_ARRAYS,
    TraceShape,
    TraceStore,
    TraceWriter,
)
from pdscope.compiler.quantise import to_bfloat16
from pdscope.documents import Document
from pdscope.errors import PlanError


def documents(lengths: list[int], seed: int = 0) -> Iterator[Document]:
    """Chats of random ids, each half the assistant's."""
    rng = np.random.default_rng(seed)
    for n in lengths:
        ids = rng.integers(0, 1000, n, dtype=np.int32)
        yield Document.of_chat(ids, np.arange(n) >= n // 2)


# --- the text and the sample ---


def test_a_corpus_gives_its_documents_back(tmp_path: Path) -> None:
    lengths = [5, 1, 70, 3]
    corpus = Corpus.write(tmp_path / "c", documents(lengths))
    assert len(corpus) == 4 and corpus.tokens == 79
    for number, wanted in enumerate(documents(lengths)):
        found = corpus.document(number)
        for name in ("ids", "prefill", "decode"):
            assert getattr(found, name).tolist() == getattr(wanted, name).tolist()
    assert corpus.counts("decode").tolist() == [3, 1, 35, 2]


def test_a_corpus_cut_short_is_none(tmp_path: Path) -> None:
    """Killed while it was written: it has no description, or files of another length."""

    def broken() -> Iterator[Document]:
        yield from documents([10])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Corpus.write(tmp_path / "c", broken())
    with pytest.raises(PlanError, match="no whole text is there"):
        Corpus(tmp_path / "c")
    Corpus.write(tmp_path / "c", documents([10]))
    (tmp_path / "c/ids.bin").write_bytes(b"1234")
    with pytest.raises(PlanError, match="cut short"):
        Corpus(tmp_path / "c")


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    rows=st.integers(1, 200),
    block=st.integers(1, 64),
)
def test_the_sample_keeps_its_bounds(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], rows: int, block: int
) -> None:
    """At most `rows` a phase, all of them if there are no more; the phases right, ascending,
    distinct, and the same however the text is walked through."""
    corpus = Corpus.write(tmp_path_factory.getbasetemp() / "corpus", documents(lengths))
    sample = choose(corpus, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "BLOCK", block)
        again = choose(corpus, rows)
    for phase in PHASES:
        kept = sample.positions[phase]
        assert len(kept) == min(rows, sample.seen[phase])
        assert corpus.of_phase(phase, slice(None))[kept].all()
        assert (np.diff(kept) > 0).all()
        assert kept.tolist() == again.positions[phase].tolist()
        numbers = np.searchsorted(corpus.ends, kept, "right")
        assert sample.taken[numbers].all()
        assert sample.seen[phase] <= corpus.counts(phase).sum()
        everything = sample.taken.all()
        assert everything or sample.seen[phase] >= corpora.READ * rows


def test_every_position_is_as_likely(tmp_path: Path) -> None:
    """A thousand rows of 100,000, in 50 parts of the text: chi-squared with 49 degrees of freedom
    stays below 85.4 (one in a thousand). The phases are drawn apart, though the text is of both."""
    texts = (Document.of_text(d.ids) for d in documents([100] * 1000))
    corpus = Corpus.write(tmp_path / "c", texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "READ", 100)  # all documents
        sample = choose(corpus, 1000)
    for phase in PHASES:
        counts, _ = np.histogram(sample.positions[phase], 50, (0, corpus.tokens))
        assert ((counts - 20.0) ** 2 / 20).sum() < 85.4
    assert len(np.intersect1d(*sample.positions.values())) < 30  # 10 are to be expected
    part = choose(corpus, 1000)  # and the documents that are read, where not all are
    assert 40 <= part.taken.sum() <= 42
    numbers = np.flatnonzero(part.taken)
    assert 300 < numbers.mean() < 700


def test_validation_is_whole_documents(tmp_path: Path) -> None:
    """Holds the split "by a hash of the document": copies of a text are on one side."""
    twice = [*documents([20] * 500), *documents([20] * 500)]
    corpus = Corpus.write(tmp_path / "c", iter(twice))
    split = corpus.validation()
    assert split[:500].tolist() == split[500:].tolist()
    assert 25 <= split[:500].sum() <= 75
    arrays = token_arrays(corpus, np.arange(corpus.tokens))
    assert arrays["split"].tolist() == np.repeat(split, 20).tolist()
    assert arrays["document"].tolist() == np.repeat(np.arange(1000), 20).tolist()
    assert arrays["position"].tolist() == list(range(20)) * 1000


# --- the store ---

SHAPE = TraceShape(
    hidden=24,
    experts=8,
    top_k=2,
    layers=(1, 3),
    rows={"prefill": 7, "decode": 4},
    seen={"prefill": 9, "decode": 4},
)
TOKENS = {p: {x: np.arange(SHAPE.rows[p]) for x in TOKEN_ARRAYS} for p in PHASES}


def rows_of(phase: str, first: int, last: int) -> dict[int, dict[str, np.ndarray]]:
    """Rows [first, last) of every layer, the same whenever they are asked for."""
    layers = {}
    for layer in SHAPE.layers:
        rng = np.random.default_rng((PHASES.index(phase), layer))
        n, k = SHAPE.rows[phase], SHAPE.top_k
        whole = {
            "a": rng.standard_normal((n, SHAPE.hidden), np.float32),
            "w": rng.random((n, k), np.float32),
            "e": rng.integers(0, SHAPE.experts, (n, k), dtype=np.int32),
            "prev": rng.integers(-1, SHAPE.experts, (n, k), dtype=np.int32),
        }
        layers[layer] = {name: array[first:last] for name, array in whole.items()}
    return layers


def fill(writer: TraceWriter, until: int = 3) -> None:
    """Three chunks; from the one that the writer wants."""
    parts = (("prefill", 0, 3), ("decode", 0, 4), ("prefill", 3, 7))
    for number in range(writer.done, until):
        phase, first, last = parts[number]
        writer.add(phase, rows_of(phase, first, last))
        writer.end_chunk(number + 1)


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")}


def test_a_store_gives_its_rows_back(tmp_path: Path) -> None:
    """a as bf16 bits, the rest exactly, in every layer the same tokens."""
    writer = TraceWriter(tmp_path / "s", "key", SHAPE, TOKENS)
    fill(writer)
    writer.finish()
    store = TraceStore.open(tmp_path / "s")
    assert (store.key, store.layers, store.hidden) == ("key", [1, 3], 24)
    assert (store.experts, store.top_k, store.phases) == (8, 2, PHASES)
    for phase in PHASES:
        assert store.rows(phase) == SHAPE.rows[phase]
        for layer, wanted in rows_of(phase, 0, 100).items():
            found = store.layer(phase, layer)
            assert found.a.dtype == np.uint16
            assert found.a.tolist() == to_bfloat16(wanted["a"]).tolist()
            for name in ("w", "e", "prev"):
                assert getattr(found, name).dtype == wanted[name].dtype
                assert getattr(found, name).tolist() == wanted[name].tolist()
        for name in ("token", "document", "position"):
            assert getattr(store, name)(phase).tolist() == list(range(SHAPE.rows[phase]))
    size = sum(p.stat().st_size for p in (tmp_path / "s").rglob("*.npy"))
    arrays = len(PHASES) * (len(TOKEN_ARRAYS) + len(SHAPE.layers) * len(LAYER_ARRAYS))
    assert size == 11 * SHAPE.row_bytes() + arrays * 128  # and their headers


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_a_killed_writer_loses_one_chunk(tmp_path: Path, chunks: int) -> None:
    """Rows behind the last whole chunk go, also half of a row; the rest is kept, and the store is
    the same to the byte."""
    fill(TraceWriter(tmp_path / "whole", "key", SHAPE, TOKENS))
    fill(TraceWriter(tmp_path / "s", "key", SHAPE, TOKENS), until=chunks)
    with (tmp_path / "s/prefill/layer003.a.npy").open("ab") as file:
        file.write(b"half a row")
    with pytest.raises(PlanError, match="no description of finished traces"):
        TraceStore.open(tmp_path / "s")
    writer = TraceWriter(tmp_path / "s", "key", SHAPE, TOKENS)
    assert writer.done == chunks
    fill(writer)
    assert content(tmp_path / "s") == content(tmp_path / "whole")


@pytest.mark.parametrize("how", ["key", "short", "garbage"])
def test_what_cannot_be_gone_on_with_is_begun_anew(tmp_path: Path, how: str) -> None:
    """Traces of another model or text; files that lost a part, as after a power failure."""
    fill(TraceWriter(tmp_path / "s", "key", SHAPE, TOKENS), until=2)
    if how == "short":
        (tmp_path / "s/decode/layer001.w.npy").write_bytes(b"")
    if how == "garbage":
        (tmp_path / "s/progress.json").write_text("{")
    writer = TraceWriter(tmp_path / "s", "other" if how == "key" else "key", SHAPE, TOKENS)
    assert writer.done == 0
    fill(writer)
    writer.finish()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: (p / "store.json").write_text("[]"), "no description of finished traces"),
        (lambda p: (p / "store.json").unlink(), "no description of finished traces"),
        (lambda p: (p / "prefill/layer001.e.npy").unlink(), "layer001.e.npy: cannot be read"),
        (lambda p: (p / "decode/token.npy").write_bytes(b"x"), "token.npy: cannot be read"),
        (
            lambda p: np.save(p / "decode/split.npy", np.zeros(3)),
            r"split.npy: has shape \(3,\), expected \(4,\)",
        ),
    ],
)
def test_damaged_stores_are_named(tmp_path: Path, change, says: str) -> None:  # type: ignore[no-untyped-def]
    writer = TraceWriter(tmp_path / "s", "key", SHAPE, TOKENS)
    fill(writer)
    writer.finish()
    change(tmp_path / "s")
    with pytest.raises(PlanError, match=says):
        TraceStore.open(tmp_path / "s")


def test_other_formats_are_refused(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "s", "key", SHAPE, TOKENS)
    fill(writer)
    writer.finish()
    data = json.loads((tmp_path / "s/store.json").read_text())
    (tmp_path / "s/store.json").write_text(json.dumps(data | {"format_version": 9}))
    with pytest.raises(PlanError, match="format_version is 9, expected 1"):
        TraceStore.open(tmp_path / "s")
