"""pds_sample against the logits processors of transformers, in the order in which it applies them.

Holds: "temperature, top-k, top-p, min-p, repetition penalty, seed" of pdscope-run: the kept ids and
their probabilities are those of transformers; greedy takes the lowest id of equals.
"""

import ctypes
import subprocess
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pdscope import runtime_c
from pdscope.compiler.build import COMMON_FLAGS, find_compiler

VOCAB = 24
DRAWS = 3000


@dataclass(frozen=True)
class Setting:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Sampler(ctypes.Structure):
    _fields_ = [
        ("temperature", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("repetition_penalty", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("draw", ctypes.c_uint64),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """sample.c alone, as a library."""
    out = tmp_path_factory.mktemp("sample") / "sample.so"
    root = runtime_c.ROOT
    command = [*find_compiler().command, *COMMON_FLAGS, "-shared"]
    command += [f"-I{root / d}" for d in runtime_c.INCLUDE_DIRS]
    sources = [str(root / "src" / name) for name in ("sample.c", "status.c")]
    subprocess.run([*command, *sources, "-lm", "-o", str(out)], check=True)
    loaded = ctypes.CDLL(str(out))
    loaded.pds_last_error.restype = ctypes.c_char_p
    return loaded


def draw_all(
    library: Any, logits: NDArray[np.float32], setting: Setting, history: list[int], draws: int
) -> NDArray[np.int64]:
    """How often each id comes out of `draws` draws."""
    values, ids = (ctypes.c_float * VOCAB)(), (ctypes.c_int32 * VOCAB)()
    past = (ctypes.c_int32 * max(1, len(history)))(*history)
    token = ctypes.c_int32()
    counts = np.zeros(VOCAB, np.int64)
    sampler = Sampler(setting.temperature, setting.top_p, setting.min_p, setting.repetition_penalty)
    sampler.top_k, sampler.seed = setting.top_k, 1234
    data = logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    for draw in range(draws):
        sampler.draw = draw
        status = library.pds_sample(
            data,
            VOCAB,
            ctypes.byref(sampler),
            past,
            len(history),
            values,
            ids,
            ctypes.byref(token),
        )
        assert status == 0, library.pds_last_error()
        counts[token.value] += 1
    return counts


def reference(logits: NDArray[np.float32], setting: Setting, history: list[int]) -> Any:
    """Probabilities by transformers, its processors in the order in which generate() has them."""
    import torch
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process as process

    steps = LogitsProcessorList()
    if setting.repetition_penalty != 1:
        steps.append(process.RepetitionPenaltyLogitsProcessor(setting.repetition_penalty))
    if setting.temperature != 1:
        steps.append(process.TemperatureLogitsWarper(setting.temperature))
    if setting.top_k:
        steps.append(process.TopKLogitsWarper(setting.top_k))
    if setting.top_p < 1:
        steps.append(process.TopPLogitsWarper(setting.top_p))
    if setting.min_p:
        steps.append(process.MinPLogitsWarper(setting.min_p))
    ids = torch.tensor([history or [0]])
    scores = torch.tensor(logits)[None]
    return torch.softmax(steps(ids, scores).double(), -1)[0].numpy()


SETTINGS = [
    Setting(),
    Setting(temperature=0.5),
    Setting(temperature=2.5, top_k=7),
    Setting(top_p=0.8),
    Setting(top_p=0.05),
    Setting(min_p=0.2),
    Setting(repetition_penalty=1.5),
    Setting(repetition_penalty=0.7, top_k=9),
    Setting(temperature=0.8, top_k=12, top_p=0.9, min_p=0.05, repetition_penalty=1.2),
    Setting(temperature=1.7, top_k=5, top_p=0.6),
    Setting(temperature=1.7, top_p=0.95, min_p=0.1),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_same_distribution(library: Any, setting: Setting, seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = (random.standard_normal(VOCAB) * 2).astype(np.float32)
    history = [0] if setting.repetition_penalty == 1 else [3, 3, 0, 17, 9, 3]
    expected = reference(logits, setting, history)
    counts = draw_all(library, logits, setting, history, DRAWS)
    assert counts[expected == 0].sum() == 0, "an id that transformers filters out"
    deviation = np.sqrt(DRAWS * expected * (1 - expected)) + 1e-9
    assert (np.abs(counts - DRAWS * expected) <= 5 * deviation + 1).all()


def test_order_is_that_of_transformers() -> None:
    """Temperature before top-k, top-k before top-p, top-p before min-p, as generate() builds it."""
    from transformers import GenerationConfig, MixtralConfig, MixtralForCausalLM

    config = GenerationConfig(
        do_sample=True, temperature=0.5, top_k=5, top_p=0.5, min_p=0.1, repetition_penalty=1.1
    )
    tiny = MixtralConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_local_experts=2,
    )
    model = MixtralForCausalLM(tiny)
    steps = model._get_logits_processor(config, input_ids_seq_length=1, device="cpu")
    assert [type(step).__name__ for step in steps] == [
        "RepetitionPenaltyLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
    ]


def test_greedy_after_penalty(library: Any) -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        logits = np.round(random.standard_normal(VOCAB) * 2).astype(np.float32)  # with ties
        history = list(random.integers(0, VOCAB, 6))
        setting = Setting(temperature=0.0, repetition_penalty=1.3)
        expected = reference(logits, Setting(repetition_penalty=1.3), history)
        counts = draw_all(library, logits, setting, history, 1)
        assert counts.argmax() == expected.argmax()
