"""Tokenizer and streaming detokenisation.

Holds the issue's lines on streaming and invalid UTF-8, and "command, Python and server on one
prompt: same tokens" of the public faults.
"""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import fake_plan
from support.assets import model_path
from support.plans import PlanStore
from tokenizers import decoders, models, pre_tokenizers

from pdscope.errors import InputError, PlanError
from pdscope.plan import Plan
from pdscope.tokens import IncrementalDecoder, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(plans: PlanStore) -> Tokenizer:
    return Tokenizer(Plan.open(plans.once("fake", fake_plan.make_fake_plan)))


def wrap(inner: tokenizers.Tokenizer) -> Tokenizer:
    made = Tokenizer.__new__(Tokenizer)
    made._tokenizer = inner
    made._config = {}
    return made


def bytes_tokenizer() -> Tokenizer:
    """Byte-level: every byte is a token."""
    letters = fake_plan._byte_letters()
    inner = tokenizers.Tokenizer(models.WordLevel({letters[b]: b for b in range(256)}, "!"))
    inner.decoder = decoders.ByteLevel()
    return wrap(inner)


def fallback_tokenizer() -> Tokenizer:
    """As Llama's: words with a mark for the leading space, which is stripped from a text's start,
    and byte tokens."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)}
    vocab |= {"\u2581Hello": 256, "\u2581world": 257, "\u2581": 258, "ing": 259}
    inner = tokenizers.Tokenizer(models.WordLevel(vocab, "<0x00>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return wrap(inner)


def stream(decoder: IncrementalDecoder, ids: list[int]) -> list[str]:
    return [decoder.push(i) for i in ids] + [decoder.flush()]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_pieces_of_bytes_are_the_text(text: str) -> None:
    pieces = stream(bytes_tokenizer().stream([]), list(text.encode()))
    assert "".join(pieces) == text
    whole = {c for c in text}
    assert all(set(piece) <= whole for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_pieces_of_any_bytes_are_the_decoded_text(data: bytes) -> None:
    tokenizer = bytes_tokenizer()
    assert "".join(stream(tokenizer.stream([]), list(data))) == tokenizer.decode(list(data))


@settings(max_examples=200, deadline=None)
@example(" \U00010000", [])  # a space that decoding strips, then four bytes of one character
@given(st.text(max_size=20), st.lists(st.sampled_from([256, 257, 258, 259]), max_size=8))
def test_pieces_with_byte_fallback(text: str, words: list[int]) -> None:
    tokenizer = fallback_tokenizer()
    ids = [*words, *text.encode(), *words]
    assert "".join(stream(tokenizer.stream([]), ids)) == tokenizer.decode(ids)


def test_continuation_keeps_its_leading_space() -> None:
    """The tokenizer strips a text's leading space, but a continuation is not a text's start."""
    tokenizer = fallback_tokenizer()
    assert stream(tokenizer.stream([256]), [257]) == [" world", ""]
    assert stream(tokenizer.stream([]), [257]) == ["world", ""]
    # A prompt that ends within bytes of characters.
    tail = list("\u4e2d\u4e2d\u4e2d\u4e2d".encode())
    assert stream(tokenizer.stream(tail), [*"\u00e9".encode(), 257]) == ["", "\u00e9", " world", ""]


def test_trained_tokenizer_streams_what_it_decodes(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(model_path("tiny-mixtral") / "tokenizer.json"))
    tokenizer = wrap(inner)
    text = (
        "It's 5 o'clock \u2014 na\u00efve caf\u00e9 \U0001f468\u200d\U0001f469\u200d\U0001f467"
        " \u4f60\u597d\n\n  two  spaces"
    )
    ids = inner.encode(text, add_special_tokens=False).ids
    assert "".join(stream(tokenizer.stream([]), ids)) == inner.decode(ids) == text
    for cut in range(1, len(ids)):
        head = inner.decode(ids[:cut])
        if "\ufffd" not in head:
            assert head + "".join(stream(tokenizer.stream(ids[:cut]), ids[cut:])) == text


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    first, last = fake_plan.piece_id(0), fake_plan.piece_id(1)
    assert stream(tokenizer.stream([]), [1, first, 2, 3, last, 4]) == [
        *("", "Hello", "", "", " wor", "", "")
    ]


def test_encode_adds_bos_and_cuts_nothing(tokenizer: Tokenizer) -> None:
    """The file says truncation to 7 tokens, as a training run may leave it."""
    ids = tokenizer.encode("Hello world!" * 9)
    assert ids[0] == 1 and len(ids) == 1 + 9 * 4
    assert tokenizer.encode("Hello", special=False).tolist() == [5]


def test_bos_that_only_the_config_asks_for(tokenizer: Tokenizer) -> None:
    """Llama-like models say add_bos_token, and their tokenizer.json may not do it."""
    letters = fake_plan.tokenizer_json()
    letters["post_processor"] = None
    import json

    bare = wrap(tokenizers.Tokenizer.from_str(json.dumps(letters)))
    assert bare.encode("Hello").tolist() == [5]
    bare._config = {"add_bos_token": True, "bos_token": "<bos>"}
    assert bare.encode("Hello").tolist() == [1, 5]
    assert bare.encode("Hello", special=False).tolist() == [5]
    tokenizer._config["add_bos_token"] = True
    assert tokenizer.encode("Hello").tolist() == [1, 5]  # not twice


def test_invalid_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="not valid UTF-8 .at character 2"):
        tokenizer.encode("ab\ud800")


def test_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    fake_plan.write_manifest(tmp_path)
    with pytest.raises(PlanError, match="tokenizer.json"):
        Tokenizer(Plan.open(tmp_path))
