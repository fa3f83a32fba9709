"""transformers as the reference: logits of whole texts, and how clear each routing choice was.

Differential tests compare a plan's logits with these. A row whose routing hangs on a near-tie of
gate scores may take another expert in either implementation, so comparisons are told the margin
of every row. Needs torch and transformers.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the worker processes share the cores already

TIE = 1e-5  # gate scores closer than this may be ordered either way


def load_reference(model_dir: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model of a directory, in eval mode, on the CPU, eager throughout."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def dequantised_reference(model_dir: Path, dtype: str) -> Any:
    """The transformers model in fp32, with the weights that an int8 or int4 plan of it holds."""
    from pdscope.compiler.lowered import MATRIX_FORM
    from pdscope.compiler.quantise import quantise, to_float32

    form = MATRIX_FORM[dtype]
    model = load_reference(model_dir)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or name.endswith("gate.weight"):
            continue  # fp32 in every plan
        value = parameter.data
        if name.endswith("kv_b_proj.weight"):
            value.copy_(value.bfloat16())
            continue
        rows = value.reshape(-1, value.shape[-1]).numpy()
        padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 64)))
        q, scale = quantise(padded, form)
        groups = q.reshape(*scale.shape, form.group) * to_float32(scale)[..., None]
        exact = groups.reshape(padded.shape)[:, : rows.shape[1]]
        value.copy_(torch.from_numpy(np.ascontiguousarray(exact)).reshape(value.shape))
    return model


@dataclass(frozen=True)
class Reference:
    """logits: fp32 [n, vocab]; margin: fp32 [n], the least gap over the layers between a score that
    was chosen and one that was not (infinite when every expert is chosen)."""

    logits: NDArray[np.float32]
    margin: NDArray[np.float32]

    @property
    def near_tie(self) -> NDArray[np.bool_]:
        return self.margin < TIE


def _gap(scores: torch.Tensor, k: int) -> torch.Tensor:
    """k-th minus (k+1)-th largest score of each row; infinite when there is no (k+1)-th."""
    if k >= scores.shape[-1]:
        return torch.full(scores.shape[:-1], float("inf"))
    top = scores.topk(k + 1, dim=-1).values
    return top[..., k - 1] - top[..., k]


def choice_margin(logits: torch.Tensor, config: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """How clear a gate's choice was, per row: the gap at the k boundary of the scores that are
    compared, and the gap at the group boundary where routing is limited to groups."""
    logits = logits.float()
    top_k = config.num_experts_per_tok
    scores = logits.softmax(-1) if bias is None else logits.sigmoid() + bias
    groups = getattr(config, "n_group", None) or 1
    limited = bias is not None or getattr(config, "topk_method", "greedy") == "group_limited_greedy"
    margin = torch.full(logits.shape[:-1], float("inf"))
    if limited and groups > 1:
        by_group = scores.view(-1, groups, scores.shape[-1] // groups)
        group_scores = by_group.max(-1).values if bias is None else by_group.topk(2, -1)[0].sum(-1)
        margin = _gap(group_scores, config.topk_group)
        chosen = torch.zeros_like(group_scores, dtype=torch.bool)
        chosen.scatter_(1, group_scores.topk(config.topk_group, -1).indices, True)
        masked = 0.0 if bias is None else float("-inf")
        scores = by_group.masked_fill(~chosen.unsqueeze(-1), masked).reshape(scores.shape)
    return torch.minimum(margin, torch.nan_to_num(_gap(scores, top_k), nan=0.0))


@contextmanager
def _margins(model: Any) -> Iterator[list[torch.Tensor]]:
    """While open, every gate that runs appends its rows' margins to the list."""
    found: list[torch.Tensor] = []

    def hook(module: Any, _args: Any, out: Any) -> None:
        bias = getattr(module, "e_score_correction_bias", None)
        found.append(choice_margin(out[0], model.config, bias).detach())

    gates = [m for name, m in model.named_modules() if name.endswith((".mlp.gate", "_moe.gate"))]
    handles = [gate.register_forward_hook(hook) for gate in gates]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def run_reference(model: Any, ids: Sequence[int]) -> Reference:
    """One forward of a whole text."""
    with _margins(model) as margins:
        logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    if margins:
        margin = torch.stack([m.reshape(-1) for m in margins]).min(0).values
    else:
        margin = torch.full((len(ids),), float("inf"))
    return Reference(logits.numpy(), margin.float().numpy())


@torch.no_grad()
def greedy_reference(
    model: Any, ids: Sequence[int], new_tokens: int
) -> tuple[list[int], list[float]]:
    """Greedy continuation by model.generate, EOS ignored: the new ids, and for each the gap between
    the best and the second best logit."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
    )
    prompt = torch.tensor([list(ids)])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        output_logits=True,
        return_dict_in_generate=True,
    )
    top = torch.cat(out.logits).float().topk(2, dim=-1).values
    new = out.sequences[0, len(ids) :].tolist()
    assert len(new) == new_tokens, "generate stopped early"
    return new, (top[:, 0] - top[:, 1]).tolist()


def row_errors(ours: NDArray[np.float32], ref: NDArray[np.float32]) -> NDArray[np.float32]:
    """max|delta| of each row over the row's max|logit|."""
    delta = np.abs(ours - ref).max(axis=-1)
    scale = np.abs(ref).max(axis=-1)
    return np.asarray(delta / np.maximum(scale, 1e-30), np.float32)


def assert_rows_agree(
    ours: NDArray[np.float32], ref: Reference, tolerance: float = 2e-4, what: str = ""
) -> int:
    """Every row within `tolerance` of its largest logit, except where routing hangs on a near-tie.
    Returns how many rows needed that exception."""
    assert ours.shape == ref.logits.shape, f"{what}: {ours.shape} != {ref.logits.shape}"
    assert np.isfinite(ours).all(), f"{what}: NaN or infinity"
    errors = row_errors(ours, ref.logits)
    off = errors > tolerance
    bad = np.flatnonzero(off & ~ref.near_tie)
    assert bad.size == 0, (
        f"{what}: {bad.size} of {len(errors)} rows off, first row {bad[0]} by {errors[bad[0]]:.3g} "
        f"of its largest logit (allowed {tolerance:.3g}); routing margin {ref.margin[bad[0]]:.3g}"
    )
    return int(off.sum())
