"""Generation: what is asked, the loop over tokens, what came of it.

May import numpy and pdscope.{arguments,errors,sampling,session,tokens}.
"""

import inspect
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from pdscope.arguments import index, text
from pdscope.errors import BudgetError, InputError
from pdscope.sampling import Sampler, Sampling
from pdscope.tokens import IncrementalDecoder, StopStrings

if TYPE_CHECKING:
    from pdscope.session import Messages, Prompt, Session


BURST = 16  # tokens that run() makes in one call of the runtime


@dataclass(frozen=True)
class Completion:
    """The result of one generation."""

    text: str | None  # without the stop string; None when the plan has no tokenizer
    tokens: tuple[int, ...]  # the new tokens, an ending EOS included
    prompt_tokens: int
    cached_tokens: int  # of the prompt, those whose KV was there already (reuse_prefix)
    stop_reason: (
        str  # "eos", "stop" (a stop string), "length" (max_new_tokens), "context" (it is full)
    )
    seed: int | None  # None: greedy
    prefill_seconds: float  # to the first token
    decode_seconds: float  # all later tokens

    @property
    def prefill_tokens_per_second(self) -> float | None:
        return _rate(self.prompt_tokens - self.cached_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """None for a single token: the first one comes from the prefill."""
        return _rate(len(self.tokens) - 1, self.decode_seconds)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rates = {
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }
        return {**asdict(self), "tokens": list(self.tokens), **rates}


@dataclass(frozen=True)
class Request:
    """One generation as asked, checked, and ready to run."""

    ids: NDArray[np.int32]
    sampling: Sampling
    max_new_tokens: int
    stop: tuple[str, ...]
    eos: frozenset[int]
    seq: int
    reuse_prefix: bool

    @classmethod
    def of(
        cls,
        session: "Session",
        prompt: "Prompt | Messages | None" = None,
        *,
        messages: "Messages | None" = None,
        chat: bool = False,
        chat_options: Mapping[str, Any] | None = None,
        max_new_tokens: int | None = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        seq: int = 0,
        reuse_prefix: bool = False,
    ) -> Self:
        """Every option of generate().

        prompt: text, token ids, or messages; `chat` makes a text the one message of a user.
        chat_options: further variables of the chat template, e.g. {"enable_thinking": False}.
        max_new_tokens: None: until the context is full.
        temperature 0 is greedy; the others as in Sampling.
        stop: strings that end the generation and are cut off. ignore_eos: EOS ids are ordinary
        tokens. seq: the sequence of the session. reuse_prefix: keep the KV of the tokens that this
        prompt shares with what the sequence held (results may then differ in the last bits, as
        batch sizes do).
        Raises InputError, or BudgetError when the prompt exceeds the context.
        """
        plan = session.engine.plan
        if chat_options is not None and not isinstance(chat_options, Mapping):
            raise InputError(f"chat_options is {chat_options!r}, expected a dict")
        if (prompt is None) == (messages is None):
            raise InputError("give either a prompt or messages")
        ids = _prompt_ids(session, prompt if messages is None else messages, chat, chat_options)
        limit = plan.max_context
        if len(ids) > limit:
            raise BudgetError(
                f"the prompt has {len(ids)} tokens, the plan's context is {limit}: shorten the "
                "prompt, or "
                "recompile with a larger --max-context (max_context=)"
            )
        if max_new_tokens is not None:
            max_new_tokens = index("max_new_tokens", max_new_tokens)
        if max_new_tokens is not None and max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
        room = limit + 1 - len(ids)  # the last token needs no place in the KV
        try:
            stop = (stop,) if isinstance(stop, str) else tuple(stop)
        except TypeError:
            raise InputError(f"stop is {stop!r}, expected a text or a list of texts") from None
        StopStrings(stop)
        if stop and plan.data["tokenizer"]["file"] is None:
            raise InputError("stop strings need a tokenizer, and the plan has none")
        return cls(
            ids=ids,
            sampling=Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed),
            # One more than fits, so that the context, and not the count, is what ends it.
            max_new_tokens=room + 1 if max_new_tokens is None else max_new_tokens,
            stop=stop,
            eos=frozenset(() if ignore_eos else plan.eos),
            seq=session._sequence("seq", seq),
            reuse_prefix=reuse_prefix,
        )


_OPTIONS = frozenset(inspect.signature(Request.of).parameters) - {"session", "prompt"}


def check_names(options: Iterable[str]) -> None:
    """Raises InputError for one that Request.of has not."""
    if unknown := set(options) - _OPTIONS:
        raise InputError(f"generate: got an unexpected keyword argument '{min(unknown)}'")


def _prompt_ids(
    session: "Session",
    prompt: "Prompt | Messages | None",
    chat: bool,
    chat_options: Mapping[str, Any] | None,
) -> NDArray[np.int32]:
    engine = session.engine
    if isinstance(prompt, str):
        if not prompt.strip() if chat else not prompt:
            raise InputError("the prompt is empty: give some text")
        if not chat:
            return session._token_ids(engine.tokenizer.encode(prompt), "generate from")
        prompt = [{"role": "user", "content": text("the prompt", prompt)}]
    elif prompt is None or isinstance(prompt, Mapping) or not hasattr(prompt, "__len__"):
        raise InputError("prompt: expected text, a list of token ids, or a list of messages")
    elif not len(prompt):
        raise InputError("the prompt is empty: give text, token ids or messages")
    if isinstance(prompt, Sequence) and isinstance(prompt[0], Mapping):
        taken = {"messages", "template", "add_generation_prompt"} & set(chat_options or {})
        if taken - {"add_generation_prompt"}:
            raise InputError(f"chat_options: {min(taken)!r} is not an option of a template")
        ids = engine.tokenizer.encode_chat(prompt, **(chat_options or {}))  # type: ignore[arg-type]
        return session._token_ids(ids, "generate from")
    return session._token_ids(prompt, "generate from")  # type: ignore[arg-type]


