"""Safetensors checkpoints: each fault is one line with file and tensor (issue: "Bad input")."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_configs import (
    FAMILIES,
    hub_tensors,
    random_tiny_config,
    save_checkpoint,
    save_random_model,
)

from pdscope.compiler.checkpoint import (
    INDEX,
    Checkpoint,
    DummyWeights,
    Weights,
    check_finite,
    map_parameters,
    to_bf16,
)
from pdscope.compiler.reference import run_graph
from pdscope.compiler.trace import TracedModel, load_model, trace_config
from pdscope.errors import ModelError

Edit = Callable[[dict[str, Any]], None]


def small_config() -> dict[str, Any]:
    return random_tiny_config("mixtral", 0) | {"num_hidden_layers": 1, "hidden_size": 32}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral in three shards."""
    path = tmp_path_factory.mktemp("saved")
    save_random_model(small_config(), path, shards=3)
    return path


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def shard(path: Path, i: int = 2) -> Path:
    return path / f"model-{i:05d}-of-00003.safetensors"


def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    copy = torch.from_numpy(array.copy())
    return copy.view(torch.bfloat16) if array.dtype == np.uint16 else copy


def load(path: Path) -> tuple[TracedModel, Weights]:
    checkpoint, traced = Checkpoint.open(path), load_model(path)
    return traced, Weights(checkpoint, map_parameters(traced.meta_model, checkpoint))


