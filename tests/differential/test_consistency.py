"""One plan against itself: however the same tokens are run, the logits are the same.

Holds: "Cached decode agrees with one prefill of the whole text, and prefill split anywhere with
prefill at once, within tolerance; sequences batched together agree with each alone; lengths 1 to 17
and around every block edge; full context +-1 stops cleanly. Bit-identical over thread counts and
repeated runs of the same calls."
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.assets import model_path
from support.hf_reference import assert_rows_agree, load_reference, run_reference
from support.plans import PlanStore
from support.runs import KINDS, close, kind_model, kind_plan, prefill_all, random_ids

import pdscope
from pdscope.errors import BudgetError

CONTEXT = 192
EDGES = (63, 64, 65, 127, 128, 129, 191, 192)


DTYPES = ("bf16", "int8", "int4")


@pytest.fixture(scope="module", params=[*KINDS, *DTYPES, *(f"mla-{dtype}" for dtype in DTYPES)])
def engine(request: pytest.FixtureRequest, plans: PlanStore) -> Iterator[Any]:
    """fp32 plans of random models; of trained ones, whose routing bears rounding, the others."""
    kind, _, dtype = request.param.rpartition("-")
    if dtype in DTYPES:
        model = model_path("tiny-deepseek-v2" if kind else "tiny-mixtral")
        plan = plans.compile(model, dtype=dtype, max_context=CONTEXT)
    else:
        plan = kind_plan(plans, request.param, "fp32", CONTEXT)
    with pdscope.load(plan, threads=2) as engine:
        yield engine


def dtype_of(engine: Any) -> str:
    return str(engine.plan.data["dtype"])


def text(engine: Any, n: int, seed: int = 0) -> list[int]:
    return random_ids(engine.info.vocab, n, seed)


def test_decode_agrees_with_prefill(engine: Any) -> None:
    """Token by token from the start, over the block edges, against one prefill."""
    ids = text(engine, 140)
    whole = prefill_all(engine, ids)
    engine.reset()
    rows = np.stack([np.array(engine.decode(i)) for i in ids])
    assert close(rows, whole, dtype_of(engine))


def test_prefill_split_anywhere(engine: Any) -> None:
    """Two parts at each place of a short text, and at each block edge of a long one."""
    for ids, places in ((text(engine, 20), range(1, 20)), (text(engine, 192), EDGES[:-1])):
        whole = prefill_all(engine, ids)
        for place in places:
            engine.reset()
            first = np.array(engine.prefill(ids[:place], all_logits=True))
            second = np.array(engine.prefill(ids[place:], all_logits=True))
            joined = np.concatenate([first, second])
            assert close(joined, whole, dtype_of(engine)), f"{len(ids)} tokens split at {place}"


def test_lengths(engine: Any) -> None:
    """Every length from 1 to 17 and around the block edges is a prefix of the longest."""
    ids = text(engine, CONTEXT)
    whole = prefill_all(engine, ids)
    for n in (*range(1, 18), *EDGES):
        rows = prefill_all(engine, ids[:n])
        assert rows.shape == (n, engine.info.vocab)
        assert close(rows, whole[:n], dtype_of(engine)), f"{n} tokens"


def test_batched_sequences_agree_with_each_alone(engine: Any) -> None:
    """Mixed lengths in one step, then decode steps of all of them at once."""
    lengths = (1, 5, 17, 64, 31)
    texts = [text(engine, n + 6, seed=n) for n in lengths]
    alone = [prefill_all(engine, ids) for ids in texts]
    with engine.session(max_seqs=len(texts), kv_tokens=len(texts) * 128) as session:
        tokens = [i for ids, n in zip(texts, lengths, strict=True) for i in ids[:n]]
        seqs = [s for s, n in enumerate(lengths) for _ in range(n)]
        last = [j + 1 == len(seqs) or seqs[j + 1] != s for j, s in enumerate(seqs)]
        rows = np.array(session.step(tokens, seqs=seqs, want_logits=last))
        expected = np.stack([a[n - 1] for a, n in zip(alone, lengths, strict=True)])
        assert close(rows, expected, dtype_of(engine)), "prefill"
        for extra in range(6):
            order = list(np.random.default_rng(extra).permutation(len(texts)))
            step = [texts[s][lengths[s] + extra] for s in order]
            rows = np.array(session.step(step, seqs=order, want_logits=[True] * len(order)))
            expected = np.stack([alone[s][lengths[s] + extra] for s in order])
            assert close(rows, expected, dtype_of(engine)), f"decode {extra}"


def test_full_context_stops_cleanly(engine: Any) -> None:
    """One token less, the exact context, and one more; after the refusal the KV is as before."""
    ids = text(engine, CONTEXT + 1)
    whole = prefill_all(engine, ids[:CONTEXT])
    with pytest.raises(BudgetError, match=str(CONTEXT)):
        engine.decode(ids[CONTEXT])
    with pytest.raises(BudgetError, match=str(CONTEXT)):
        engine.prefill(ids[CONTEXT:])
    engine.reset()
    with pytest.raises(BudgetError, match=str(CONTEXT)):
        engine.prefill(ids)
    engine.reset()
    engine.prefill(ids[: CONTEXT - 1])
    row = np.array(engine.decode(ids[CONTEXT - 1]))
    assert close(row[None], whole[-1:], dtype_of(engine))
    engine.truncate(CONTEXT - 3)
    rows = np.array(engine.prefill(ids[CONTEXT - 3 : CONTEXT], all_logits=True))
    assert close(rows, whole[-3:], dtype_of(engine))


def test_generate_up_to_the_context(engine: Any) -> None:
    """A generation that reaches the context ends with that reason."""
    ids = text(engine, CONTEXT - 4)
    done = engine.generate(ids, max_new_tokens=50, ignore_eos=True)
    assert done.stop_reason == "context"
    assert len(done.tokens) in (4, 5)


def calls(engine: Any) -> bytes:
    """One fixed series of calls: prefills, decodes, a batch. All logits, as bytes."""
    ids = text(engine, 150)
    out = [prefill_all(engine, ids[:100])]
    out += [np.array(engine.decode(i)) for i in ids[100:110]]
    out.append(np.array(engine.prefill(ids[110:], all_logits=True)))
    with engine.session(max_seqs=3, kv_tokens=256) as session:
        seqs = [0] * 40 + [1] * 7 + [2]
        out.append(np.array(session.step(ids[:48], seqs=seqs, want_logits=[True] * 48)))
        out.append(np.array(session.step(ids[:3], seqs=[2, 0, 1], want_logits=[True] * 3)))
    return b"".join(a.tobytes() for a in out)


def test_bit_identical_over_threads_and_runs(engine: Any) -> None:
    """The same calls on 1, 2 and 3 threads, twice each, give the same bits."""
    seen = set()
    for threads in (1, 2, 3):
        with pdscope.load(engine.plan.path, threads=threads) as other:
            seen |= {calls(other), calls(other)}
    assert len(seen) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_isa_path_agrees_with_transformers(plans: PlanStore, kind: str, isa: str) -> None:
    """Each kernel path that this CPU has; the ones it lacks are skipped by name."""
    plan = kind_plan(plans, kind, "fp32", CONTEXT)
    model: Any = load_reference(kind_model(plans, kind))
    with pdscope.load(plan, threads=2, isa=isa) as engine:
        assert engine.info.isa == isa
        for n in (1, 5, 17, 100):
            ids = random_ids(engine.info.vocab, n, n)
            reference = run_reference(model, ids)
            assert_rows_agree(prefill_all(engine, ids), reference, what=f"{kind} on {isa}, {n}")
