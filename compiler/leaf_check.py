"""Proof that the modules which the trace does not look into mean what PDScope thinks they mean.

The trace takes attention, gates, experts and norms as units. So a tiny random model with the
semantics of the very configuration (same flags, smaller dimensions) is run through the installed
transformers and through compiler/reference.py: a patched or a newer transformers that computes
something else is found here, before any plan is written. May import torch, transformers,
pdscope.models, pdscope.ir and pdscope.errors.
"""

import math
from typing import Any

import torch
import transformers
from torch import Tensor

from pdscope.compiler.reference import run_graph
from pdscope.compiler.trace import Config, build_model, lower, transformers_config
from pdscope.errors import ModelError
from pdscope.ir.graph import Node
from pdscope.models.family import Family
from pdscope.models.registry import family_of

ROWS = 24  # more than the window of a shrunk model
TOLERANCE = 1e-4  # of the largest logit of a row
MARGIN = 1e-4  # least relative distance of the scores that decide a choice
TRIES = 8


def shrunk_config(config: Config, family: Family) -> Config:
    """config.json of a tiny model with the same semantics."""
    hf_config = transformers_config(config, family)
    small = {**config, **family.shrink(hf_config, config)}
    kinds = small.get("layer_types")
    if isinstance(kinds, list) and kinds:  # as many as layers, each kind at least once if it fits
        kinds = [*dict.fromkeys(kinds), *kinds]
        small["layer_types"] = kinds[: small["num_hidden_layers"]]
    tokens = dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id")
    )  # beyond the vocabulary
    return {**small, **tokens, "torch_dtype": "float32", "dtype": "float32"}


def check_leaf_semantics(config: Config) -> None:
    """ModelError if the installed transformers computes something else than PDScope for `config`.

    Depends on `config`, on PDScope and on transformers' version only, so the result can be cached.
    Takes about 50 ms once transformers is imported.
    """
    family = family_of(config)
    small = shrunk_config(config, family)
    hf_config = transformers_config(small, family)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices: threads only cost
    try:
        model = build_model(family, hf_config, "cpu").float()
        graph = lower(build_model(family, hf_config, "meta"), family, hf_config)
        for seed in range(TRIES):
            if _agrees(model, graph, hf_config, family, seed):
                return
    finally:
        torch.set_num_threads(threads)
    raise ModelError(
        f"{family.architecture}: no random model without a tie in its routing was found in {TRIES} "
        "tries; report this as a defect of PDScope, with the config.json"
    )


@torch.no_grad()
def _agrees(model: Any, graph: Any, hf_config: Any, family: Family, seed: int) -> bool:
    """False if this seed cannot tell, because some choice of experts is too close."""
    generator = torch.Generator().manual_seed(seed)
    _randomise(model, generator)
    ids = torch.randint(0, int(hf_config.vocab_size), (ROWS,), generator=generator)
    margins: list[float] = []

    def on_gate(node: Node, _ids: Tensor, _weights: Tensor, scores: Tensor) -> None:
        margins.append(_margin(scores, _ids.shape[-1]))

    state = model.state_dict()
    ours = run_graph(graph, state.__getitem__, ids, on_gate)
    if not torch.isfinite(ours).all():
        raise ModelError(
            "config.json: a tiny random model of this configuration gives logits that are not "
            "finite; check rope_theta, rope_scaling, rms_norm_eps and the scaling factors"
        )
    if min(margins, default=math.inf) < MARGIN:
        return False
    try:
        theirs = model(input_ids=ids[None], use_cache=False).logits[0].float()
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{family.architecture}: the installed transformers ({transformers.__version__}) fails "
            f"on a tiny model of this configuration: {type(error).__name__}: {reason[:200]}"
        ) from error
    if theirs.shape != ours.shape:
        raise _mismatch(family, f"logits of shape {list(theirs.shape)}, not {list(ours.shape)}")
    delta = (ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)
    worst = float(delta.max()) if torch.isfinite(delta).all() else math.inf
    if worst > TOLERANCE:
        raise _mismatch(family, f"logits that differ by {worst:.1e} of the largest")
    return True


def _mismatch(family: Family, what: str) -> ModelError:
    return ModelError(
        f"{family.architecture}: the installed transformers ({transformers.__version__}) computes "
        "something else for this family than what PDScope implements (a tiny model of this "
        f"configuration gives {what}); use a transformers version that PDScope supports, unpatched"
    )


def _margin(scores: Tensor, top_k: int) -> float:
    """Least relative distance between the last chosen and the first refused score of any row."""
    if top_k >= scores.shape[-1]:
        return math.inf
    best = scores.topk(top_k + 1, dim=-1).values
    last, refused = best[:, top_k - 1], best[:, top_k]
    return float(((last - refused) / last.abs().clamp_min(1e-6)).nan_to_num(posinf=1.0).min())


def _randomise(model: Any, generator: torch.Generator) -> None:
    """Weights that let every flag show: small inputs of norms, spread routing, large biases."""
    tensors = dict(model.named_parameters())
    persistent = set(model.state_dict())
    tensors |= {n: b for n, b in model.named_buffers() if n in persistent}
    for name, tensor in sorted(tensors.items()):
        noise = torch.randn(tensor.shape, generator=generator)
        gain = tensor.shape[-1] ** -0.5
        if name.endswith("e_score_correction_bias"):
            value = 0.3 * noise
        elif tensor.dim() == 1:
            value = 0.2 * noise + (1.0 if name.endswith("norm.weight") else 0.0)
        elif name.endswith("embed_tokens.weight"):
            value = 0.02 * noise
        elif name.endswith(".gate.weight"):
            value = 2.0 * gain * noise
        else:
            value = 1.5 * gain * noise
        if name.endswith("q_a_proj.weight"):
            value = 0.01 * value
        if name.endswith("kv_a_proj_with_mqa.weight"):
            value[: model.config.kv_lora_rank] *= 0.01
        tensor.copy_(value)
