"""Text to token ids and back: the plan's tokenizer, streaming detokenisation, stop strings.

May import numpy, tokenizers, pdscope.{arguments,chat,errors,plan}.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from pdscope.arguments import text as checked_text
from pdscope.chat import ChatTemplate
from pdscope.errors import InputError, PlanError
from pdscope.plan import Plan

_REPLACEMENT = "\ufffd"
# A code point has at most 4 bytes, so at most 3 trailing replacement characters can still become
# one.
_UNSETTLED = 3
# Tokens of the prompt that may serve as context of the first new one: tokenizers treat the start of
# a text differently (a leading space), and one character may take several tokens.
_CONTEXT = 8


class Tokenizer:
    """The tokenizer.json of a plan."""

    def __init__(self, plan: Plan) -> None:
        name = plan.data["tokenizer"]["file"]
        if name is None:
            raise InputError(
                f"{plan.path}: the plan has no tokenizer: pass token ids, or compile a model "
                "directory that has a tokenizer.json"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(plan.read_bytes(name))
        except PlanError:
            raise
        except Exception as error:  # tokenizers raises plain Exception
            raise PlanError(f"{plan.path / name}: {error}: recompile the model") from None
        # A saved tokenizer may carry the truncation and padding of its training run.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = _config(plan)
        self._plan = plan

    def encode(self, text: str, special: bool = True) -> NDArray[np.int32]:
        """Ids of a text, int32 [n]; `special` adds what the model's tokenizer adds, usually one
        BOS.
        """
        checked_text("the prompt", text)
        ids = self._tokenizer.encode(text, add_special_tokens=special).ids
        if special and self._config.get("add_bos_token") is True:
            bos = self._special("bos_token")
            if bos is not None and ids[:1] != [bos]:
                ids = [bos, *ids]
        return np.asarray(ids, np.int32)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: object
    ) -> NDArray[np.int32]:
        """Ids of a conversation, rendered with the model's chat template up to the assistant's
        turn.
        """
        template = ChatTemplate.of(self._plan, self._config)
        return self.encode(template.render(messages, **options), special=False)

    def encode_marked(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Ids [n] of a whole conversation, and which of them the assistant wrote; see
        ChatTemplate.render_marked. A token belongs to the side that its first character is of.
        """
        template = ChatTemplate.of(self._plan, self._config)
        text, spans = template.render_marked(messages)
        checked_text("the conversation", text)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        begins = np.array([begin for begin, _ in encoding.offsets], np.int64)
        mark = np.zeros(len(begins), np.bool_)
        for begin, end in spans:
            mark |= (begins >= begin) & (begins < end)
        return np.array(encoding.ids, np.int32), mark

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def stream(self, prompt: Sequence[int]) -> "IncrementalDecoder":
        """A decoder of what follows `prompt`."""
        return IncrementalDecoder(self, self._context([int(i) for i in prompt[-_CONTEXT:]]))

    def _context(self, tail: list[int]) -> list[int]:
        """The last ids of a prompt that decode to whole characters; none after a special token."""
        for size in range(1, len(tail) + 1):
            text = self.decode(tail[-size:])
            if not text:
                return []
            if not text.startswith(_REPLACEMENT):
                return tail[-size:]
        return []

    def _special(self, key: str) -> int | None:
        content = special_text(self._config, key)
        found = None if content is None else self._tokenizer.token_to_id(content)
        return None if found is None else int(found)


class IncrementalDecoder:
    """Text of a growing list of ids, piece by piece, never half a character.

    Each piece is the difference of two decodings of a short window: what the tokens before this one
    gave, and what they give with it. A trailing replacement character may be the first bytes of a
    character whose rest has not come, so it waits. The window always begins at the border of a
    character.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._window = context  # ids from which pieces are decoded
        self._settled = len(context)  # the leading ids whose text is out
        self._given = 0  # characters of the unsettled ids' text that are out already
        self._silent = 0  # unsettled ids that had no text

    def push(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        self._window.append(token)
        fresh = self._fresh(final=False)
        if fresh is None:
            return ""
        most, unsettled = _UNSETTLED + self._silent, len(self._window) - self._settled
        waiting = len(fresh) - len(fresh.rstrip(_REPLACEMENT))
        if unsettled < waiting and unsettled <= most:
            return ""  # settled ids without text are part of the run too
        waiting = min(waiting, most)
        piece = fresh[self._given : len(fresh) - waiting]
        if waiting:
            self._given += len(piece)
        elif fresh:
            self._settle()
        elif self._tokenizer.decode([token], skip_special=False):
            self._window.pop()  # a special token: it has no text, now or later
        else:
            self._silent += 1  # a stripped space, which a run of bytes may replace with the rest
        return piece

    def flush(self) -> str:
        """What waited for more bytes, as replacement characters."""
        piece = (self._fresh(final=True) or "")[self._given :]
        self._settle()
        return piece

    def _settle(self) -> None:
        # The ids of this piece are the context of the next one.
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._given = self._silent = 0

    def _fresh(self, final: bool) -> str | None:
        """Text of the unsettled ids; None while it cannot be told.

        Byte-fallback decoders replace a whole run of bytes, settled ones included, while its last
        character is incomplete.
        """
        before = self._tokenizer.decode(self._window[: self._settled])
        whole = self._tokenizer.decode(self._window)
        if whole.startswith(before):
            return whole[len(before) :]
        if final or len(self._window) - self._settled > _UNSETTLED + self._silent:
            return self._tokenizer.decode(self._window[self._settled :])
        return None


class StopStrings:
    """Cuts a stream of text at the first stop string, wherever token borders fall.

    Text that may be the beginning of a stop string is held back until it is known.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if isinstance(stop, str):
            stop = (stop,)
        for each in stop:
            checked_text("stop", each)
        if not all(stop):
            raise InputError("a stop string is empty: give text, or leave it out")
        self._stop = tuple(stop)
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """The text that is certain now. After `hit`, nothing more comes."""
        if self.hit:
            return ""
        if not self._stop:
            return piece
        text = self._held + piece
        ends = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if ends:
            self.hit = True
            self._held = ""
            return text[: min(ends)]
        keep = max(_overlap(text, s) for s in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - size :]):
            return size
    return 0


def special_text(config: Mapping[str, Any], key: str) -> str | None:
    """The text of a special token in tokenizer_config.json, which stores a string or an object."""
    value = config.get(key)
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _config(plan: Plan) -> dict[str, Any]:
    if "tokenizer_config.json" not in plan.files:
        return {}
    try:
        config = json.loads(plan.read_text("tokenizer_config.json"))
    except ValueError as error:
        raise PlanError(
            f"{plan.path / 'tokenizer_config.json'}: not valid JSON ({error}): recompile the model"
        ) from None
    return config if isinstance(config, dict) else {}
