"""One loaded plan: its library, weights and workers, and the sessions on it.

May import pdscope.{arguments,config,dummy_predictor,errors,generation,learner_thread,
native,placement,plan,predictors,session,tokens}; never torch, transformers or the compiler.
"""

import os
import threading
import weakref
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pdscope import config
from pdscope.arguments import flag, index, path, share_or_auto, text
from pdscope.dummy_predictor import DummyPredictor
from pdscope.errors import InputError, PdscopeError, PlanError
from pdscope.generation import Completion, Stream
from pdscope.learner_thread import EngineLearner
from pdscope.native import CACHE_PREFETCH, LEARNER, PIN, PREDICTOR, WEIGHTS, EngineHandle, ffi
from pdscope.placement import DEVICES, gpu_info, ledger, open_engine, set_schedule
from pdscope.plan import Plan
from pdscope.predictors import Chosen, read_predictors
from pdscope.session import Messages, Prompt, Session, SessionStats
from pdscope.tokens import Tokenizer


def load(
    plan: str | Path | Plan,
    *,
    threads: int = 0,
    isa: str | None = None,
    pin: str | None = None,
    weights: str | None = None,
    cache_prefetch: str | None = None,
    predictor: str = "auto",
    learner: str = "off",
    learner_threshold: float | str = "auto",
    device: str = "auto",
    policy: str | None = None,
    verify: bool = False,
) -> "Engine":
    """Loads a plan directory for running.

    threads: workers, the caller included; 0: PDSCOPE_THREADS, else one per usable physical core,
    within the cgroup's quota.
    isa: kernel path to force (scalar, avx2, ...); None: PDSCOPE_ISA, else the best that the CPU
    has.
    pin: "on": each worker stays on one core, and so does the calling thread, during steps alone;
    "off": the scheduler's choice; "auto" (None: PDSCOPE_PIN, else auto): on where the process has
    the whole machine, a thread for each physical core, and SMT siblings or several NUMA nodes.
    weights: "copy": read at load to huge pages, interleaved over the NUMA nodes in use; "mmap":
    the page cache, read as used and shared between processes; "auto" (None: PDSCOPE_WEIGHTS, else
    auto): copy where the memory is there with room to spare. Same results either way. "dummy":
    random values made up in memory as at "copy", for benchmarks (pdscope-bench --load-format
    dummy): of plans compiled with --load-format dummy alone, whose weight files it does not read.
    cache_prefetch: "on": in steps of up to 16 rows, workers with nothing to do pull blocks of the
    experts that the next layer is predicted to choose into the last-level cache; "off"; "auto"
    (None: PDSCOPE_CACHE_PREFETCH, else auto): the engine measures steps with and without as it
    runs, and prefetches where that gains (Engine.cache_prefetch). Same results either way.
    predictor: "auto": what the plan's phaseper.json chose for each layer predicts the next one's
    experts; "off": the next layer's gate does, and the files are not read (Engine.predictor).
    learner: "on": a background thread of lowest priority fine-tunes the predictors' nets to the
    text while their error is high (Engine.learner); "auto": on where nets predict and there is a
    core that no worker has; "off". Same results either way.
    learner_threshold: the error from which on it does, the share of the next layer's experts that
    were not predicted, 0 to 1; "auto": for each phase 1.75 times that of the text that the nets
    were validated on, a quarter at most.
    device: "auto": a GPU where the plan was compiled for one and its driver is found, else the CPU
    (Engine.gpu says why); "gpu"; "cpu".
    policy: what places experts on a GPU plan, one of pdscope-compile's --policy; None: the plan's.
    verify: check every file's SHA-256 first.
    Raises PlanError (missing, cut short, edited, other version) or TargetError (this CPU cannot run
    it), InputError for an option of another type or out of range.
    """
    verify = flag("verify", verify)
    if not isinstance(plan, Plan):
        plan = Plan.open(path("plan", plan), verify=verify)
    elif verify:
        plan = Plan.open(plan.path, verify=True)
    return Engine(
        plan,
        threads=threads,
        isa=isa,
        pin=pin,
        weights=weights,
        cache_prefetch=cache_prefetch,
        predictor=predictor,
        learner=learner,
        learner_threshold=learner_threshold,
        device=device,
        policy=policy,
    )