class Stream(Iterator[str]):
    """Text of a generation as it comes: one piece a token, "" where a token completes no character.

    `tokens` are the ids so far; `completion` is there once the iteration has ended. Dropping the
    stream, or close(), ends the generation; the session stays usable.
    """

    def __init__(self, session: "Session", request: Request) -> None:
        self.tokens: list[int] = []
        self.completion: Completion | None = None
        self.cached: NDArray[np.int32] | None = None  # ids in the sequence's KV at the start
        self._session = session
        self._request = request
        self._done = False
        self._started = False
        self._cached_tokens = 0
        self._seconds = [0.0, 0.0]  # prefill, decode
        self._text: list[str] | None = None
        self._decoder: IncrementalDecoder | None = None
        engine = session.engine
        if engine.has_tokenizer:
            self._text = []
            self._decoder = engine.tokenizer.stream(request.ids.tolist())
        self._stops = StopStrings(request.stop)
        self._seed = request.sampling.with_seed()
        capacity = min(len(request.ids) + request.max_new_tokens, engine.info.max_context + 1)
        self._sampler = Sampler(
            engine.handle.library, engine.info.vocab, request.sampling, self._seed, capacity
        )
        self._sampler.extend(request.ids)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        if self._done:
            raise StopIteration
        first, self._started = not self._started, True
        try:
            with self._session._streaming(self, self._request.seq, first):
                begin = time.perf_counter()
                logits = self._prefill() if first else self._decode()
                token = self._sampler.draw(logits)
                self._seconds[0 if first else 1] += time.perf_counter() - begin
        except BaseException:
            self._end(None)
            raise
        return self._take(token)

    def _take(self, token: int) -> str:
        """The text that a new token completes; ends the generation if it was the last."""
        self.tokens.append(token)
        reason = self._reason(token)
        piece = self._piece(token, reason)
        if self._stops.hit:
            reason = "stop"
        if reason:
            self._end(reason)
        return piece

    def run(self) -> Completion:
        """The whole generation at once; other threads wait for their turn."""
        with self._session._lock:
            next(self)
            while not self._done:
                if self._request.stop:
                    next(self)
                else:
                    self._burst()
        assert self.completion is not None
        return self.completion

    def _burst(self) -> None:
        """Some tokens with no Python in between; few enough that Ctrl-C is heard soon."""
        request, session = self._request, self._session
        room = session.engine.info.max_context + 1 - len(request.ids) - len(self.tokens)
        limit = min(BURST, room, request.max_new_tokens - len(self.tokens))
        try:
            with session._streaming(self, request.seq, False):
                begin = time.perf_counter()
                stop = np.array(sorted(request.eos), np.int32)
                tokens = session._generate(self._sampler, request.seq, limit, stop)
                self._seconds[1] += time.perf_counter() - begin
        except BaseException:
            self._end(None)
            raise
        for token in tokens:
            self._take(token)

    def close(self) -> None:
        """Ends the generation here."""
        if not self._done:
            self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prefill(self) -> NDArray[np.float32]:
        session, seq, ids = self._session, self._request.seq, self._request.ids
        keep = 0
        if self._request.reuse_prefix and self.cached is not None:
            # The last token of the prompt runs again: its logits are needed.
            keep = shared_beginning(self.cached, ids[:-1])
        session._truncate(seq, keep)
        self._cached_tokens = keep
        return session._prefill(ids[keep:], seq)

    def _decode(self) -> NDArray[np.float32]:
        position = len(self._request.ids) + len(self.tokens) - 1
        return self._session._decode(self.tokens[-1], position, self._request.seq)

    def _reason(self, token: int) -> str | None:
        if token in self._request.eos:
            return "eos"
        if len(self.tokens) >= self._request.max_new_tokens:
            return "length"
        if len(self._request.ids) + len(self.tokens) > self._session.engine.info.max_context:
            return "context"
        return None

    def _piece(self, token: int, reason: str | None) -> str:
        if self._decoder is None or self._text is None:
            return ""
        piece = "" if reason == "eos" else self._stops.push(self._decoder.push(token))
        if reason and not self._stops.hit:
            piece += self._stops.push(self._decoder.flush()) + self._stops.flush()
        self._text.append(piece)
        return piece

    def _end(self, reason: str | None) -> None:
        self._done = True
        if self._started:
            history = None if reason is None else self._sampler.history
            self._session._release(self, self._request.seq, history)
        if reason is None:
            return
        self.completion = Completion(
            text=None if self._text is None else "".join(self._text),
            tokens=tuple(self.tokens),
            prompt_tokens=len(self._request.ids),
            cached_tokens=self._cached_tokens,
            stop_reason=reason,
            seed=self._seed if self._request.sampling.temperature > 0 else None,
            prefill_seconds=self._seconds[0],
            decode_seconds=self._seconds[1],
        )


def shared_beginning(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the longest common beginning."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None
