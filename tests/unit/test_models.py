"""Which configurations are refused, and how the message reads (issue: "Bad input", "Front end")."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_configs import random_tiny_config

from pdscope.compiler.passes.tokenizer_files import chat_template, generation_ids
from pdscope.compiler.trace import load_model, trace_config
from pdscope.errors import ModelError
from pdscope.ir.graph import GateAttrs, GqaAttrs, MlaAttrs, Op
from pdscope.models.registry import FAMILIES, family_of


def refused(config: dict[str, Any], *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        trace_config(config)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k != key}


@pytest.mark.parametrize("names", [["LlamaForCausalLM"], ["DeepseekV4ForCausalLM"]])
def test_unsupported_family_is_refused_by_name(names: list[str]) -> None:
    """Issue: a family that is not supported is refused by name, with the list of those that are."""
    refused({"architectures": names}, names[0], "not supported", *FAMILIES)


@pytest.mark.parametrize("names", [None, [], "MixtralForCausalLM", [3]])
def test_missing_architecture_lists_the_supported(names: Any) -> None:
    """A config.json without architectures says what was expected."""
    refused({"architectures": names}, "architectures", *FAMILIES)


def test_model_type_must_fit_the_architecture() -> None:
    """Two keys that contradict each other are an error, not a guess."""
    refused(random_tiny_config("mixtral", 0) | {"model_type": "llama"}, "model_type", "mixtral")


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe"])
def test_required_keys_have_no_default(name: str) -> None:
    """Issue: config lacking a key that defines shapes is an error that names the key."""
    config = random_tiny_config(name, 0)
    for key in family_of(config).required:
        refused(without(config, key), key, "missing")
        refused(config | {key: None}, key)
        for value in (0, -3, 2.5, True, "7"):
            refused(config | {key: value}, key)


def gate_of(config: dict[str, Any]) -> GateAttrs:
    graph = trace_config(config).graph
    attrs = next(n.attrs for n in graph.nodes if n.op is Op.GATE)
    assert isinstance(attrs, GateAttrs)
    return attrs


def attention_of(config: dict[str, Any]) -> GqaAttrs | MlaAttrs:
    attrs = trace_config(config).graph.node("layers.0.self_attn").attrs
    assert isinstance(attrs, GqaAttrs | MlaAttrs)
    return attrs


def test_family_defaults_are_used_where_there_are_some() -> None:
    """Issue: config lacking a key: the family's default where the family has one."""
    qwen = random_tiny_config("qwen3_moe", 0)
    assert gate_of(without(qwen, "norm_topk_prob")).normalise is False
    mixtral = random_tiny_config("mixtral", 0)
    assert gate_of(without(mixtral, "num_experts_per_tok")).top_k == 2
    theta = attention_of(without(mixtral, "rope_theta")).rope
    assert theta == attention_of(mixtral | {"rope_theta": 1e6}).rope
    graph = trace_config(without(mixtral, "rms_norm_eps")).graph
    assert getattr(graph.node("norm").attrs, "eps", 0) == 1e-5
    v2 = random_tiny_config("deepseek_v2", 0)
    refused(without(v2, "num_experts_per_tok"), "num_experts_per_tok", "no default")


