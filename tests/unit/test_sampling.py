"""The runtime's sampler against transformers' logits processors, and its determinism.

Holds the issue's lines on greedy, temperature, top-k, top-p, min-p, repetition penalty and seed.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.assets import model_path
from support.plans import PlanStore

import pdscope
from pdscope.errors import InputError
from pdscope.native import Library
from pdscope.sampling import LEAST, MOST, Sampler, Sampling

VOCAB = 40
HISTORY = [3, 3, 7, 20]


@pytest.fixture(scope="module")
def library(plans: PlanStore) -> Iterator[Library]:
    with pdscope.load(plans.compile(model_path("tiny-mixtral"))) as engine:
        yield engine.handle.library


def some_logits(seed: int = 0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * 2).astype(np.float32)


def expected(logits: NDArray[np.float32], options: dict[str, Any]) -> NDArray[np.float64]:
    """Probabilities as transformers' generate would draw from."""
    import torch
    from transformers.generation import logits_process as hf

    ids = torch.tensor([HISTORY])
    scores = torch.from_numpy(logits)[None].double()
    steps: list[Any] = []
    if (penalty := options.get("repetition_penalty", 1.0)) != 1:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(penalty))
    steps.append(hf.TemperatureLogitsWarper(float(options["temperature"])))
    if options.get("top_k"):
        steps.append(hf.TopKLogitsWarper(options["top_k"]))
    if options.get("top_p", 1.0) < 1:
        steps.append(hf.TopPLogitsWarper(options["top_p"]))
    if options.get("min_p"):
        steps.append(hf.MinPLogitsWarper(options["min_p"]))
    for step in steps:
        scores = step(ids, scores)
    return scores.softmax(-1)[0].numpy()


def draws(
    library: Library, logits: NDArray[np.float32], options: dict[str, Any], count: int
) -> NDArray[np.int64]:
    """Independent draws: one stream a seed, always with the same history."""
    found = []
    for seed in range(count):
        sampler = Sampler(library, len(logits), Sampling(**options), seed, len(HISTORY))
        sampler.extend(np.array(HISTORY, np.int32))
        found.append(sampler.draw(logits))
    return np.array(found)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 500},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.3, "top_p": 0.95},
        {"temperature": 1.0, "top_p": 0.01},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 2.0, "min_p": 1.0},
        {"temperature": 1.0, "repetition_penalty": 1.5},
        {"temperature": 1.0, "repetition_penalty": 0.7},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_distribution_is_transformers(library: Library, options: dict[str, Any]) -> None:
    count = 4000
    logits = some_logits()
    wanted = expected(logits, options)
    found = np.bincount(draws(library, logits, options, count), minlength=VOCAB) / count
    assert not found[wanted == 0].any(), "a token that is filtered out was drawn"
    # Pearson's chi-square over cells with enough mass: mean is its degrees of freedom.
    cells = wanted * count >= 5
    chi = (((found - wanted)[cells] ** 2) / wanted[cells]).sum() * count
    freedom = max(int(cells.sum()) - 1, 1)
    assert chi < freedom + 5 * np.sqrt(2 * freedom) + 1


def test_greedy_takes_the_best_and_of_equals_the_first(library: Library) -> None:
    logits = some_logits(1)
    assert draws(library, logits, {}, 3).tolist() == [int(logits.argmax())] * 3
    logits[:] = 0
    logits[[9, 30]] = 5
    assert draws(library, logits, {}, 2).tolist() == [9, 9]


def test_greedy_with_penalty_is_transformers(library: Library) -> None:
    for seed in range(20):
        logits = some_logits(seed)
        options = {"repetition_penalty": 1.8}
        wanted = expected(logits, {**options, "temperature": 1.0}).argmax()
        assert draws(library, logits, options, 1)[0] == wanted


def test_seed_and_draw_decide(library: Library) -> None:
    logits = some_logits()

    def stream(seed: int) -> list[int]:
        sampler = Sampler(library, VOCAB, Sampling(temperature=1.5), seed, 0)
        return [sampler.draw(logits) for _ in range(50)]

    assert stream(1) == stream(1) != stream(2)
    assert len(set(stream(1))) > 5


def test_history_grows_with_what_is_drawn(library: Library) -> None:
    sampler = Sampler(library, VOCAB, Sampling(repetition_penalty=1e6), 0, 10)
    sampler.extend(np.array([5], np.int32))
    logits = np.arange(1, VOCAB + 1, dtype=np.float32)
    found = [sampler.draw(logits) for _ in range(9)]
    assert found == list(range(39, 30, -1))
    assert sampler.history.tolist() == [5, *found]
    sampler.draw(logits)  # a full history stays as it is
    assert len(sampler.history) == 10


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", 1e-40, r"0 \(greedy\) or from 1.2e-38 to 3.4e\+38"),
        ("temperature", 1e39, r"0 \(greedy\) or from 1.2e-38 to 3.4e\+38"),
        ("temperature", 10**400, r"0 \(greedy\) or from 1.2e-38 to 3.4e\+38"),
        ("repetition_penalty", 1e-300, r"from 1.2e-38 to 3.4e\+38"),
        ("repetition_penalty", 3.5e38, r"from 1.2e-38 to 3.4e\+38"),
        ("top_p", 1e-300, "from 1.2e-38 to 1"),
        ("top_k", 99999999999, r"0 \(off\) to 2147483647"),
    ],
)
def test_ranges_are_those_of_the_runtimes_numbers(name: str, value: float, expected: str) -> None:
    """What float32 or int32 would make 0, infinite or another number is refused by name."""
    with pytest.raises(
        InputError, match=f"^{name} is {value}, expected {expected}$".replace("e+", "e\\+")
    ):
        Sampling(**{name: value})


@pytest.mark.parametrize("value", [LEAST, MOST])
def test_ends_of_the_ranges_reach_the_runtime(library: Library, value: float) -> None:
    for options in ({"repetition_penalty": value}, {"temperature": value}):
        logits = np.full(VOCAB, -1e-3, np.float32)
        sampler = Sampler(library, VOCAB, Sampling(**options), 1, 8)
        assert 0 <= sampler.draw(logits) < VOCAB
