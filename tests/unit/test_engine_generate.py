"""Generation on a stand-in library, whose output is scripted by its tokenizer (support.fake_plan).

Holds the issue's lines on generate(): stop strings, every EOS id, UTF-8 streaming, seeds, the
context's end, empty and invalid prompts.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import fake_plan
from support.fake_plan import MAX_CONTEXT, PIECES, piece_id, text_of
from support.plans import PlanStore

import pdscope
from pdscope.errors import BudgetError, InputError
from pdscope.generation import BURST
from pdscope.tokens import StopStrings

WHOLE = " world! \U0001f600\u4e2d STOP here now.\n\ufffdABC"


@pytest.fixture(scope="module")
def engine(plans: PlanStore) -> Iterator[pdscope.Engine]:
    with pdscope.load(plans.once("fake", fake_plan.make_fake_plan)) as loaded:
        yield loaded


def plan_with(plans: PlanStore, folder: Path, **changes: Any) -> Path:
    """A copy of the stand-in plan with other fields in plan.json."""
    import shutil

    shutil.copytree(plans.once("fake", fake_plan.make_fake_plan), folder)
    fake_plan.write_manifest(folder, **changes)
    return folder


def test_text_and_tokens(engine: pdscope.Engine) -> None:
    done = engine.generate("Hello", max_new_tokens=len(PIECES) - 1)
    assert done.text == WHOLE == text_of(done.tokens)
    assert done.tokens == tuple(range(piece_id(1), piece_id(len(PIECES))))
    assert (done.prompt_tokens, done.cached_tokens, done.stop_reason) == (2, 0, "length")
    assert done.seed is None


def test_stream_never_shows_half_a_character(engine: pdscope.Engine) -> None:
    stream = engine.generate("Hello", max_new_tokens=len(PIECES) - 1, stream=True)
    pieces = list(stream)
    assert len(pieces) == len(stream.tokens)
    assert pieces[:9] == [" wor", "ld", "!", " ", "", "\U0001f600", "", "", "\u4e2d"]
    assert "".join(pieces) == WHOLE
    assert stream.completion is not None and stream.completion.text == WHOLE


def test_text_that_ends_within_a_character(engine: pdscope.Engine) -> None:
    done = engine.generate("Hello", max_new_tokens=7)
    assert done.text == " world! \U0001f600\ufffd" == text_of(done.tokens)


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("STOP", " world! \U0001f600\u4e2d "),
        (["here now"], " world! \U0001f600\u4e2d STOP "),
        (["zzz", "rld! "], " wo"),
        (["now", "STOP here"], " world! \U0001f600\u4e2d "),
        ("\u4e2d", " world! \U0001f600"),
        (["here nox"], WHOLE),
    ],
)
def test_stop_strings_across_tokens(
    engine: pdscope.Engine, stop: str | list[str], text: str
) -> None:
    stream = engine.generate("Hello", max_new_tokens=18, stop=stop, stream=True)
    pieces = list(stream)
    done = stream.completion
    assert done is not None
    assert "".join(pieces) == done.text == text
    assert done.stop_reason == ("length" if text == WHOLE else "stop")


def test_stop_strings_hold_back_only_what_may_begin_one() -> None:
    stops = StopStrings(["abc", "bd"])
    assert [stops.push(p) for p in ("xa", "b", "x", "ab", "d", "more")] == [
        *("x", "", "abx", "", "a", "")
    ]
    assert stops.hit and stops.flush() == ""
    stops = StopStrings("abc")
    assert stops.push("zab") == "z" and stops.flush() == "ab" and not stops.hit


def test_eos_ends_and_ignore_eos_goes_on(engine: pdscope.Engine) -> None:
    """The successor of the last id is id 0, then 1, then EOS 2."""
    done = engine.generate([62], max_new_tokens=10)
    assert done.tokens == (63, 0, 1, 2) and done.stop_reason == "eos"
    done = engine.generate([62], max_new_tokens=6, ignore_eos=True)
    assert done.tokens == (63, 0, 1, 2, 3, 4) and done.stop_reason == "length"


def test_every_eos_id_ends(plans: PlanStore, tmp_path: Path) -> None:
    eos = {"bos": 1, "eos": [2, 30], "pad": 0}
    with pdscope.load(plan_with(plans, tmp_path / "p", generation=eos)) as engine:
        assert engine.generate([27], max_new_tokens=10).tokens == (28, 29, 30)
        assert engine.generate([63], max_new_tokens=10).tokens == (0, 1, 2)


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_full_context_stops_cleanly(engine: pdscope.Engine, room: int) -> None:
    """Holds: full context +-1 stops cleanly. The last token needs no place in the KV."""
    prompt = [5] * (MAX_CONTEXT - room)
    done = engine.generate(prompt, max_new_tokens=50, ignore_eos=True)
    assert len(done.tokens) == room + 1 and done.stop_reason == "context"
    done = engine.generate(prompt, max_new_tokens=None, ignore_eos=True)
    assert len(done.tokens) == room + 1 and done.stop_reason == "context"
    done = engine.generate(prompt, max_new_tokens=room + 1, ignore_eos=True)
    assert done.stop_reason == "length"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompt": [5] * (MAX_CONTEXT + 1)}, BudgetError, "97 tokens, the plan's context is 96"),
        ({"prompt": ""}, InputError, "prompt is empty"),
        ({"prompt": []}, InputError, "prompt is empty"),
        ({"messages": []}, InputError, "prompt is empty"),
        ({"prompt": "", "chat": True}, InputError, "prompt is empty"),
        ({}, InputError, "either a prompt or messages"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, InputError, "either"),
        ({"prompt": [64]}, InputError, "token id 64"),
        ({"prompt": "\udcff"}, InputError, "not valid UTF-8"),
        ({"prompt": "Hello", "max_new_tokens": 0}, InputError, "max_new_tokens is 0"),
        ({"prompt": "Hello", "stop": ["a", ""]}, InputError, "stop string is empty"),
        ({"prompt": "Hello", "temperature": -1}, InputError, "temperature is -1"),
        ({"prompt": "Hello", "temperature": float("nan")}, InputError, "temperature is nan"),
        ({"prompt": "Hello", "top_p": 0}, InputError, "top_p is 0"),
        ({"prompt": "Hello", "top_k": -1}, InputError, "top_k is -1"),
        ({"prompt": "Hello", "min_p": 2}, InputError, "min_p is 2"),
        ({"prompt": "Hello", "repetition_penalty": 0}, InputError, "repetition_penalty is 0"),
        ({"prompt": "Hello", "seed": -1}, InputError, "seed is -1"),
        ({"messages": [{"content": "Hello"}]}, InputError, "message 0 has no 'role'"),
    ],
)
def test_bad_requests(
    engine: pdscope.Engine, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Each fails when asked, before any step, streaming or not."""
    steps = engine.stats().steps
    for stream in (False, True):
        with pytest.raises(error, match=message):
            engine.generate(stream=stream, **arguments)
    assert engine.stats().steps == steps


