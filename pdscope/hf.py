"""A plan as a transformers model: `PdscopeForCausalLM.from_plan(plan).generate(input_ids, ...)`.

The one module of the running side that imports torch and transformers; nothing else of ours imports
it. transformers decides about tokens (sampling, beams, stopping), the plan computes the logits.
Works with transformers 5.17 and 5.24, whose names of the cache differ, by taking no cache object:
each forward gets whole rows of ids, and the session's sequences that share the longest beginning
with a row are kept, forked or cut. So beam search reorders by forking KV blocks.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from pdscope.engine import Engine, load
from pdscope.errors import InputError
from pdscope.generation import shared_beginning
from pdscope.plan import Plan
from pdscope.session import Session

_REFUSED = (
    *("inputs_embeds", "labels", "past_key_values", "cache"),
    *("output_attentions", "output_hidden_states"),
)


class PdscopeConfig(PretrainedConfig):  # type: ignore[no-untyped-call, unused-ignore]
    model_type = "pdscope"


class PdscopeForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call, unused-ignore]
    """Forward and generate of a plan, on the CPU, in float32 logits; no training, no gradients."""

    config_class = PdscopeConfig
    main_input_name = "input_ids"
    _is_stateful = True  # the KV is in the session: no assisted generation, which rolls caches back

    def __init__(self, config: PdscopeConfig, engine: Engine, kv_tokens: int = 0) -> None:
        super().__init__(config)
        self.engine = engine
        self._kv_tokens = kv_tokens
        self._session: Session | None = None
        self._held: list[NDArray[np.int32]] = []  # ids in the KV of each sequence

    @classmethod
    def from_plan(cls, plan: str | Path | Plan, *, kv_tokens: int = 0, **load_options: Any) -> Self:
        """Loads a plan directory. Options as in pdscope.load.

        kv_tokens: KV tokens that all rows of a batch (and beams) share; 0: a full context for each.
        """
        engine = load(plan, **load_options)
        generation = engine.plan.data["generation"]
        config = PdscopeConfig()
        config.vocab_size = engine.info.vocab
        config.hidden_size = engine.plan.model["hidden"]
        config.num_hidden_layers = engine.info.layers
        config.max_position_embeddings = engine.info.max_context
        config.is_encoder_decoder = False
        config.architectures = [cls.__name__]
        model = cls(config, engine, kv_tokens)
        if "generation_config.json" in engine.plan.files:
            held = json.loads(engine.plan.read_text("generation_config.json"))
            model.generation_config = GenerationConfig.from_dict(held)
        for name, value in generation.items():
            key = f"{name}_token_id"
            if getattr(model.generation_config, key, None) is None:
                setattr(model.generation_config, key, None if value == [] else value)
        return model

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def can_generate(self) -> bool:  # type: ignore[override, unused-ignore]
        return True

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def prepare_inputs_for_generation(  # type: ignore[override, unused-ignore]
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        logits_to_keep: int = 1,
        **others: Any,
    ) -> dict[str, Any]:
        """Whole rows each time: forward finds out what is new."""
        refused = {name: others[name] for name in _REFUSED if others.get(name) is not None}
        kept = {"attention_mask": attention_mask, "logits_to_keep": logits_to_keep}
        return {"input_ids": input_ids, **kept, **refused}

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[torch.Tensor]:
        """Logits float32 [rows, kept, vocab] of whole rows of ids [rows, length].

        attention_mask [rows, length]: 0 marks padding, on either side; logits there are 0.
        logits_to_keep: of each row's last positions, or 0: of all (everything is computed anew).
        Raises InputError for what a plan cannot do: embeddings in, labels, a foreign cache.
        """
        for name in _REFUSED:
            if others.get(name) is not None and others[name] is not False:
                raise InputError(
                    f"a compiled plan takes no {name}: it runs token ids, with its own KV"
                )
        if input_ids is None or input_ids.dim() != 2:
            raise InputError("input_ids: expected token ids of shape [rows, length]")
        ids = _checked_ids(input_ids, self.engine.info.vocab)
        if isinstance(logits_to_keep, bool) or not isinstance(logits_to_keep, int):
            raise InputError("logits_to_keep: expected a count of positions, as a plain integer")
        if logits_to_keep < 0:
            raise InputError(f"logits_to_keep is {logits_to_keep}, expected 0 (all) or a count")
        mask = np.ones(ids.shape, bool)
        if attention_mask is not None:
            if tuple(attention_mask.shape) != ids.shape:
                raise InputError(
                    f"attention_mask has shape {tuple(attention_mask.shape)}, expected {ids.shape}"
                )
            mask = attention_mask.detach().cpu().numpy().astype(bool)
        if not mask.any(axis=1).all():
            raise InputError("attention_mask: a row has no token")
        _check_positions(others.get("position_ids"), mask)
        length = ids.shape[1]
        kept = min(logits_to_keep, length) or length
        # Positions, padding included, whose logits are wanted.
        wanted = mask.copy()
        wanted[:, : length - kept] = False
        out = np.zeros((ids.shape[0], kept, self.engine.info.vocab), np.float32)
        rows, columns = np.nonzero(wanted)
        out[rows, columns - (length - kept)] = self._run(ids, mask, wanted)
        logits = torch.from_numpy(out)
        if others.get("return_dict") is False:
            return (logits,)
        return CausalLMOutputWithPast(logits=logits)

    def close(self) -> None:
        """Frees the plan; may be called again."""
        self.engine.close()

    def _run(
        self, ids: NDArray[np.int32], mask: NDArray[np.bool_], wanted: NDArray[np.bool_]
    ) -> NDArray[np.float32]:
        """Logits [wanted.sum(), vocab] of the wanted positions, in row order."""
        rows = [row[m] for row, m in zip(ids, mask, strict=True)]
        session = self._session_for(len(rows))
        seqs, keep = self._place(session, rows)
        tokens, owners, wants = [], [], []
        for row, (new, seq) in enumerate(zip(rows, seqs, strict=True)):
            want = wanted[row][mask[row]]
            first = int(np.argmax(want)) if want.any() else len(new) - 1
            start = min(keep[row], first)
            session.truncate(seq, start)
            self._held[seq] = new[:0]  # unknown until the steps are done
            tokens.append(new[start:])
            owners.append(np.full(len(new) - start, seq, np.int32))
            wants.append(want[start:])
        logits = _steps(
            session, np.concatenate(tokens), np.concatenate(owners), np.concatenate(wants)
        )
        for new, seq in zip(rows, seqs, strict=True):
            self._held[seq] = new
        return logits

    def _session_for(self, rows: int) -> Session:
        if self._session is None or self._session.max_seqs < rows:
            if self._session is not None:
                self._session.close()
            tokens = self._kv_tokens or rows * self.engine.info.max_context
            self._session = self.engine.session(rows, tokens)
            self._held = [np.empty(0, np.int32)] * rows
        return self._session

    def _place(
        self, session: Session, rows: Sequence[NDArray[np.int32]]
    ) -> tuple[list[int], list[int]]:
        """A sequence for each row, and how many tokens of the row it then holds already."""
        shared = [[shared_beginning(held, row) for held in self._held] for row in rows]
        best = [max(range(len(s)), key=lambda i, s=s: s[i]) for s in shared]  # type: ignore[misc]
        taken: dict[int, int] = {}
        for row, seq in enumerate(best):
            if shared[row][seq] and seq not in taken:
                taken[seq] = row
        free = [seq for seq in range(session.max_seqs) if seq not in taken]
        seqs, keep = [], []
        for row, seq in enumerate(best):
            if taken.get(seq) == row:
                seqs.append(seq)
            else:
                seqs.append(free.pop())
                if shared[row][seq]:
                    session.fork(seq, seqs[-1])
            keep.append(shared[row][seq])
        return seqs, keep


def _checked_ids(input_ids: torch.Tensor, vocab: int) -> NDArray[np.int32]:
    array = input_ids.detach().cpu().numpy()
    if array.dtype.kind not in "iu":
        raise InputError(f"input_ids: expected integers, found {input_ids.dtype}")
    if not array.size:
        raise InputError(f"input_ids: empty, of shape {array.shape}: give at least one token")
    if array.min() < 0 or array.max() >= vocab:
        raise InputError(f"input_ids: a token id is outside the model's vocabulary of {vocab}")
    return array.astype(np.int32)


def _check_positions(given: torch.Tensor | None, mask: NDArray[np.bool_]) -> None:
    """A plan counts each row's tokens from 0; other positions it cannot run."""
    if given is None:
        return
    counted = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    found = given.detach().cpu().numpy()
    if found.ndim == 1:
        found = found[None, :]
    if found.ndim != 2 or found.shape[-1] != mask.shape[1] or found.shape[0] not in (1, len(mask)):
        raise InputError(f"position_ids has shape {found.shape}, expected {mask.shape}")
    if ((found != counted) & mask).any():
        raise InputError("position_ids: a plan counts each row's tokens from 0, without a gap")


def _steps(
    session: Session,
    tokens: NDArray[np.int32],
    seqs: NDArray[np.int32],
    want: NDArray[np.bool_],
) -> NDArray[np.float32]:
    """Runs rows in steps within the plan's limits; logits [want.sum(), vocab]."""
    info = session.engine.info
    out = np.empty((int(want.sum()), info.vocab), np.float32)
    done = at = 0
    while at < len(tokens):
        end = min(at + info.max_rows, len(tokens))
        over = np.flatnonzero(np.cumsum(want[at:end]) > info.max_logits)
        if len(over):
            end = at + int(over[0])
        logits = session.step(tokens[at:end], None, seqs[at:end], want[at:end])
        out[done : done + len(logits)] = logits
        done, at = done + len(logits), end
    return out
