"""Plan.open and Engine on damaged, edited and foreign plans; plan.json against its schema.

Holds the issue's lines "a plan cut short, edited, from another format version or for other CPU
features" each with a clear error, and "plan.json has a JSON schema in the repo".
"""

import copy
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support import fake_plan
from support.damage import edit_json, edit_plan
from support.plans import PlanStore

import pdscope
from pdscope.errors import PlanError, TargetError
from pdscope.plan import Plan, cpu_features
from pdscope.schema import check_full, check_light, schema


@pytest.fixture
def plan(plans: PlanStore, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    copied = tmp_path / "plan"
    shutil.copytree(plans.once("fake", fake_plan.make_fake_plan), copied)
    return copied


def test_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


def test_sound_plan_opens(plan: Path) -> None:
    opened = Plan.open(plan, verify=True)
    assert opened.vocab == fake_plan.VOCAB and opened.eos == (2,)
    assert opened.bytes_under("weights") == 1000
    assert not opened.unlisted_files()
    with pdscope.load(plan, verify=True) as engine:
        engine.prefill([1])


def test_directories_without_a_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such directory"):
        Plan.open(tmp_path / "none")
    with pytest.raises(PlanError, match="no plan.json in it"):
        Plan.open(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(PlanError, match="not a directory"):
        Plan.open(tmp_path / "file")


@pytest.mark.parametrize("cut", [0, 1, 100, -2])
def test_plan_json_cut_short(plan: Path, cut: int) -> None:
    file = plan / "plan.json"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(PlanError, match="plan.json: not valid JSON.*recompile"):
        Plan.open(plan)


def test_plan_json_not_utf8(plan: Path) -> None:
    (plan / "plan.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(PlanError, match="plan.json: not valid JSON"):
        Plan.open(plan)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_other_format_version(plan: Path, version: object) -> None:
    edit_plan(plan, lambda d: d.update(format_version=version))
    with pytest.raises(PlanError, match=r"format.version") as caught:
        Plan.open(plan)
    assert "recompile" in str(caught.value)
    if version is not None:
        assert f"version {version!r}" in str(caught.value)


def test_other_instruction_set(plan: Path) -> None:
    """A plain load refuses it, and so does every command that reads a plan."""
    edit_plan(plan, lambda d: d["programs"].update(isa_hash="12345678"))
    for opens in (Plan.open, pdscope.load):
        with pytest.raises(PlanError, match="isa_hash is 12345678, but the instruction set.*recom"):
            opens(plan)


def _broken() -> list[tuple[str, Callable[[dict[str, Any]], object]]]:
    return [
        ("key 'dtype' is missing", lambda d: d.pop("dtype")),
        ("model: key 'experts' is missing", lambda d: d["model"].pop("experts")),
        ("unknown key 'extra'", lambda d: d.update(extra=1)),
        ("model: unknown key 'extra'", lambda d: d["model"].update(extra=1)),
        ("dtype: expected one of", lambda d: d.update(dtype="int2")),
        ("max_rows: expected at least 1, found 0", lambda d: d.update(max_rows=0)),
        ("max_rows: expected integer, found true", lambda d: d.update(max_rows=True)),
        ("max_rows: expected integer, found 1.5", lambda d: d.update(max_rows=1.5)),
        ('plan_hash: "zz" does not match', lambda d: d.update(plan_hash="zz")),
        (r"eos\[1\]: expected integer", lambda d: d["generation"].update(eos=[1, "2"])),
        ("target: isa: must not be empty", lambda d: d["target"].update(isa=[])),
        ("files: must not be empty", lambda d: d.update(files={})),
        ('files: key: "/etc/passwd"', lambda d: d["files"].update({"/etc/passwd": {}})),
        ("sha256", lambda d: d["files"]["memory.json"].update(sha256="0")),
        ("model: expected object", lambda d: d.update(model=[])),
    ]


@pytest.mark.parametrize(("message", "change"), _broken())
def test_edited_plan_json(
    plan: Path, message: str, change: Callable[[dict[str, Any]], object]
) -> None:
    """The light check and jsonschema refuse the same edits."""
    edit_plan(plan, change)
    with pytest.raises(PlanError, match=message):
        Plan.open(plan)
    with pytest.raises(PlanError, match="plan.json: "):
        check_full(json.loads((plan / "plan.json").read_text()))


def test_light_check_agrees_with_jsonschema(plan: Path) -> None:
    """Every key removed, and every value replaced by one of another type."""
    good = json.loads((plan / "plan.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema())
    checked = 0

    def visit(path: tuple[str, ...], node: Any) -> None:
        nonlocal checked
        if not isinstance(node, dict):
            return
        for key, value in node.items():
            for replacement in (None, -1, "", [], {}, "x", 3, True, [None], KeyError):
                data = copy.deepcopy(good)
                at = data
                for step in path:
                    at = at[step]
                if replacement is KeyError:
                    del at[key]
                else:
                    at[key] = replacement
                try:
                    check_light(data)
                    light = True
                except PlanError:
                    light = False
                assert light == validator.is_valid(data), (path, key, replacement)
                checked += 1
            visit((*path, key), value)

    visit((), good)
    assert checked > 400


def test_path_that_leaves_the_plan(plan: Path) -> None:
    edit_plan(plan, lambda d: d["files"].update({"../x": {"bytes": 1, "sha256": "0" * 64}}))
    with pytest.raises(PlanError, match="leaves the plan directory"):
        Plan.open(plan)


def test_missing_and_short_files(plan: Path) -> None:
    weights = plan / "weights" / "embed.bin"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(PlanError, match=r"weights/embed.bin: 999 bytes, plan.json says 1000"):
        pdscope.load(plan)
    weights.unlink()
    with pytest.raises(PlanError, match=r"weights/embed.bin: missing"):
        pdscope.load(plan)


def test_verify_finds_an_edit_of_the_same_size(plan: Path) -> None:
    weights = plan / "weights" / "embed.bin"
    weights.write_bytes(b"\x02" + weights.read_bytes()[1:])
    Plan.open(plan)
    with pytest.raises(PlanError, match=r"weights/embed.bin: SHA-256"):
        pdscope.load(plan, verify=True)
    with pytest.raises(PlanError, match=r"weights/embed.bin: SHA-256"):
        pdscope.load(Plan.open(plan), verify=True)


def test_other_cpu_features(plan: Path) -> None:
    edit_plan(plan, lambda d: d["target"].update(features=["avx2048", "warp9"]))
    Plan.open(plan)  # it may be read anywhere
    with pytest.raises(
        TargetError, match="CPUs with avx2048, warp9, which this CPU lacks.*--target"
    ):
        pdscope.load(plan)


def test_other_architecture(plan: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        target = data["target"]
        target["arch"] = "aarch64" if target["arch"] == "x86_64" else "x86_64"

    edit_plan(plan, change)
    with pytest.raises(TargetError, match="compiled for .* but this machine is"):
        pdscope.load(plan)


def test_cpu_features_of_cpuinfo(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\n\nflags: other\n")
    assert cpu_features(file) == {"fpu", "avx2", "avx512bf16"}
    file.write_text("Features\t: fp asimd bf16\n")
    assert cpu_features(file) == {"fp", "asimd", "bf16", "neon"}
    assert cpu_features(tmp_path / "none") == frozenset()


@pytest.mark.parametrize("field", ["max_context", "max_rows", "max_logits", "kv_block"])
def test_limits_that_the_library_does_not_have(plan: Path, field: str) -> None:
    edit_plan(plan, lambda d: d.update({field: 7}))
    with pytest.raises(PlanError, match=f"{field} is 7, but lib/libpdscope.so was built for"):
        pdscope.load(plan)


def test_library_of_another_compile(plan: Path) -> None:
    fake_plan.build_library(plan / "lib" / "libpdscope.so", f'-DPLAN_HASH="{"ef" * 32}"')
    fake_plan.write_manifest(plan)
    with pytest.raises(PlanError, match="plan_hash is .* mixed from two compiles"):
        pdscope.load(plan)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["generation"].update(eos=[17]),
        lambda d: d.update(dtype="bf16"),
        lambda d: d["model"].update(parameters=1),
        lambda d: d["files"]["weights/embed.bin"].update(sha256="0" * 64),
    ],
)
def test_edited_fields_are_refused_at_load(plan: Path, change: Callable[[Any], object]) -> None:
    """Issue "Compile and run", bad input: an edited plan."""
    edit_json(plan / "plan.json", change)
    with pytest.raises(PlanError, match=r"plan\.json: plan_hash: .*was edited, or made by another"):
        pdscope.load(plan)


def test_library_that_is_none(plan: Path) -> None:
    (plan / "lib" / "libpdscope.so").write_bytes(b"not a library")
    fake_plan.write_manifest(plan)
    with pytest.raises(PlanError, match=r"libpdscope.so: cannot be loaded.*recompile"):
        pdscope.load(plan)


def test_library_of_another_interface(plan: Path) -> None:
    fake_plan.build_library(plan / "lib" / "libpdscope.so", "-DFAKE_ABI=99")
    fake_plan.write_manifest(plan)
    with pytest.raises(PlanError, match="interface version 99"):
        pdscope.load(plan)


def test_recompile_to_the_same_directory_is_seen(plan: Path) -> None:
    """The dynamic loader keeps libraries by path; a new compile must not get the old one."""
    first = pdscope.load(plan)
    kept = first.prefill([1]).copy()
    old = Plan.open(plan).plan_hash
    library = plan / "lib" / "libpdscope.so"
    library.unlink()
    fake_plan.build_library(library)
    fake_plan.write_manifest(plan, generation={"bos": 1, "eos": [3], "pad": 0})
    with pdscope.load(plan) as second:
        assert second.info.plan_hash == Plan.open(plan).plan_hash != old
        assert first.info.plan_hash == old
        first.reset()
        assert (first.prefill([1]) == kept).all()
    first.close()


def test_moved_plan_loads(plan: Path, tmp_path: Path) -> None:
    """Holds: relocatable."""
    target = tmp_path / "a b" / "pl\u00e4n"
    target.parent.mkdir()
    plan.rename(target)
    with pdscope.load(target) as engine:
        assert engine.generate("Hello", max_new_tokens=1).text == " wor"


def test_light_check_is_quick(plan: Path) -> None:
    """A big model has hundreds of files."""
    data = json.loads((plan / "plan.json").read_text())
    data["files"] |= {
        f"programs/layer{i:03d}.decode.plan": data["files"]["graph.txt"] for i in range(999)
    }
    begin = time.process_time()
    check_light(data)
    assert time.process_time() - begin < 0.1


def replace(plan: Path, aside: Path) -> None:
    """What --force does: another plan comes to the same path."""
    shutil.copytree(plan, aside)
    plan.rename(aside.with_name("old"))
    aside.rename(plan)


def test_engine_keeps_its_tokenizer_after_a_replacement(plan: Path, tmp_path: Path) -> None:
    with pdscope.load(plan) as engine:
        replace(plan, tmp_path / "aside")
        (plan / "tokenizer.json").write_text("{}")
        (plan / "tokenizer_config.json").write_text("{}")
        assert engine.tokenizer.encode_chat([{"role": "user", "content": "Hello"}]).size > 0


def test_plan_replaced_while_loading(plan: Path, tmp_path: Path) -> None:
    opened = Plan.open(plan)
    replace(plan, tmp_path / "aside")
    with pytest.raises(PlanError, match="replaced while it was being loaded: load it again"):
        pdscope.load(opened)
    pdscope.load(plan).close()


@pytest.mark.parametrize(("name", "value"), [("eos", [2**31]), ("eos", [64]), ("bos", 2**31)])
def test_edited_token_ids(plan: Path, name: str, value: object) -> None:
    edit_plan(plan, lambda d: d["generation"].update({name: value}))
    with pytest.raises(PlanError, match=f"generation: {name} is .*outside the vocabulary"):
        Plan.open(plan)