def refused(path: Path, *words: str) -> str:
    with pytest.raises(ModelError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


def edit_index(path: Path, edit: Edit) -> None:
    index = json.loads((path / INDEX).read_text())
    edit(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def edit_header(path: Path, edit: Edit) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    write_raw(path, json.dumps(header).encode(), data[8 + length :])


def write_raw(path: Path, header: bytes, payload: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + payload)


def spread(entry: dict[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    return int(end - begin)


def first(header: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(v for k, v in sorted(header.items()) if k != "__metadata__")
    return entry


# --- right input ---


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_equal_transformers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every parameter read under its transformers name is what transformers' model holds."""
    config = random_tiny_config(family, 1)
    model = save_random_model(config, tmp_path, 1, dtype, shards=2)
    _, weights = load(tmp_path)
    state = model.state_dict()
    for name in weights.sources:
        stored = state[name].dtype  # gates may be float32 in any checkpoint
        assert weights.dtype_of(name) == str(stored).removeprefix("torch.")
        array = weights.get(name)
        assert array.dtype == (np.uint16 if stored is torch.bfloat16 else np.float32)
        assert torch.equal(tensor(array).float(), state[name].float()), name
    assert (
        set(weights.sources) == set(state) - {"lm_head.weight"} or not config["tie_word_embeddings"]
    )


def test_parts_of_fused_parameters(model: Path) -> None:
    """Gate rows come first in gate_up; the parts are views of the files."""
    _, weights = load(model)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = weights.get(name)
    for e in (0, 3, 7):
        both = [weights.get(name, part, e) for part in ("gate", "up")]
        assert np.array_equal(np.concatenate(both), whole[e])
    down = "model.layers.0.mlp.experts.down_proj"
    assert np.array_equal(weights.get(down, "down", 2), weights.get(down)[2])
    assert not weights.get(name, "up", 1).flags.owndata
    with pytest.raises(KeyError):
        weights.get(name, "gate", 99)


def test_fused_checkpoints_load_too(model: Path, tmp_path: Path) -> None:
    """A checkpoint with transformers-5 names (experts fused) gives the same weights."""
    from support.tiny_configs import build_random_model

    config = small_config()
    hf = build_random_model(config, 0)
    save_checkpoint({k: v.clone() for k, v in hf.state_dict().items()}, config, tmp_path / "fused")
    _, fused = load(tmp_path / "fused")
    _, split = load(model)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for part in ("gate", "up"):
        assert np.array_equal(fused.get(name, part, 5), split.get(name, part, 5))
    assert np.array_equal(fused.get(name), split.get(name))


def test_graph_runs_on_checkpoint_weights(model: Path) -> None:
    """The names that the graph's operators read are names that Weights has."""
    traced, weights = load(model)
    ids = torch.arange(10)
    logits = run_graph(traced.graph, lambda n: tensor(weights.get(n)), ids)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("redundant", [False, True])
def test_tied_embeddings_with_and_without_a_head(redundant: bool, tmp_path: Path) -> None:
    """Fault of others: tied embeddings, lm_head missing or redundant. Both work."""
    config = small_config() | {"tie_word_embeddings": True}
    hf = save_random_model(config, tmp_path)
    tensors = hub_tensors(hf, config)
    embed = tensors["model.embed_tokens.weight"]
    if redundant:
        tensors["lm_head.weight"] = embed.clone()
        save_checkpoint(tensors, config, tmp_path)
    traced, weights = load(tmp_path)
    name = traced.graph.node("lm_head").weights["weight"].name
    assert torch.equal(tensor(weights.get(name)), embed)
    # transformers takes the head for both when only the head is there
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_checkpoint(tensors, config, tmp_path)
    _, weights = load(tmp_path)
    assert torch.equal(tensor(weights.get(name)), embed)


def test_tied_embeddings_with_another_head_are_refused(tmp_path: Path) -> None:
    """transformers would not tie them: the configuration is wrong, and the message says so."""
    config = small_config() | {"tie_word_embeddings": True}
    hf = save_random_model(config, tmp_path)
    tensors = hub_tensors(hf, config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    save_checkpoint(tensors, config, tmp_path)
    refused(tmp_path, "lm_head.weight", "tie_word_embeddings")


def test_ignorable_tensors(tmp_path: Path) -> None:
    """Rotary buffers of old checkpoints, and multi-token-prediction layers of DeepSeek-V3."""
    config = random_tiny_config("deepseek_v3", 0) | {"num_nextn_predict_layers": 1}
    hf = save_random_model(config, tmp_path)
    tensors = hub_tensors(hf, config)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    extra = config["num_hidden_layers"]
    tensors[f"model.layers.{extra}.eh_proj.weight"] = torch.ones(4, 4)
    save_checkpoint(tensors, config, tmp_path)
    load(tmp_path)
    save_checkpoint(tensors, config | {"num_nextn_predict_layers": 0}, tmp_path)
    refused(tmp_path, f"model.layers.{extra}.eh_proj.weight")


# --- damaged files ---


def test_missing_shard(model: Path) -> None:
    """Issue: missing shard."""
    shard(model).unlink()
    refused(model, shard(model).name, "missing", "download")


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1, -4000])
def test_truncated_shard(model: Path, keep: int) -> None:
    """Issue: truncated shard, cut anywhere."""
    data = shard(model).read_bytes()
    shard(model).write_bytes(data[:keep])
    message = refused(model, shard(model).name, "download the file again")
    assert "short" in message


def test_trailing_bytes(model: Path) -> None:
    """Bytes that no tensor covers are a sign of a mixed-up file."""
    shard(model).write_bytes(shard(model).read_bytes() + b"\0" * 16)
    refused(model, shard(model).name, "16 bytes after the last tensor")


def header_case(edit: Edit, *words: str) -> Any:
    return pytest.param(edit, words, id="-".join(words[0].split()))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        header_case(lambda h: first(h).update(shape=[0, 4]), "zero dimension"),
        header_case(lambda h: h.update({"": h.pop(sorted(h)[1])}), "empty name"),
        header_case(
            lambda h: first(h).update(data_offsets=[64, first(h)["data_offsets"][1] + 64]),
            "overlap",
        ),
        header_case(
            lambda h: first(h).update(data_offsets=[(1 << 40) + n for n in (0, spread(first(h)))]),
            "starts at byte",
        ),
        header_case(lambda h: first(h).update(data_offsets=[8, 0]), "run backwards"),
        header_case(lambda h: first(h).update(data_offsets=[-8, 0]), "two byte positions"),
        header_case(lambda h: first(h).update(data_offsets="all"), "two byte positions"),
        header_case(lambda h: first(h).update(dtype="F23"), "unknown dtype", "F23"),
        header_case(lambda h: first(h).update(dtype=None), "unknown dtype"),
        header_case(lambda h: first(h).update(shape=[3, 5]), "expected 60 for shape"),
        header_case(lambda h: first(h).update(shape=[2.5]), "list of positive integers"),
        header_case(lambda h: first(h).update(shape=[-1, 4]), "list of positive integers"),
        header_case(lambda h: h.update({sorted(h)[1]: 5}), "not a JSON object"),
    ],
)
def test_damaged_header(model: Path, edit: Edit, words: tuple[str, ...]) -> None:
    """Issue: zero dimension, empty key, overlapping or out-of-file offsets, unknown dtype."""
    edit_header(shard(model), edit)
    refused(model, shard(model).name, *words)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"\xff\xfe{}", b'{"a": 1, "a": 2}', b"[" * 100_000]
)
def test_header_that_is_no_object(model: Path, raw: bytes) -> None:
    """A header that is no JSON object, or has a key twice."""
    write_raw(shard(model), raw, b"")
    refused(model, shard(model).name, "header")