def test_unknown_option_is_named(engine: pdscope.Engine) -> None:
    with pytest.raises(InputError, match="temprature"):
        engine.generate("Hello", temprature=1)


def test_chat_and_messages_are_the_same(engine: pdscope.Engine) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    runs = [
        engine.generate("Hello", chat=True, max_new_tokens=3),
        engine.generate(messages, max_new_tokens=3),
        engine.generate(messages=messages, max_new_tokens=3),
    ]
    assert {r.tokens for r in runs} == {(5, 6, 7)}
    assert {r.prompt_tokens for r in runs} == {4}  # bos, user, Hello, assistant


def test_seed_decides(engine: pdscope.Engine) -> None:
    def run(seed: int | None) -> pdscope.Completion:
        return engine.generate("Hello", temperature=1, seed=seed, max_new_tokens=8, ignore_eos=True)

    assert run(7).tokens == run(7).tokens != run(8).tokens
    fresh = run(None)
    assert fresh.seed is not None and run(fresh.seed).tokens == fresh.tokens


def test_repetition_penalty_sees_prompt_and_output(engine: pdscope.Engine) -> None:
    plain = engine.generate([5, 6, 7, 5], max_new_tokens=1)
    other = engine.generate([5, 6, 7, 5], max_new_tokens=1, repetition_penalty=1e6)
    assert plain.tokens == (6,) and other.tokens[0] not in (5, 6, 7)


