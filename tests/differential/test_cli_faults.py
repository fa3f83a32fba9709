"""Bad input on the command line: one line that names the cause, status 1, no traceback.

Holds: "Bad input, each with a clear error and a test: missing shard; truncated shard; header with a
zero dimension, empty key, overlapping or out-of-file offsets, unknown dtype; index naming a tensor
no shard has; shape mismatch; config lacking a key (family default where the family has one, else
an error); unknown activation; NaN weights (`--check-weights`); vocabulary mismatch; a plan cut
short, edited, from another format version or for other CPU features; output directory not empty;
disk full; prompt longer than the context; empty prompt; invalid UTF-8." And: "`pdscope-bench -p`
beyond the context is an error naming the limit."
"""

import errno
import json
import logging
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.assets import BUNDLED
from support.commands import Ran, run_command, run_here
from support.damage import cut, edit_header, edit_json, flip, tensors_of
from support.plans import PlanStore

SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def make_model(out: Path) -> None:
    from support.tiny_configs import random_tiny_config, save_random_model

    config = random_tiny_config("qwen3_moe", 0) | {"num_hidden_layers": 2, "num_experts": 8}
    save_random_model(config, out, seed=0, shards=3)


@pytest.fixture
def model(plans: PlanStore, tmp_path: Path) -> Path:
    """A sound model of three shards, to be damaged."""
    return Path(shutil.copytree(plans.once("sharded.model", make_model), tmp_path / "model"))


@pytest.fixture
def plan(plans: PlanStore, tmp_path: Path) -> Path:
    """A sound plan of the demo model, to be damaged."""
    source = plans.compile(BUNDLED / "tiny-mixtral", dtype="fp32", max_context=128)
    return Path(shutil.copytree(source, tmp_path / "plan"))


def compile_fault(model: Path, *options: Any) -> str:
    """Compiles, expects a fault, and that no plan was left."""
    out = model.parent / "out.plan"
    line = run_here("pdscope-compile", model, "-o", out, *options).fault()
    assert not out.exists()
    return line


def entry(model: Path, change: Callable[[dict[str, Any]], object], which: int = 0) -> str:
    """Changes the header entry of one tensor of SHARD, and gives the tensor's name."""
    name = tensors_of(model / SHARD)[which]
    edit_header(model / SHARD, lambda header: change(header[name]))
    return name


def test_missing_shard(model: Path) -> None:
    (model / SHARD).unlink()
    assert SHARD in compile_fault(model)


def test_truncated_shard(model: Path) -> None:
    cut(model / SHARD, 100)
    assert SHARD in compile_fault(model)


def test_shard_cut_within_its_header(model: Path) -> None:
    cut(model / SHARD, (model / SHARD).stat().st_size - 20)
    assert SHARD in compile_fault(model)


def test_zero_dimension(model: Path) -> None:
    entry(model, lambda tensor: tensor["shape"].__setitem__(0, 0))
    assert SHARD in compile_fault(model)


def test_empty_key(model: Path) -> None:
    name = tensors_of(model / SHARD)[0]
    edit_header(model / SHARD, lambda header: header.update({"": header.pop(name)}))
    assert SHARD in compile_fault(model)


def test_overlapping_offsets(model: Path) -> None:
    other = tensors_of(model / SHARD)[1]
    name = tensors_of(model / SHARD)[0]

    def overlap(header: dict[str, Any]) -> None:
        size = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
        begin = header[other]["data_offsets"][0] + 4
        header[name]["data_offsets"] = [begin, begin + size]

    edit_header(model / SHARD, overlap)
    assert SHARD in compile_fault(model)


def test_offsets_beyond_the_file(model: Path) -> None:
    def move(tensor: dict[str, Any]) -> None:
        tensor["data_offsets"] = [offset + (1 << 40) for offset in tensor["data_offsets"]]

    entry(model, move, which=-1)
    assert SHARD in compile_fault(model)


def test_unknown_dtype(model: Path) -> None:
    entry(model, lambda tensor: tensor.update(dtype="F13"))
    line = compile_fault(model)
    assert SHARD in line and "F13" in line


def test_index_names_a_tensor_no_shard_has(model: Path) -> None:
    edit_json(model / INDEX, lambda index: index["weight_map"].update({"model.extra": SHARD}))
    assert "model.extra" in compile_fault(model)