@dataclass(frozen=True)
class EngineInfo:
    """`pds_engine_info` of pdscope.h."""

    vocab: int
    max_context: int  # positions a sequence may hold
    max_rows: int  # rows of one step
    max_logits: int  # rows of one step that may want logits
    layers: int
    threads: int
    kv_block: int  # tokens in one KV block
    kv_block_bytes: int
    weight_bytes: int  # of the weight files
    engine_bytes: int  # anonymous memory of the engine, weights and predictors apart
    net_bytes: int  # anonymous memory of predictors
    cores: int  # physical cores that the process may use
    numa_nodes: int  # that these cores belong to
    weights: str  # mmap or copy: what was done
    weights_why: str  # what decided so
    weights_nodes: int  # NUMA nodes that the copy is interleaved over; 0: no policy of ours
    weights_copy_bytes: int  # anonymous memory of the copy; 0 when mapped
    weights_huge_bytes: int  # of it in huge pages, when it was loaded
    cpus: tuple[int, ...]  # for each worker the first CPU of the core it is pinned to; (): free
    cpus_why: str  # what decided so
    isa: str  # kernel path in use
    plan_hash: str

    def placement(self) -> dict[str, Any]:
        """What --json says of where threads and weights are."""
        return {
            "threads": self.threads,
            "cores": self.cores,
            "numa_nodes": self.numa_nodes,
            "pinned_cpus": list(self.cpus),
            "pinned_why": self.cpus_why,
            "weights": self.weights,
            "weights_why": self.weights_why,
            "weights_nodes": self.weights_nodes,
            "weights_copy_bytes": self.weights_copy_bytes,
            "weights_huge_bytes": self.weights_huge_bytes,
        }


@dataclass(frozen=True)
class EngineStats(SessionStats):
    """Totals of an engine's main session."""

    learner: dict[str, Any]  # Engine.learner()


