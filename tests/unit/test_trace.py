"""The trace is the source of structure (issue: "Front end" and "Trace is the truth")."""

import functools
import inspect
import json
import textwrap
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_configs import FAMILIES, build_random_model, random_tiny_config
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

from pdscope.compiler.leaf_check import check_leaf_semantics, shrunk_config
from pdscope.compiler.reference import run_graph
from pdscope.compiler.trace import load_model, trace_config
from pdscope.errors import ModelError
from pdscope.ir.graph import Graph, MlaAttrs, Op, ScaleAttrs
from pdscope.ir.graph_text import print_graph
from pdscope.models.registry import family_of

CONFIGS = sorted((Path(__file__).parents[2] / "examples" / "configs").glob("*/config.json"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads only cost on matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def ops(graph: Graph, layer: int | None) -> list[str]:
    return [str(n.op) for n in graph.in_layer(layer)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.parent.name)
def test_published_configurations_trace_fast(path: Path) -> None:
    """Issue: the published configurations trace in under 20 s each; here 10 s, leaf check
    included.
    """
    begin = time.process_time()  # a loaded machine's clock says nothing
    traced = load_model(path)
    check_leaf_semantics(traced.config)
    assert time.process_time() - begin < 10
    assert traced.graph.layers == len({n.layer for n in traced.graph.nodes} - {None})
    assert all(p.device.type == "meta" for p in traced.meta_model.parameters())


def test_layers_of_each_kind() -> None:
    """Issue: dense first layers, shared experts; the residual adds come from the trace."""
    graph = trace_config({**random_tiny_config("deepseek_v3", 0), "first_k_dense_replace": 1}).graph
    dense, moe = ops(graph, 0), ops(graph, 1)
    assert dense == ["norm", "attention", "add", "norm", "mlp", "add"]
    head = ["norm", "attention", "add", "norm", "gate", "experts", "shared_expert", "add", "add"]
    assert moe == head
    assert ops(graph, None) == ["embed", "norm", "lm_head"]
    gate = graph.node("layers.1.mlp.gate")
    experts = graph.node("layers.1.mlp.experts")
    assert experts.inputs == (gate.inputs[0], gate.name)
    outer = graph.node("layers.1.add_2")
    assert outer.inputs == ("layers.1.add", "layers.1.add_1")


@pytest.mark.parametrize("dense", [0, 1, 2, 3])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_dense_first_layers(family: str, dense: int) -> None:
    """Fault of others: one to three dense first layers assumed to be one."""
    config = random_tiny_config(family, 1)
    config |= {"num_hidden_layers": 4, "first_k_dense_replace": dense}
    graph = trace_config(config).graph
    kinds = ["gate" in ops(graph, i) for i in range(4)]
    assert kinds == [False] * dense + [True] * (4 - dense)


def test_qwen3_dense_layers() -> None:
    """mlp_only_layers and decoder_sparse_step of Qwen3-MoE."""
    config = random_tiny_config("qwen3_moe", 0)
    config |= {"num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2}
    graph = trace_config(config).graph
    assert ["gate" in ops(graph, i) for i in range(4)] == [False, False, False, True]


def test_yarn_scale_is_transformers_own() -> None:
    """Fault of others: the YaRN attention scale of DeepSeek-V2-Lite; the value is transformers'."""
    path = next(p for p in CONFIGS if p.parent.name == "deepseek-v2-lite")
    graph = load_model(path).graph
    attrs = graph.node("layers.0.self_attn").attrs
    assert isinstance(attrs, MlaAttrs)
    assert attrs.softmax_scale == pytest.approx(0.114721, rel=1e-5)
    assert attrs.rope.scale == 1.0 and attrs.rope.interleaved and attrs.rope.dim == 64
    assert attrs.norm_eps == 1e-6


@pytest.mark.parametrize("window", [None, 7])
def test_sliding_window_comes_from_the_mask(window: int | None) -> None:
    """Issue: sliding window. Mixtral's acts through the mask alone."""
    config = {**random_tiny_config("mixtral", 0), "sliding_window": window}
    graph = trace_config(config).graph
    assert getattr(graph.node("layers.0.self_attn").attrs, "window", 0) == window


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_window_of_every_layer_when_transformers_ignores_layer_types(family: str) -> None:
    """max_window_layers and layer_types of published configs do nothing in transformers."""
    config = random_tiny_config(family, 0) | {"use_sliding_window": True, "sliding_window": 5}
    config |= {"num_hidden_layers": 3, "max_window_layers": 1}
    config["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    graph = trace_config(config).graph
    windows = [getattr(n.attrs, "window", 0) for n in graph.nodes if n.op is Op.ATTENTION]
    assert windows == [5, 5, 5]
    check_leaf_semantics(config)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_head_reads_the_embedding(tied: bool) -> None:
    """Issue: tied and untied embeddings."""
    graph = trace_config({**random_tiny_config("mixtral", 0), "tie_word_embeddings": tied}).graph
    head = graph.node("lm_head").weights["weight"].name
    assert head == ("model.embed_tokens.weight" if tied else "lm_head.weight")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(6))
def test_graph_computes_what_transformers_does(family: str, seed: int) -> None:
    """The reference executor of the traced graph agrees with transformers (eager, fp32)."""
    config = random_tiny_config(family, seed)
    graph = trace_config(config).graph
    model = build_random_model(config, seed)
    ids = torch.randint(
        0, config["vocab_size"], (40,), generator=torch.Generator().manual_seed(seed)
    )
    with torch.no_grad():
        theirs = model(input_ids=ids[None], use_cache=False).logits[0]
        ours = run_graph(graph, model.state_dict().__getitem__, ids)
    close = (ours - theirs).abs().amax(-1) <= 1e-4 * theirs.abs().amax(-1)
    assert close.float().mean() > 0.97  # a near-tie of a gate may flip a row


def test_no_remote_code_runs(tmp_path: Path) -> None:
    """A config.json with auto_map traces through transformers' own classes; its files do not
    run.
    """
    config = random_tiny_config("deepseek_v3", 0)
    config["auto_map"] = {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (tmp_path / name).write_text("raise SystemExit('remote code ran')")
    graph = load_model(tmp_path).graph
    assert graph == trace_config({k: v for k, v in config.items() if k != "auto_map"}).graph
    check_leaf_semantics(config)


# --- patched transformers: the graph changes, or the compile refuses ---


def drop_shared(self: Any, hidden_states: Any) -> Any:
    shape = hidden_states.shape
    _, weights, ids = self.gate(hidden_states)
    flat = hidden_states.view(-1, shape[-1])
    return self.experts(flat, ids, weights).view(*shape)


def test_dropped_shared_expert_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue: a test patches the HF class (drops the shared expert) and the compile refuses."""
    monkeypatch.setattr(v3.DeepseekV3MoE, "forward", drop_shared)
    with pytest.raises(ModelError, match="no traced operator reads.*shared_experts"):
        trace_config(random_tiny_config("deepseek_v3", 0))


def patch_layer(monkeypatch: pytest.MonkeyPatch, change: dict[str, str]) -> None:
    """Recompiles MixtralDecoderLayer.forward with some source text replaced."""
    forward = inspect.unwrap(mixtral.MixtralDecoderLayer.forward)
    source = textwrap.dedent(inspect.getsource(forward))
    source = source[source.index("def forward") :]
    for old, new in change.items():
        assert old in source
        source = source.replace(old, new)
    space: dict[str, Any] = {}
    exec(compile(source, "patched", "exec"), vars(mixtral), space)
    monkeypatch.setattr(mixtral.MixtralDecoderLayer, "forward", space["forward"])


def test_scaled_residual_is_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue: a test patches the HF class (scales a residual) and the graph changes."""
    config = random_tiny_config("mixtral", 0)
    before = trace_config(config).graph
    patch_layer(monkeypatch, {"residual + hidden_states": "residual * 0.5 + hidden_states"})
    after = trace_config(config).graph
    assert after != before
    scales = [n for n in after.in_layer(0) if n.op is Op.SCALE]
    assert [n.attrs for n in scales] == [ScaleAttrs(0.5), ScaleAttrs(0.5)]
    check_leaf_semantics(config)  # the executor follows the trace


def test_moved_norm_is_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm after the residual sum instead of before gives another graph."""
    config = random_tiny_config("mixtral", 0)
    before = trace_config(config).graph
    swap = {
        "self.input_layernorm(": "self.XX(",
        "self.post_attention_layernorm(": "self.input_layernorm(",
        "self.XX(": "self.post_attention_layernorm(",
    }
    patch_layer(monkeypatch, swap)
    after = trace_config(config).graph
    norms = [n.name for n in after.in_layer(0) if n.op is Op.NORM]
    assert norms == ["layers.0.post_attention_layernorm", "layers.0.input_layernorm"]
    assert print_graph(after) != print_graph(before)


@pytest.mark.parametrize(
    "change",
    [
        {"residual + hidden_states": "torch.relu(residual + hidden_states)"},
        {"residual + hidden_states": "hidden_states.add_(residual)"},
        {"residual + hidden_states": "residual - hidden_states"},
        {"residual + hidden_states": "residual + hidden_states + 1.0"},
        {"residual + hidden_states": "residual.flip(-1) + hidden_states"},
        {"    return": "    hidden_states += residual\n    return"},
        {"    return": "    hidden_states[..., 0] = 0\n    return"},
        {"    return": "    if residual.sum() > 0:\n        return residual\n    return"},
        {"    return": "    hidden_states = hidden_states[:, :4]\n    return"},
        {"attention_mask=attention_mask": "attention_mask=None"},
        {"self.mlp(hidden_states)": "self.mlp(hidden_states).to(torch.int8)"},
    ],
)
def test_unknown_operation_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    """Anything that is not understood is an error that names it, never skipped."""
    patch_layer(monkeypatch, change)
    with pytest.raises(ModelError, match="MixtralForCausalLM|cannot be traced"):
        trace_config(random_tiny_config("mixtral", 0))


def test_unused_gate_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts' routing must be one gate's own ids and weights."""

    def forward(self: Any, hidden_states: Any) -> Any:
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        _, weights, ids = self.gate(flat)
        return self.experts(flat, ids, weights * 2).reshape(*hidden_states.shape)

    monkeypatch.setattr(mixtral.MixtralSparseMoeBlock, "forward", forward)
    with pytest.raises(ModelError, match="hidden state"):
        trace_config(random_tiny_config("mixtral", 0))


# --- the leaf check: patches inside the modules that the trace takes as units ---


def edited(module: types.ModuleType, cls: str, change: dict[str, str]) -> Any:
    forward = inspect.unwrap(getattr(module, cls).forward)
    source = textwrap.dedent(inspect.getsource(forward))
    source = source[source.index("def forward") :]
    for old, new in change.items():
        assert old in source, (cls, old)
        source = source.replace(old, new)
    space: dict[str, Any] = {}
    exec(compile(source, "patched", "exec"), vars(module), space)
    return space["forward"]


PATCHES: list[tuple[str, int, types.ModuleType, str, dict[str, str]]] = [
    ("mixtral", 0, mixtral, "MixtralAttention", {"scaling=self.scaling": "scaling=0.2"}),
    (
        "mixtral",
        0,
        mixtral,
        "MixtralTopKRouter",
        {"dim=-1, keepdim=True)": "dim=-1, keepdim=True) + 0.1"},
    ),
    ("mixtral", 0, mixtral, "MixtralRMSNorm", {"self.variance_epsilon": "0.1"}),
    ("mixtral", 0, mixtral, "MixtralRMSNorm", {"self.weight *": "(1 + self.weight) *"}),
    ("mixtral", 2, mixtral, "MixtralRotaryEmbedding", {"* self.attention_scaling": "* 1.0"}),
    ("mixtral", 0, mixtral, "MixtralRotaryEmbedding", {"position_ids[": "(position_ids * 2)["}),
    (
        "qwen3_moe",
        0,
        qwen3,
        "Qwen3MoeTopKRouter",
        {"if self.norm_topk_prob": "if not self.norm_topk_prob"},
    ),
    ("qwen3_moe", 2, qwen3, "Qwen3MoeMLP", {"self.act_fn(": "torch.relu("}),
    ("qwen3_moe", 0, qwen3, "Qwen3MoeAttention", {"self.k_norm(": "("}),
    (
        "deepseek_v2",
        1,
        v2,
        "DeepseekV2TopkRouter",
        {"score_mask.bool(), 0.0": "score_mask.bool(), 9.0"},
    ),
    ("deepseek_v2", 1, v2, "DeepseekV2Attention", {"self.kv_a_layernorm(kv_nope)": "(kv_nope)"}),
    ("deepseek_v3", 0, v3, "DeepseekV3TopkRouter", {"topk(2, dim=-1)": "topk(1, dim=-1)"}),
    (
        "deepseek_v3",
        0,
        v3,
        "DeepseekV3TopkRouter",
        {"= scores.gather": "= scores_for_choice.gather"},
    ),
    (
        "deepseek_v3",
        0,
        v3,
        "DeepseekV3TopkRouter",
        {"router_logits.sigmoid()": "router_logits.softmax(-1)"},
    ),
    (
        "deepseek_v3",
        1,
        v3,
        "DeepseekV3TopkRouter",
        {"* self.routed_scaling_factor": "* 1.01 * self.routed_scaling_factor"},
    ),
    (
        "deepseek_v3",
        0,
        v3,
        "DeepseekV3Attention",
        {"if self.config.rope_interleave": "if not self.config.rope_interleave"},
    ),
    ("olmoe", 1, olmoe, "OlmoeAttention", {"if self.config.clip_qkv is not None": "if False"}),
    ("olmoe", 0, olmoe, "OlmoeAttention", {"self.q_norm(": "("}),
]


@pytest.mark.parametrize(("family", "seed", "module", "cls", "change"), PATCHES)
def test_patched_leaf_is_caught(
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    seed: int,
    module: types.ModuleType,
    cls: str,
    change: dict[str, str],
) -> None:
    """Trace is the truth, also inside the modules that the trace takes as units."""
    config = random_tiny_config(family, seed)
    check_leaf_semantics(config)
    monkeypatch.setattr(getattr(module, cls), "forward", edited(module, cls, change))
    with pytest.raises(ModelError, match="the installed transformers"):
        check_leaf_semantics(config)


def test_patched_experts_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An experts class that computes a clamp more is caught by the leaf check."""
    real = mixtral.MixtralExperts.forward

    @functools.wraps(real)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return real(self, *args, **kwargs).clamp(max=0.01)

    monkeypatch.setattr(mixtral.MixtralExperts, "forward", forward)
    with pytest.raises(ModelError, match="computes something else for this family"):
        check_leaf_semantics(random_tiny_config("mixtral", 0))


def test_other_activation_object_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The activation is read off the module, not believed from the configuration."""
    monkeypatch.setitem(mixtral.ACT2FN, "silu", torch.nn.GELU)
    with pytest.raises(ModelError, match="act_fn is GELU"):
        trace_config(random_tiny_config("mixtral", 0))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(12))
def test_unpatched_leaves_agree(family: str, seed: int) -> None:
    """The leaf check passes for every kind of configuration, with its semantics kept."""
    config = random_tiny_config(family, seed)
    check_leaf_semantics(config)
    small = shrunk_config(config, family_of(config))
    kept = ("rms_norm_eps", "norm_topk_prob", "routed_scaling_factor", "rope_scaling", "hidden_act")
    kept += (
        "tie_word_embeddings",
        "attention_bias",
        "rope_interleave",
        "topk_method",
        "rope_theta",
    )
    assert {k: small.get(k) for k in kept} == {k: config.get(k) for k in kept}


def test_weights_are_not_read_to_trace(tmp_path: Path) -> None:
    """Issue: no weight is read to trace; not even a checkpoint has to be there."""
    (tmp_path / "config.json").write_text(json.dumps(random_tiny_config("mixtral", 0)))
    assert load_model(tmp_path).graph == load_model(tmp_path / "config.json").graph