def test_shape_mismatch(model: Path) -> None:
    name = entry(model, lambda tensor: tensor["shape"].reverse(), which=-1)
    shape = json.loads((model / "config.json").read_text())["hidden_size"]
    line = compile_fault(model)
    assert name in line and str(shape) in line


def test_config_lacks_a_key_without_default(model: Path) -> None:
    edit_json(model / "config.json", lambda config: config.pop("num_experts"))
    # transformers' default for the family does not fit these weights: named, not guessed.
    line = compile_fault(model)
    assert "config.json" in line or "experts" in line


def test_config_lacks_a_key_with_default(model: Path) -> None:
    """norm_topk_prob has a family default in transformers, which is what the reference uses."""
    edit_json(model / "config.json", lambda config: config.pop("norm_topk_prob"))
    ran = run_here("pdscope-compile", model, "--dry-run", "--json")
    assert ran.status == 0, ran.err


def test_unknown_activation(model: Path) -> None:
    edit_json(model / "config.json", lambda config: config.update(hidden_act="gelu_pytorch_tanh"))
    assert "gelu_pytorch_tanh" in compile_fault(model)


def test_unsupported_family(model: Path) -> None:
    """ "A family that is not supported is refused by name, with the list of those that are." """
    change = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    edit_json(model / "config.json", lambda config: config.update(change))
    line = compile_fault(model)
    assert "LlamaForCausalLM" in line
    for family in ("Mixtral", "Qwen3Moe", "DeepseekV2", "DeepseekV3", "Olmoe"):
        assert f"{family}ForCausalLM" in line


def test_config_is_not_json(model: Path) -> None:
    (model / "config.json").write_bytes(b'{"architectures": [')
    assert "config.json" in compile_fault(model)


def test_transformers_warnings_are_not_shown(model: Path) -> None:
    """Standard error has our own words."""
    # transformers warns that this does not fit max_position_embeddings.
    yarn = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 100}
    edit_json(model / "config.json", lambda config: config.update(rope_scaling=yarn))
    loud = run_command(
        "pdscope-compile", model, "--dry-run", env=os.environ | {"PDSCOPE_DEBUG": "1"}
    )
    assert loud.status == 0 and "[transformers]" in loud.err
    ran = run_command("pdscope-compile", model, "--dry-run")
    assert ran.status == 0 and ran.err == ""