class Engine:
    """A loaded plan. Its methods that run the model work on one session of their own; `session()`
    makes more.

    Safe from several threads: calls on one session take turns, sessions run side by side. After
    os.fork() the child must load the plan again.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        threads: int = 0,
        isa: str | None = None,
        pin: str | None = None,
        weights: str | None = None,
        cache_prefetch: str | None = None,
        predictor: str = "auto",
        learner: str = "off",
        learner_threshold: float | str = "auto",
        device: str = "auto",
        policy: str | None = None,
    ) -> None:
        threads = index("threads", threads)
        if isa is not None and "\0" in text("isa", isa):
            raise InputError(f"isa is {isa!r}, expected a kernel path: scalar, avx2, ...")
        if not 0 <= threads <= 1024:
            raise InputError(f"threads is {threads}, expected 0 (one per core) to 1024")
        self._asked_predictor = _choice("predictor", predictor, PREDICTOR)
        _choice("device", device, DEVICES)
        self._learner = EngineLearner(
            _choice("learner", learner, LEARNER),
            share_or_auto("learner_threshold", learner_threshold),
        )
        plan.check_machine()
        _check_weights(plan, weights)
        self.plan = plan
        self._lock = threading.Lock()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._main: Session | None = None
        options = (
            threads or config.threads(),
            isa or config.forced_isa(),
            _choice("pin", pin or config.pin(), PIN),
            _choice("weights", weights or config.weights(), WEIGHTS),
            _choice("cache_prefetch", cache_prefetch or config.cache_prefetch(), CACHE_PREFETCH),
        )
        self._handle: EngineHandle | None = None
        try:
            handle, self._why_device = open_engine(
                plan, device, lambda gpu: EngineHandle(plan, *options, gpu)
            )
            predictors = self._prepare(handle, policy)
        except PdscopeError:
            plan.check_unchanged()  # then what failed is a mixture of two plans
            raise
        plan.check_unchanged()
        self._handle = handle
        self.info = _info(handle)
        _check_same(plan, self.info)
        # What was set is a copy in the engine.
        self._predictors = [replace(each, net=None) for each in predictors]
        spare = ""
        if self.info.threads >= self.info.cores:
            spare = f"no core is free: {self.info.threads} threads on {self.info.cores} cores"
        self._learner.start(handle, plan, predictors, options[-1], spare)
        # An engine that is dropped without close() is collected all the same.
        weakref.finalize(self, self._learner.close)

    def _prepare(self, handle: EngineHandle, policy: str | None) -> list[Chosen]:
        """Gives the engine what is not in its library and weights."""
        try:
            self.plan.hold()
            self._policy = set_schedule(handle, self.plan, policy) if gpu_info(handle) else None
            return self._set_predictors(handle)
        except PdscopeError:
            handle.close()
            raise

    @property
    def handle(self) -> EngineHandle:
        """For Session: what owns the C engine. Raises PdscopeError when closed or after
        os.fork().
        """
        handle = self._handle
        if handle is None:
            raise PdscopeError("the engine is closed: load the plan again")
        if os.getpid() != handle.pid:
            raise PdscopeError(
                "this engine was loaded before os.fork() and its threads do not exist in the "
                "child: "
                "call pdscope.load() in the child process"
            )
        return handle

    def cache_prefetch(self) -> dict[str, Any]:
        """What --json says of the prefetch of predicted experts into the last-level cache.

        `asked`: auto, on or off; `why`: what decided. For steps of one row (`decode`) and of 2 to
        16 (`batch`): `state` is on, off, or measuring (also before it is measured for the first
        time), `measurements` how many have ended, `gain_percent` how many more steps a second the
        last of them had with it. Then totals over all sessions: experts predicted while it was on,
        and those of them that were activated; bytes prefetched, useful (of activated experts) and
        wasted.
        """
        info = ffi().new("pds_cache_prefetch_info *")
        handle = self.handle
        handle.library.check(handle.library.lib.pds_engine_get_cache_prefetch(handle.pointer, info))
        report: dict[str, Any] = {
            "asked": CACHE_PREFETCH[info.asked],
            "why": handle.library.text(info.why),
        }
        for i, phase in enumerate(("decode", "batch")):
            report[phase] = {
                "state": ("measuring", "on", "off")[info.state[i]],
                "measurements": int(info.trials[i]),
                "gain_percent": round(float(info.gain[i]), 2) if info.trials[i] else None,
            }
        return report | {
            "experts_predicted": int(info.experts_predicted),
            "experts_hit": int(info.experts_hit),
            "bytes": int(info.prefetch_bytes),
            "useful_bytes": int(info.prefetch_useful_bytes),
            "wasted_bytes": int(info.prefetch_bytes - info.prefetch_useful_bytes),
        }

    def gpu(self) -> dict[str, Any]:
        """What --json says of the GPU: `device`, `why`; with one, its `policy`, `info`
        (placement.GpuInfo), and `link`: totals over layers of what crossed it (pds_ledger of
        pdscope.h)."""
        info = gpu_info(self.handle)
        report: dict[str, Any] = {"device": "gpu" if info else "cpu", "why": self._why_device}
        if info is None:
            return report
        layers = self.ledger()
        total = {name: sum(layer[name] for layer in layers) for name in layers[0]}
        return report | {"policy": self._policy, "info": asdict(info), "link": total}

    def ledger(self) -> list[dict[str, int]]:
        """pds_ledger of each layer since the policy was set. InputError without a GPU."""
        return ledger(self.handle, self.info.layers)

    def set_policy(self, policy: str) -> None:
        """Places experts by another policy from the next step on; ledgers begin anew. InputError
        without a GPU, or for an unknown name."""
        self._policy = set_schedule(self.handle, self.plan, policy)

    def _set_predictors(self, handle: EngineHandle) -> list[Chosen]:
        """What serves each layer and phase, with its net; sets the nets that there are."""
        self._why_predictor = "asked for"
        self._dummy: DummyPredictor | None = None
        if self._asked_predictor == "off":
            return []
        self._why_predictor = "the plan's programs have no cache prefetch"
        if self.plan.data["predictor"] == "none":
            return []
        self._why_predictor = "the plan has no phaseper.json: compiled without a calibration"
        chosen = read_predictors(self.plan)
        if chosen is None:
            return []
        self._why_predictor = "phaseper.json"
        self._dummy = DummyPredictor.of(self.plan)
        if self._dummy is not None:
            self._why_predictor = (
                f"phaseper.json: {self._dummy.describe()}; pdscope-bench records one, in other "
                "runs the next layer's gate predicts"
            )
        for each in chosen:
            if each.net is not None:
                each.net.set(handle, each.layer, each.phase)
        return chosen

    def predictor(self) -> dict[str, Any]:
        """What --json says of the predictors of the next layer's experts.

        `asked`: auto or off; `state`: on where phaseper.json decides, off: the next layer's gate
        predicts; `why`; `bytes` of memory they take; `chosen`: {phase: {name: layers}}; `dummy`:
        that the plan was compiled with (pdscope/dummy_predictor.py), which has a state of its own,
        or None.
        """
        chosen: dict[str, dict[str, int]] = {}
        for each in self._predictors:
            counts = chosen.setdefault(each.phase, {})
            counts[each.name] = counts.get(each.name, 0) + 1
        return {
            "asked": self._asked_predictor,
            "state": "dummy" if self._dummy else "on" if self._predictors else "off",
            "why": self._why_predictor,
            "bytes": self.info.net_bytes,
            "chosen": chosen,
            "dummy": None if self._dummy is None else self._dummy.as_dict(),
        }

    def learner(self) -> dict[str, Any]:
        """What --json says of the online learner.

        `asked`: auto, on or off; `state`: on or off; `why`. If it was on: `bytes` of memory for the
        tokens that it learns from; for each phase the `threshold` of its error, `triggers` (times
        that it fine-tuned), `swaps` and `rollbacks` (nets replaced; nets left as they were since
        they would have predicted worse, or set back to the plan's since they do), `window_error`
        (share of the next layer's experts that were not predicted, over the last 16 tokens, mean of
        the input group's layers; None: too few tokens since the last trigger) and `layer_errors`;
        `seconds` spent on fine-tuning.
        """
        self.handle  # noqa: B018  refuses a closed engine and a forked child
        return self._learner.report()

    @property
    def has_tokenizer(self) -> bool:
        return self.plan.data["tokenizer"]["file"] is not None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The plan's tokenizer; InputError when it has none."""
        return Tokenizer(self.plan)

    @property
    def main(self) -> Session:
        """The session behind this engine's own prefill, decode, generate, ...: one sequence, full
        context.
        """
        handle = self.handle
        with self._lock:
            if self._main is None:
                assert handle is self._handle
                self._main = Session(self)
                self._sessions.add(self._main)
            return self._main

    def session(self, max_seqs: int = 1, kv_tokens: int = 0) -> Session:
        """A further session: up to `max_seqs` sequences that share `kv_tokens` tokens of KV.

        kv_tokens 0: one full context. Raises BudgetError when the memory is not there.
        """
        session = Session(self, max_seqs, kv_tokens)
        with self._lock:
            self._sessions.add(session)
        return session

    # --- the main session ---

    def prefill(self, ids: ArrayLike, *, all_logits: bool = False) -> NDArray[np.float32]:
        """See Session.prefill: appends ids; logits [vocab] of the last, or [n, vocab] of all."""
        return self.main.prefill(ids, all_logits=all_logits)

    def decode(self, token: int) -> NDArray[np.float32]:
        """See Session.decode: appends one id; logits [vocab], valid until the next step."""
        return self.main.decode(token)

    @overload
    def generate(
        self,
        prompt: Prompt | Messages | None = ...,
        *,
        stream: Literal[False] = ...,
        **options: Any,
    ) -> Completion: ...
    @overload
    def generate(
        self, prompt: Prompt | Messages | None = ..., *, stream: Literal[True], **options: Any
    ) -> Stream: ...
    @overload
    def generate(
        self, prompt: Prompt | Messages | None = ..., *, stream: bool, **options: Any
    ) -> Completion | Stream: ...

    def generate(
        self,
        prompt: Prompt | Messages | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Completion | Stream:
        """See Session.generate, and pdscope.generation.Request for every option."""
        return self.main.generate(prompt, stream=stream, **options)

    def predict(
        self,
        layer: int,
        phase: str,
        a: ArrayLike,
        w: ArrayLike,
        e: ArrayLike,
        prev: ArrayLike | None = None,
        prev_next: ArrayLike | None = None,
    ) -> NDArray[np.float32]:
        """See Session.predict: logits of the next layer's experts, as steps predict with."""
        return self.main.predict(layer, phase, a, w, e, prev, prev_next)

    def reset(self) -> None:
        """Empties the main session's sequence."""
        self.main.reset()

    def truncate(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens of the main session's sequence."""
        self.main.truncate(0, tokens)

    def save(self, path: str | Path | None = None) -> bytes | None:
        """See Session.save: the KV of the main session's sequence."""
        return self.main.save(0, path)

    def restore(self, saved: bytes | bytearray | memoryview | str | Path) -> None:
        """See Session.restore."""
        self.main.restore(saved)

    def stats(self) -> EngineStats:
        """Totals of the main session, and the learner's; what else belongs to the whole engine is
        in `info`."""
        return EngineStats(**asdict(self.main.stats()), learner=self.learner())

    def cancel(self) -> bool:
        """See Session.cancel: stops what the main session runs, from any thread."""
        self.handle  # noqa: B018  refuses a closed engine and a forked child
        main = self._main
        return main is not None and main.cancel()

    def close(self) -> None:
        """Ends what runs, closes every session, stops the workers, unmaps the weights; idempotent.

        Memory that a logits array still shows is freed with the array.
        """
        handle = self._handle
        if handle is None or os.getpid() != handle.pid:
            return
        self._learner.close()
        with self._lock:
            sessions = list(self._sessions)
            self._main = None
        for session in sessions:
            session.close()
        self._handle = None

    def __reduce__(self) -> NoReturn:
        raise PdscopeError(
            "an engine cannot be copied or pickled: call pdscope.load() where it is needed, in "
            "each process"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _choice(option: str, value: str | None, known: tuple[str, ...]) -> str:
    if value is None:
        return "auto"
    if value not in known:
        raise InputError(f"{option} is {value!r}, expected {', '.join(known)}")
    return value


def _check_weights(plan: Plan, weights: str | None) -> None:
    """Raises PlanError for a plan without weights, InputError where real ones would be made up."""
    if plan.absent_weights and weights != "dummy":
        raise PlanError(f"{plan.path}: this plan has no weights: pdscope-bench --load-format dummy")
    if weights == "dummy" and plan.model["load_format"] != "dummy":
        raise InputError(
            f"weights is 'dummy', but {plan.path} was compiled of a model with weights: leave it "
            "out, or compile with --load-format dummy"
        )


def _info(handle: EngineHandle) -> EngineInfo:
    library = handle.library
    out = ffi().new("pds_engine_info *")
    library.check(library.lib.pds_engine_get_info(handle.pointer, out))
    values = {name: getattr(out, name) for name in EngineInfo.__dataclass_fields__}
    for name in ("isa", "plan_hash", "weights_why", "cpus", "cpus_why"):
        values[name] = library.text(values[name])
    values["cpus"] = tuple(int(cpu) for cpu in values["cpus"].split(",") if cpu)
    values["weights"] = WEIGHTS[values["weights"]]
    return EngineInfo(**values)


def _check_same(plan: Plan, info: EngineInfo) -> None:
    """plan.json and the library must be of one compile."""
    pairs: dict[str, tuple[object, object]] = {
        "plan_hash": (plan.plan_hash, info.plan_hash),
        "model: vocab": (plan.vocab, info.vocab),
        "model: layers": (plan.model["layers"], info.layers),
    }
    for name in ("max_context", "max_rows", "max_logits", "kv_block"):
        pairs[name] = (plan.data[name], getattr(info, name))
    for name, (said, built) in pairs.items():
        if said != built:
            raise PlanError(
                f"{plan.path / 'plan.json'}: {name} is {said}, but lib/libpdscope.so was built "
                f"for {built}: "
                "the plan was edited or mixed from two compiles; recompile the model"
            )