def test_header_longer_than_the_file(model: Path) -> None:
    """A length field of garbage must not make us allocate."""
    shard(model).write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    refused(model, shard(model).name, "header length")


def test_headers_of_odd_length_are_read(model: Path) -> None:
    """Payloads need not be aligned: the format allows any header length."""
    traced, before = load(model)
    name = "model.norm.weight"
    expected = before.get(name).copy()
    for i in (1, 2, 3):
        data = shard(model, i).read_bytes()
        length = int.from_bytes(data[:8], "little")
        write_raw(shard(model, i), data[8 : 8 + length].rstrip() + b" ", data[8 + length :])
    _, weights = load(model)
    assert np.array_equal(weights.get(name), expected)


# --- the index ---


def test_index_names_a_tensor_no_shard_has(model: Path) -> None:
    """Issue: index naming a tensor no shard has."""
    edit_index(model, lambda m: m.update({"model.extra.weight": shard(model).name}))
    refused(model, shard(model).name, "model.extra.weight", INDEX)


def test_shard_holds_a_tensor_the_index_does_not_name(model: Path) -> None:
    """The other way round."""
    edit_index(model, lambda m: m.pop("model.norm.weight"))
    refused(model, "model.norm.weight", "does not name")


def test_tensor_in_two_shards(model: Path) -> None:
    """The same tensor twice: which one is right cannot be known."""
    extra = load_file(shard(model, 1))
    key = sorted(extra)[0]
    other = load_file(shard(model, 2)) | {key: extra[key]}
    save_file(other, shard(model, 2))
    refused(model, key, "places in")


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        7,
        ".hidden.safetensors",
        "x.bin",
    ],
)
def test_index_names_stay_in_the_directory(model: Path, name: Any) -> None:
    """An index may not point outside of the model directory."""
    edit_index(model, lambda m: m.update({"model.norm.weight": name}))
    refused(model, INDEX, "model.norm.weight", "plain name")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_broken_index(model: Path, text: str) -> None:
    """An index that is no JSON, or has no map."""
    (model / INDEX).write_text(text)
    refused(model, INDEX)


def test_no_safetensors(tmp_path: Path) -> None:
    """A directory without weights, with pickled ones only, and with shards but no index."""
    (tmp_path / "config.json").write_text(json.dumps(small_config()))
    refused(tmp_path, "no weights", "dummy")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, "pytorch_model.bin", "pickled")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"x")
    refused(tmp_path, "model-00001-of-00002.safetensors", INDEX)


# --- weights that do not fit the configuration ---


def rewrite(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for i in (1, 2, 3):
        tensors |= load_file(shard(path, i))
        shard(path, i).unlink()
    (path / INDEX).unlink()
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


GATE = "model.layers.0.block_sparse_moe.gate.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.3.w1.weight"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), ("model.norm.weight", "no tensor")),
        (lambda t: t.pop(EXPERT), ("gate_up_proj (expert 3, gate)", "no tensor")),
        (lambda t: t.update({GATE: torch.ones(9, 32)}), (GATE, "[9, 32]", "[8, 32]")),
        (lambda t: t.update({EXPERT: t[EXPERT].T.contiguous()}), (EXPERT, "shape")),
        (
            lambda t: t.update({EXPERT.replace(".3.", ".8."): t[EXPERT].clone()}),
            ("expert 8", "8 experts"),
        ),
        (
            lambda t: t.update({"model.layers.9.x.weight": torch.ones(1)}),
            ("model.layers.9.x.weight",),
        ),
        (lambda t: t.update({GATE: t[GATE].to(torch.int8)}), (GATE, "I8", "bf16")),
        (lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn)}), (GATE, "F8_E4M3")),
        (
            lambda t: t.update({"model.layers.0.mlp.gate.weight": t[GATE].clone()}),
            ("same parameter", "model.layers.0.mlp.gate.weight"),
        ),
    ],
)
def test_weights_that_do_not_fit(
    model: Path, edit: Callable[[dict[str, torch.Tensor]], None], words: tuple[str, ...]
) -> None:
    """Issue: shape mismatch; missing and unexpected tensors; unsupported dtypes."""
    rewrite(model, edit)
    refused(model, *words)