def test_reuse_prefix_keeps_the_shared_beginning(engine: pdscope.Engine) -> None:
    first = engine.generate([5, 6, 7], max_new_tokens=4)
    longer = [5, 6, 7, *first.tokens, 30, 31]
    again = engine.generate(longer, max_new_tokens=4, reuse_prefix=True)
    # The last token of the first run was never fed back.
    assert again.cached_tokens == 3 + 4 - 1
    assert again.tokens == engine.generate(longer, max_new_tokens=4).tokens
    same = engine.generate(longer, max_new_tokens=4, reuse_prefix=True)
    assert same.cached_tokens == len(longer) - 1 and same.tokens == again.tokens
    engine.reset()
    assert engine.generate(longer, max_new_tokens=4, reuse_prefix=True).cached_tokens == 0


def test_runs_repeat(engine: pdscope.Engine) -> None:
    runs = {engine.generate("Hello", max_new_tokens=18).tokens for _ in range(5)}
    assert len(runs) == 1


def test_speeds(engine: pdscope.Engine) -> None:
    done = engine.generate("Hello", max_new_tokens=5)
    assert done.prefill_tokens_per_second and done.decode_tokens_per_second
    assert engine.generate("Hello", max_new_tokens=1).decode_tokens_per_second is None
    assert done.as_dict()["tokens"] == list(done.tokens)


def test_plan_without_a_tokenizer(plans: PlanStore, tmp_path: Path) -> None:
    none = {"file": None, "chat_template": False}
    with pdscope.load(plan_with(plans, tmp_path / "p", tokenizer=none)) as engine:
        done = engine.generate([5], max_new_tokens=3)
        assert done.text is None and done.tokens == (6, 7, 8)
        assert list(engine.generate([5], max_new_tokens=3, stream=True)) == ["", "", ""]
        with pytest.raises(InputError, match="no tokenizer"):
            engine.generate("Hello")
        with pytest.raises(InputError, match="no tokenizer|need a tokenizer"):
            engine.generate([5], stop="x")


@pytest.mark.parametrize("count", [1, 2, BURST, BURST + 1, BURST + 2, 2 * BURST + 1, 40])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bursts_and_single_tokens_agree(
    engine: pdscope.Engine, count: int, temperature: float
) -> None:
    """Issue: no Python on the per-token path; streaming, which has it, gives the same tokens."""
    options: dict[str, Any] = {
        "max_new_tokens": count,
        "temperature": temperature,
        "seed": 3,
        "ignore_eos": True,
    }
    stream = engine.generate("Hello", stream=True, **options)
    pieces = list(stream)
    done = engine.generate("Hello", **options)
    assert list(done.tokens) == stream.tokens and len(done.tokens) == count
    assert done.text == "".join(pieces)


def test_a_burst_ends_at_an_eos_and_at_the_end_of_the_context(engine: pdscope.Engine) -> None:
    """Issue: every EOS id; full context stops cleanly."""
    for prompt in ([62], [5, 6, 7]):
        for ignore in (False, True):
            options: dict[str, Any] = {"max_new_tokens": None, "ignore_eos": ignore}
            stream = engine.generate(prompt, stream=True, **options)
            list(stream)
            done = engine.generate(prompt, **options)
            assert done.tokens == tuple(stream.tokens)
            assert stream.completion is not None
            assert done.stop_reason == stream.completion.stop_reason