def test_transformers_errors_are_shown(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its logging is as before when the command has ended, in whatever way."""
    from pdscope.compiler import driver
    from pdscope.errors import ModelError

    logger, seen = logging.getLogger("transformers"), list[str]()

    def compile_model(*_: object, **__: object) -> None:
        logger.warning("a warning")
        logger.error("an error")
        raise ModelError("refused")

    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: seen.append(record.getMessage()))
    monkeypatch.setattr(driver, "compile_model", compile_model)
    monkeypatch.setattr(logger, "handlers", [handler])
    level = logger.level
    assert "refused" in run_here("pdscope-compile", model, "--dry-run").fault()
    assert seen == ["an error"] and logger.level == level


def test_link_to_nothing(model: Path) -> None:
    """As of a download cache whose blobs are gone: named, and not as missing."""
    for name in (SHARD, INDEX, "config.json"):
        (model / name).unlink()
        (model / name).symlink_to("../blobs/0123")
        line = compile_fault(model)
        assert str(model / name) in line and "../blobs/0123, which does not exist" in line


@pytest.mark.parametrize("kind", ["pipe", "directory", "device"])
@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors", SHARD, INDEX, "config.json", "tokenizer.json"),
        *("tokenizer_config.json", "chat_template.jinja", "generation_config.json"),
    ],
)
def test_what_is_no_regular_file(model: Path, name: str, kind: str) -> None:
    """Bad input: a pipe in place of a file is refused, not waited for."""
    (model / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(model / name)
    elif kind == "directory":
        (model / name).mkdir()
    else:
        (model / name).symlink_to("/dev/zero")
    line = compile_fault(model)
    assert f"{model / name}: is a {kind}, expected a regular file" in line


def test_nan_weights(model: Path) -> None:
    raw = bytearray((model / SHARD).read_bytes())
    raw[-4:] = b"\x00\x00\xc0\x7f"  # the last value of the shard becomes NaN
    (model / SHARD).write_bytes(raw)
    line = compile_fault(model, "--check-weights")
    assert "nan" in line.lower() and tensors_of(model / SHARD)[-1].split(".experts")[0] in line


def test_vocabulary_mismatch(model: Path) -> None:
    """A tokenizer with more ids than the model has."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / "tiny-mixtral" / name, model)
    line = compile_fault(model)
    assert "tokenizer.json" in line and "8191" in line and "vocab_size" in line


@pytest.mark.parametrize("fault", ["layers", "tokenizer"])
def test_dry_run_refuses_what_a_compile_refuses(model: Path, fault: str) -> None:
    """A dry run of a model with weights says whether they fit; with dummy weights it need not."""
    if fault == "layers":
        edit_json(model / "config.json", lambda config: config.update(num_hidden_layers=1))
    else:
        shutil.copy(BUNDLED / "tiny-mixtral" / "tokenizer.json", model)
    line = run_here("pdscope-compile", model, "--dry-run").fault()
    assert line == compile_fault(model)
    assert ("layers.1." if fault == "layers" else "8191") in line
    dummy = run_here("pdscope-compile", model, "--dry-run", "--load-format", "dummy")
    assert dummy.status == 0, dummy.err


def test_no_such_model(tmp_path: Path) -> None:
    assert "nowhere" in compile_fault(tmp_path / "nowhere")


def test_output_directory_not_empty(model: Path) -> None:
    out = model.parent / "full"
    out.mkdir()
    (out / "letter.txt").write_text("keep me")
    line = run_here("pdscope-compile", model, "-o", out).fault()
    assert str(out) in line
    forced = run_here("pdscope-compile", model, "-o", out, "--force").fault()
    assert str(out) in forced
    assert (out / "letter.txt").read_text() == "keep me"


def test_existing_plan_needs_force(model: Path, plan: Path) -> None:
    line = run_here("pdscope-compile", model, "-o", plan).fault()
    assert "--force" in line


def test_context_beyond_the_model(model: Path) -> None:
    line = compile_fault(model, "--max-context", 1 << 20)
    assert "512" in line


@pytest.mark.parametrize("context", [1 << 31, 1 << 40, 10**30])
def test_context_beyond_the_runtime(model: Path, context: int) -> None:
    """Positions are 32-bit, whatever a configuration promises."""
    promise = {"max_position_embeddings": 10**31}
    edit_json(model / "config.json", lambda config: config.update(promise))
    line = compile_fault(model, "--max-context", context)
    assert f"--max-context {context}" in line and str(2**31 - 1) in line


@pytest.mark.parametrize("late", [False, True])
def test_folders_made_for_a_refused_plan_are_removed(model: Path, late: bool) -> None:
    """A fault leaves nothing behind: found before the output folder is made, or after."""
    if late:
        (model / "tokenizer.json").write_text("{}")
    else:
        (model / SHARD).unlink()
    out = model.parent / "new" / "er" / "out.plan"
    line = run_here("pdscope-compile", model, "-o", out).fault()
    assert ("tokenizer.json" if late else SHARD) in line
    assert [p.name for p in model.parent.iterdir()] == ["model"]
    (model.parent / "new").mkdir()  # not ours to remove
    run_here("pdscope-compile", model, "-o", out).fault()
    assert list((model.parent / "new").iterdir()) == []


def test_disk_full(model: Path) -> None:
    """A file may not grow beyond 10 kB: fails in one line, leaves no plan, and then resumes."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))

    out = model.parent / "out.plan"
    line = run_command("pdscope-compile", model, "-o", out, preexec_fn=limit).fault()
    assert "out.plan" in line and not out.exists()
    assert "ulimit -f" in line and "space" not in line
    kept = (out.parent / ".out.plan.partial").exists()
    assert kept == ("finished passes are kept" in line)
    ran = run_here("pdscope-compile", model, "-o", out, "--json")
    assert ran.status == 0, ran.err
    assert run_here("pdscope-inspect", out, "--verify").status == 0


def test_no_room_for_the_plan(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disk full: small sizes are told in MiB, and nothing is said to be kept that is not."""
    usage = shutil.disk_usage(model)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    line = compile_fault(model)
    assert "0.1 MiB free" in line and "GiB" not in line
    assert "free some space" in line and "kept" not in line
    assert not (model.parent / ".out.plan.partial").exists()


def test_output_on_a_full_disk(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disk full after the weights: what was done is kept, and the message says so."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("pdscope.compiler.driver.publish", full)
        line = compile_fault(model)
    assert "the disk is full; free some space" in line and "finished passes are kept" in line
    ran = run_here("pdscope-compile", model, "-o", model.parent / "out.plan", "--json")
    assert all(p["cached"] for p in json.loads(ran.out)["passes"])


@pytest.mark.parametrize("kept", [True, False])
def test_interrupted_compile(model: Path, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """Ctrl-C: status 130, and a line that the same command resumes, if there is what to resume."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    place = "_check_space" if kept else "check_destination"
    monkeypatch.setattr(f"pdscope.compiler.driver.{place}", interrupt)
    ran = run_here("pdscope-compile", model, "-o", model.parent / "out.plan")
    assert ran.status == 130
    line = "interrupted: finished passes are kept, the same command resumes"
    assert ran.err.split("\n") == ["", *([line] if kept else []), ""]


def run_fault(plan: Path) -> str:
    return run_command("pdscope-run", plan, "--prompt", "Hello", "--max-new-tokens", 4).fault()


@pytest.mark.parametrize("name", ["program.bin", "weights", "lib/libpdscope.so", "plan.json"])
def test_plan_cut_short(plan: Path, name: str) -> None:
    path = plan / name
    path = sorted(path.iterdir())[0] if path.is_dir() else path
    cut(path, 64)
    assert path.name in run_fault(plan)


@pytest.mark.parametrize("name", ["program.bin", "weights", "tokenizer.json"])
def test_plan_lacks_a_file(plan: Path, name: str) -> None:
    path = plan / name
    path = sorted(path.iterdir())[0] if path.is_dir() else path
    path.unlink()
    assert path.name in run_fault(plan)


def test_program_edited(plan: Path) -> None:
    flip(plan / "program.bin")
    assert "program.bin" in run_fault(plan)


def test_weights_edited(plan: Path) -> None:
    """Sizes are checked at each load; contents when asked for."""
    weights = sorted((plan / "weights").iterdir())[0]
    flip(weights)
    ran = run_command("pdscope-inspect", plan, "--verify")
    assert ran.status == 1 and "Traceback" not in ran.err
    assert weights.name in ran.out + ran.err


def test_program_text_edited(plan: Path) -> None:
    text = plan / "programs" / "layer000.decode.plan"
    text.write_text(text.read_text().replace("top_k = 2", "top_k = 3"))
    ran = run_command("pdscope-inspect", plan, "--verify")
    assert ran.status == 1 and "layer000.decode.plan" in ran.out + ran.err


def test_other_format_version(plan: Path) -> None:
    edit_json(plan / "plan.json", lambda data: data.update(format_version=99))
    line = run_fault(plan)
    assert "99" in line and "version" in line


def test_other_cpu_features(plan: Path) -> None:
    edit_json(plan / "plan.json", lambda data: data["target"]["features"].append("avx1024"))
    assert "avx1024" in run_fault(plan)


def test_not_a_plan(tmp_path: Path) -> None:
    assert "plan.json" in run_fault(tmp_path)


def run_on(plan: Path, *arguments: Any, **more: Any) -> Ran:
    return run_command("pdscope-run", plan, *arguments, **more)


def test_prompt_longer_than_the_context(plan: Path) -> None:
    line = run_on(plan, "--prompt", "word " * 300).fault()
    assert "128" in line and "context" in line


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_empty_prompt(plan: Path, chat: list[str]) -> None:
    assert "empty" in run_on(plan, *chat, "--prompt", "").fault()
    assert "empty" in run_on(plan, *chat, stdin=b"").fault()


def test_invalid_utf8(plan: Path) -> None:
    assert "UTF-8" in run_on(plan, stdin=b"caf\xe9\n").fault()


def test_unknown_isa(plan: Path) -> None:
    line = run_on(plan, "--prompt", "Hello", env=os.environ | {"PDSCOPE_ISA": "mmx"}).fault()
    assert "mmx" in line and "scalar" in line


def test_bench_beyond_the_context(plan: Path) -> None:
    line = run_command("pdscope-bench", plan, "-p", "64,500", "-n", "8", "-r", "1").fault()
    assert "128" in line


@pytest.mark.parametrize("name", ["compile", "run", "inspect", "bench"])
def test_wrong_usage_is_status_2(name: str) -> None:
    assert run_command(f"pdscope-{name}", "--no-such-option").status == 2
