"""check_plan against an editor who puts every hash right: what one file of a plan says, the others
must say too.

Holds of the issue: "`--verify` re-checks hashes and verifier rules" and "a plan cut short, edited".
"""

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.assets import BUNDLED
from support.damage import edit_plan
from support.plans import PlanStore, small_gpu_plan
from support.runs import KINDS, kind_plan

from pdscope.plan import Plan
from pdscope.plan_check import check_plan
from pdscope.plan_hash import plan_hash

# Labels of where the plan came from: nothing else in the directory repeats them.
ON_TRUST = {"model.source_name", "model.config_sha256", "target.name"}
MODEL = BUNDLED / "tiny-mixtral"


@pytest.fixture(scope="module")
def plan(plans: PlanStore) -> Plan:
    return Plan.open(plans.compile(MODEL))


@pytest.fixture(scope="module")
def copied(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tests that edit files and put them back."""
    target = tmp_path_factory.mktemp("edited") / "plan"
    shutil.copytree(plan.path, target)
    return target


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values below objects, and of the first object of each list of them."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    elif isinstance(node, list) and node and isinstance(node[0], dict):
        yield from leaves(node[0], (*path, 0))
    else:
        yield path


def other(value: Any) -> Any:
    """Another value of the same type that the schema takes."""
    choices = {"x86_64": "aarch64", "aarch64": "x86_64", "safetensors": "dummy"}
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, list):
        return value[:-1] if len(value) > 1 else [*value, *value]
    if value is None:
        return 3
    if len(value) == 64:
        return value[::-1] if value != value[::-1] else "0" * 64
    return choices.get(value, value + ".9")


def edited(data: Any, path: tuple[Any, ...]) -> Any:
    """A copy with the value at `path` changed."""
    result = copy.deepcopy(data)
    at = result
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = other(at[path[-1]])
    return result


def reseal(plan: Path, name: str, data: bytes) -> list[str]:
    """Problems after a file was replaced, its size and hash in plan.json put right."""
    saved = {file: (plan / file).read_bytes() for file in (name, "plan.json")}
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (plan / name).write_bytes(data)
    edit_plan(plan, lambda d: d["files"].update({name: entry}))
    try:
        return check_plan(Plan.open(plan))
    finally:
        for file, content in saved.items():
            (plan / file).write_bytes(content)


@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(lambda p, k=kind: kind_plan(p, k, "fp32", 192), id=kind) for kind in KINDS),
        *(
            pytest.param(lambda p, d=dtype: p.compile(MODEL, dtype=d), id=dtype)
            for dtype in ("bf16", "int8", "int4")
        ),
        pytest.param(small_gpu_plan, id="gpu"),
    ],
)
def test_sound_plans(plans: PlanStore, make: Callable[[PlanStore], Path]) -> None:
    """Every attention kind and dtype, and one for a GPU."""
    assert check_plan(Plan.open(make(plans))) == []


def test_every_field_of_plan_json(plan: Plan) -> None:
    """Changed alone, each is found, and the message names it."""
    for path in leaves(plan.data):
        name = ".".join(map(str, path))
        if path[0] in ("files", "format_version") or name in ON_TRUST:
            continue
        if name == "programs.isa_hash":  # Plan.open refuses it
            continue
        changed = edited(plan.data, path)
        problems = check_plan(Plan(plan.path, changed))
        if name in ("plan_hash", "model.weights_sha256"):  # Plan.open refuses them
            assert plan_hash(changed) != changed["plan_hash"]
            continue
        named = ": ".join(map(str, path))
        assert any(f"plan.json: {named}" in p for p in problems), (name, problems)


@pytest.mark.parametrize("dtype", ["fp32", "int8", "int4"])
def test_dtype_against_the_weights_records(plan: Plan, dtype: str) -> None:
    problems = check_plan(Plan(plan.path, plan.data | {"dtype": dtype}))
    assert problems == [
        f"plan.json: dtype: {dtype} is not bf16, as src/plan.c gives: the plan was edited, or made "
        "by another PDScope; recompile the model"
    ]


def test_sizes_and_hashes_of_files(plan: Plan) -> None:
    for name in ("weights/layer000.bin", "program.bin"):
        changed = edited(plan.data, ("files", name, "sha256"))
        assert any(name in p for p in check_plan(Plan(plan.path, changed)))


def test_every_number_of_memory_json(copied: Path) -> None:
    """With the file's hash put right: the table is computed again."""
    table = json.loads((copied / "memory.json").read_text(encoding="utf-8"))
    for path in leaves(table):
        text = json.dumps(edited(table, path)).encode()
        problems = reseal(copied, "memory.json", text)
        # A list's entries are named after the file or the buffer.
        word = "" if path[-1] in ("file", "name") else str(path[-1])
        assert any(p.startswith("memory.json: ") and word in p for p in problems), (path, problems)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".top_k = 2", ".top_k = 3"),
        (".moe = 1", ".moe = 0"),
        (".scale = ", ".scale = 2 * "),
        ("u, { PDS_BF16, ", "u, { PDS_I8, "),
        ("[PDS_BUF_HID] = 0u", "[PDS_BUF_HID] = 64u"),
        (".scratch_bytes = ", ".scratch_bytes = 1"),
        (".kv_block_bytes = ", ".kv_block_bytes = 1"),
        ('.required_features = "', '.required_features = "sse9 '),
        (".act_dtype = PDS_BF16", ".act_dtype = PDS_F32"),
        (".format_version = 1", ".format_version = 2"),
    ],
)
def test_constants_of_plan_c(copied: Path, old: str, new: str) -> None:
    text = (copied / "src/plan.c").read_text(encoding="utf-8")
    assert old in text
    problems = reseal(copied, "src/plan.c", text.replace(old, new, 1).encode())
    assert any("src/plan.c" in p for p in problems)


@pytest.mark.parametrize(
    ("old", "new"), [("top_k = 2", "top_k = 1"), ("eps = ", "eps = 1"), ("inter = ", "inter = 1")]
)
def test_graph(copied: Path, old: str, new: str) -> None:
    text = (copied / "graph.txt").read_text(encoding="utf-8")
    assert old in text
    assert reseal(copied, "graph.txt", text.replace(old, new).encode())


@pytest.mark.parametrize("name", ["bos", "eos", "pad"])
def test_token_ids_of_generation_config(copied: Path, name: str) -> None:
    config = json.loads((copied / "generation_config.json").read_text(encoding="utf-8"))
    config[f"{name}_token_id"] = [7, 8] if name == "eos" else 7
    problems = reseal(copied, "generation_config.json", json.dumps(config).encode())
    assert len(problems) == 1 and f"generation: {name}: " in problems[0]


def test_a_file_put_beside_the_tokenizer(copied: Path) -> None:
    file = copied / "chat_template.jinja"
    assert not file.exists()
    file.write_text("x", encoding="utf-8")
    try:
        problems = check_plan(Plan.open(copied))
    finally:
        file.unlink()
    assert len(problems) == 1 and "chat_template.jinja: is not listed" in problems[0]