@pytest.mark.parametrize("act", ["gelu", "relu", "nonsense"])
def test_unknown_activation(act: str) -> None:
    """Issue: unknown activation."""
    refused(random_tiny_config("mixtral", 0) | {"hidden_act": act}, "hidden_act", act, "silu")


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, ("num_experts_per_tok", "9")),
        ("mixtral", {"num_attention_heads": 3, "num_key_value_heads": 2}, ("num_key_value_heads",)),
        ("mixtral", {"sliding_window": 0}, ("sliding_window",)),
        ("mixtral", {"max_position_embeddings": 0}, ("max_position_embeddings",)),
        ("mixtral", {"rms_norm_eps": "small"}, ("rms_norm_eps",)),
        ("mixtral", {"rms_norm_eps": -1.0}, ("rms_norm_eps",)),
        ("mixtral", {"torch_dtype": "float64"}, ("dtype", "float64")),
        ("mixtral", {"torch_dtype": "int8"}, ("dtype",)),
        ("mixtral", {"head_dim": 7}, ("rotary",)),
        ("mixtral", {"head_dim": -8}, ("head_dim", "-8")),
        ("mixtral", {"rope_theta": 0}, ("rope_theta",)),
        ("mixtral", {"rope_theta": "big"}, ("rope_theta",)),
        ("deepseek_v3", {"routed_scaling_factor": "2"}, ("routed_scaling_factor",)),
        (
            "mixtral",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            ("dynamic", "yarn"),
        ),
        (
            "mixtral",
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 9,
                    "long_factor": [1.0] * 9,
                }
            },
            ("longrope",),
        ),
        ("mixtral", {"rope_scaling": {"rope_type": "magic"}}, ("magic",)),
        (
            "mixtral",
            {"rope_scaling": {"type": "linear", "factor": 0}},
            ("rope_scaling.factor", "0"),
        ),
        (
            "mixtral",
            {"rope_scaling": {"type": "linear", "factor": -2}},
            ("factor is -2", "positive"),
        ),
        ("mixtral", {"rope_scaling": {"type": "linear", "factor": 10**400}}, ("factor is 1000",)),
        (
            "deepseek_v2",
            {"rope_scaling": {"type": "yarn", "factor": "4"}},
            ("rope_scaling.factor is '4'", "positive number"),
        ),
        (
            "mixtral",
            {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": "x"}},
            ("rope_scaling.beta_fast is 'x'",),
        ),
        (
            "mixtral",
            {"rope_scaling": {"type": "yarn", "factor": 4, "mscale": True}},
            ("rope_scaling.mscale is True", "a number"),
        ),
        ("mixtral", {"rope_scaling": {"factor": 2.0}}, ("rope_scaling", "no rope_type", "yarn")),
        ("mixtral", {"rope_parameters": {"factor": 2.0}}, ("rope_parameters", "no rope_type")),
        ("mixtral", {"rope_scaling": "yarn"}, ("rope_scaling is 'yarn'", "object")),
        ("mixtral", {"torch_dtype": "junk"}, ("torch_dtype is 'junk'", "bfloat16")),
        ("mixtral", {"dtype": ["float32"]}, ("dtype is ['float32']", "bfloat16")),
        ("mixtral", {"quantization_config": {"quant_method": "fp8"}}, ("quantization", "fp8")),
        ("mixtral", {"quantization_config": "awq"}, ("quantization_config (awq)", "bf16")),
        ("mixtral", {"quantization_config": [1]}, ("quantization_config (unknown)", "bf16")),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, ("mlp_only_layers", "experts")),
        ("qwen3_moe", {"decoder_sparse_step": 0}, ("decoder_sparse_step",)),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": -1}, ("sliding_window",)),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, ("topk_method", "greedy")),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, ("scoring_func", "softmax")),
        ("deepseek_v2", {"mlp_bias": True}, ("mlp_bias",)),
        ("deepseek_v2", {"moe_layer_freq": 2}, ("moe_layer_freq",)),
        ("deepseek_v2", {"n_shared_experts": 0}, ("n_shared_experts",)),
        ("deepseek_v2", {"first_k_dense_replace": 9}, ("first_k_dense_replace",)),
        ("deepseek_v2", {"first_k_dense_replace": -1}, ("first_k_dense_replace",)),
        ("deepseek_v2", {"qk_rope_head_dim": 5}, ("head_dim", "5")),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
            ("n_group", "divide"),
        ),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": None},
            ("n_group",),
        ),
        ("deepseek_v3", {"n_group": 5}, ("n_group",)),
        ("deepseek_v3", {"topk_group": 99}, ("topk_group",)),
        ("deepseek_v3", {"topk_method": "greedy"}, ("topk_method",)),
        ("deepseek_v3", {"num_key_value_heads": 1}, ("num_key_value_heads",)),
        (
            "deepseek_v3",
            {"n_routed_experts": 16, "n_group": 16, "topk_group": 8, "num_experts_per_tok": 4},
            ("n_group", "best 2"),
        ),
        (
            "deepseek_v3",
            {"n_routed_experts": 16, "n_group": 8, "topk_group": 1, "num_experts_per_tok": 3},
            ("num_experts_per_tok", "2 experts"),
        ),
        ("olmoe", {"clip_qkv": -1.0}, ("clip_qkv",)),
        ("olmoe", {"num_attention_heads": 5, "num_key_value_heads": 5}, ("hidden_size",)),
    ],
)
def test_inconsistent_configuration(
    family: str, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    """Bad input names the key, in one line, before anything is compiled."""
    refused(random_tiny_config(family, 0) | change, *words)


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"{", "JSON"), (b"[1]", "object"), (b"\xff\xfe", "JSON"), (b'"x"', "object")],
)
def test_broken_config_file(tmp_path: Path, content: bytes, word: str) -> None:
    """A config.json that is no JSON object is refused with its path; invalid UTF-8 too."""
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=word) as caught:
        load_model(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    """No directory, and a directory without config.json."""
    with pytest.raises(ModelError, match="no such file"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"config\.json: missing"):
        load_model(tmp_path)


def test_every_rope_type_that_is_accepted_traces() -> None:
    """linear, llama3 and yarn tables are taken from transformers' own classes."""
    base = random_tiny_config("mixtral", 0)
    plain = attention_of(base).rope
    for scaling in (
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ):
        assert attention_of(base | {"rope_scaling": scaling}).rope != plain


def test_new_style_rope_parameters() -> None:
    """rope_parameters of transformers 5 means the same as rope_theta and rope_scaling."""
    old = random_tiny_config("deepseek_v2", 0)
    new = {k: v for k, v in old.items() if k not in ("rope_scaling", "rope_theta")}
    scaling = {"rope_type" if k == "type" else k: v for k, v in old["rope_scaling"].items()}
    new["rope_parameters"] = scaling | {"rope_theta": old["rope_theta"]}
    assert trace_config(json.loads(json.dumps(new))).graph == trace_config(old).graph


@pytest.mark.parametrize(
    ("key", "value"), [("num_experts_per_tok", 65), ("num_local_experts", 1025)]
)
def test_more_experts_than_a_program_holds(key: str, value: int) -> None:
    config = random_tiny_config("mixtral", 0) | {"num_local_experts": 100, key: value}
    refused(config, key, str(value), "at most")


@pytest.mark.parametrize(
    ("family", "key"),
    [
        *(("qwen3_moe", k) for k in ("num_hidden_layers", "hidden_size", "vocab_size")),
        *(("qwen3_moe", k) for k in ("moe_intermediate_size", "head_dim", "num_attention_heads")),
        *(("qwen3_moe", k) for k in ("num_key_value_heads", "num_experts", "intermediate_size")),
        *(("deepseek_v3", k) for k in ("q_lora_rank", "kv_lora_rank", "n_shared_experts")),
        *(("deepseek_v3", k) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
        ("mixtral", "sliding_window"),
    ],
)
@pytest.mark.parametrize("value", [1 << 40, 10**30])
def test_sizes_out_of_all_proportion(family: str, key: str, value: int) -> None:
    """Bad input: a number that no model has is refused by name, before transformers loops over
    it."""
    refused(random_tiny_config(family, 0) | {key: value}, f"{key} is {value}", "at most")


def test_a_million_layers_are_refused_at_once() -> None:
    config = random_tiny_config("olmoe", 0) | {"num_hidden_layers": 1_000_000}
    refused(config, "num_hidden_layers is 1000000", "at most 1024")


def test_deeply_nested_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("eos_token_id", [1, 99]), ("bos_token_id", -1), ("pad_token_id", "0")]
)
def test_token_ids_that_the_model_lacks(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ModelError, match=f"generation_config.json: {key}"):
        generation_ids(tmp_path, {}, 64)
    (tmp_path / "generation_config.json").unlink()
    assert generation_ids(tmp_path, {"pad_token_id": -1}, 64)["pad"] is None


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{% if %}", "Expected an expression"),
        (
            [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "y"}],
            "rag, tool_use",
        ),
        ([{"name": "default"}], "NoneType"),
        ({"default": "x"}, "dict"),
    ],
)
def test_chat_template_that_cannot_be_used(tmp_path: Path, template: Any, word: str) -> None:
    """A note of the compile says which file is wrong and why; the model is usable without it."""
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": template}))
    usable, note = chat_template(tmp_path)
    assert not usable and note and note.startswith(f"{config}: chat_template") and word in note
    assert "--chat" in note
    config.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert chat_template(tmp_path) == (True, None)
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ messages }}\xff")
    usable, note = chat_template(tmp_path)
    assert not usable and note and "chat_template.jinja: is not valid UTF-8" in note
    (tmp_path / "chat_template.jinja").unlink()
    config.unlink()
    assert chat_template(tmp_path) == (False, None)