def test_vocabulary_mismatch(model: Path) -> None:
    """Issue: vocabulary mismatch, between config.json and weights."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 101}))
    refused(model, "vocab_size 101", "shape")


# --- values ---


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("bf16", [False, True])
def test_check_finite_names_the_place(bad: float, bf16: bool) -> None:
    """Issue: NaN weights (`--check-weights`): tensor and index are named."""
    array = np.zeros((3, 5), np.float32)
    check_finite("w", to_bf16(array) if bf16 else array)
    array[2, 1] = bad
    damaged = (array.view(np.uint32) >> 16).astype(np.uint16) if bf16 else array
    with pytest.raises(ModelError, match=r"tensor w: .* at index \[2, 1\]"):
        check_finite("w", damaged)


def test_content_hash_follows_the_bytes(model: Path) -> None:
    """The hash changes with any byte of weights or index, and reports progress to the end."""
    seen: list[tuple[int, int]] = []
    checkpoint = Checkpoint.open(model)
    before = checkpoint.content_hash(lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > checkpoint.total_bytes
    assert Checkpoint.open(model).content_hash() == before
    data = bytearray(shard(model).read_bytes())
    data[-1] ^= 1
    shard(model).write_bytes(data)
    assert Checkpoint.open(model).content_hash() != before
    moved = model.parent / "moved"
    shutil.copytree(model, moved)
    changed = Checkpoint.open(model).content_hash()
    assert Checkpoint.open(moved).content_hash() == changed
    (moved / "config.json").write_text("{}")  # has a hash of its own in plan.json
    assert Checkpoint.open(moved).content_hash() == changed
    with (moved / INDEX).open("a") as file:
        file.write(" ")
    assert Checkpoint.open(moved).content_hash() != changed


def test_hash_of_a_single_file_is_of_it_alone(tmp_path: Path) -> None:
    save_random_model(small_config(), tmp_path, shards=1)
    before = Checkpoint.open(tmp_path).content_hash()
    (tmp_path / INDEX).write_text("{}")
    assert Checkpoint.open(tmp_path).content_hash() == before


@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "model-00002-of-00003.safetensors"])
def test_link_to_nothing_is_named(model: Path, name: str) -> None:
    """Bad input: a download cache whose blobs are gone is not a model without weights."""
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to("../blobs/0123")
    refused(model, str(model / name), "../blobs/0123", "does not exist", "download")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dummy_weights(dtype: str) -> None:
    """--load-format dummy: right shapes, the same on every call, spread routing."""
    traced = trace_config(random_tiny_config("deepseek_v3", 1))
    a, b = DummyWeights(traced.meta_model, dtype), DummyWeights(traced.meta_model, dtype)
    other = DummyWeights(traced.meta_model, dtype, seed=1)
    state = traced.meta_model.state_dict()
    for name, meta in state.items():
        array = a.get(name)
        assert array.shape == tuple(meta.shape) and a.dtype_of(name) == dtype
        assert np.array_equal(array, b.get(name))
        assert len(array.shape) == 1 or not np.array_equal(array, other.get(name))
        check_finite(name, array)
    fused = next(n for n in state if n.endswith("gate_up_proj"))
    assert np.array_equal(
        a.get(fused)[1], np.concatenate([a.get(fused, p, 1) for p in ("gate", "up")])
    )
    used: list[int] = []
    run_graph(
        traced.graph,
        lambda n: tensor(a.get(n)),
        torch.arange(64),
        lambda node, ids, weights, scores: used.append(len(ids.unique())),
    )
    assert min(used) > 1


def test_to_bf16_rounds_to_nearest_even() -> None:
    """The same rounding as torch's."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    expected = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bf16(values.numpy()), expected)
