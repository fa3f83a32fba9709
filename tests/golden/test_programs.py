"""One accepted and one refused golden file per verifier rule (issue: "Verifier: one accepted and
one refused golden file per rule"). Both verifiers, Python's and the C runtime's, must say what
the file says.

`programs/vNN_accepted.plan` and `vNN_refused.plan` are programs as they are printed;
`vNN_refused.txt` is the message. They change only with --update-golden.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.c_programs import CPrograms, verdict
from support.programs import (
    AHEAD,
    DENSE,
    EPILOGUE,
    GPU,
    GPU_PREFILL,
    GPU_SINGLE,
    GPU_TWO,
    MOE,
    PROLOGUE,
    SHARED,
    renumber,
)

from pdscope.errors import PlanError
from pdscope.ir.encode import encode
from pdscope.ir.program import Program
from pdscope.ir.text import parse_programs, print_programs
from pdscope.ir.verify import verify, verify_programs

FOLDER = Path(__file__).parent / "programs"


def edit(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the program"
        text = text.replace(old, new)
    return text


def without(text: str, label: int) -> str:
    """Drops instruction `label` and closes the gap; nothing may wait for it."""
    lines = [x for x in text.splitlines(keepends=True) if not re.match(rf"\s*@{label}\b", x)]
    return re.sub(r"@(\d+)", lambda m: f"@{int(m[1]) - (int(m[1]) > label)}", "".join(lines))


_READ_A = "@7  = compute expert ?l[*] from %a       q=gpu0        wait(@6)"
_LOAD_B = (
    "@8  = stream load ?l[*] -> %b {device = 1, format = int4/g64/bf16}  q=h2d.demand  wait(@4)"
)
_SEQUENCE = "\n".join([PROLOGUE, DENSE, MOE, SHARED, EPILOGUE])

# ?p is for the next layer with experts, wherever that is.
_ACROSS = "\n".join(
    [PROLOGUE, DENSE, renumber(AHEAD, 1), renumber(DENSE, 2), renumber(SHARED, 3), EPILOGUE]
)

# rule: (accepted, refused). Each refused text breaks its rule and no earlier one.
CASES: dict[int, tuple[str, str]] = {
    1: (GPU_SINGLE, edit(MOE, ("expert ?c[*]  q=cpu ", "expert ?c[*]  q=gpu0"))),
    2: (EPILOGUE, edit(MOE, ("q=cpu   wait(@1)", "q=cpu   wait(@3)"))),
    3: (
        GPU_PREFILL,
        edit(
            GPU,
            (
                "@11 = compute expert ?l[*] from %ring                   q=gpu0        wait(@5)",
                "@11 = compute expert ?l[*] from %ring q=gpu0 wait(@4)",
            ),
        ),
    ),
    4: (
        GPU_SINGLE,
        edit(GPU_SINGLE, ("in   @hid, %ring.tickets", "in   @hid")),
    ),
    5: (GPU, edit(GPU, ("unload ?u[*] from %ring", "unload ?u[*] from %hot "))),
    6: (edit(GPU_TWO, ("budget = 4", "budget = 5")), edit(GPU, ("budget = 8", "budget = 7"))),
    7: (
        edit(MOE, ("?c[2]", "?c[8]")),
        edit(MOE, ("expert ?c[*]", "expert ?c[0]")),
    ),
    8: (
        edit(MOE, ("?c[2]", "?c[5]")),
        edit(MOE, ("?c[2]", "?c[1]")),
    ),
    9: (SHARED, edit(SHARED, ("wait(@5, @6)", "wait(@4, @5)"))),
    10: (
        without(edit(GPU, (" ?p[4]", "")), 7),
        edit(SHARED, ("wait(@5, @6)", "wait(@6)")),
    ),
    11: (
        edit(GPU, ("q=host        wait(@10, @11)", "q=host        wait(@12)")),
        edit(GPU, ("q=host        wait(@10, @11)", "q=host        wait(@11)")),
    ),
    12: (_ACROSS, _SEQUENCE.replace(SHARED, renumber(SHARED, 3))),
    13: (
        edit(SHARED, ("shared_expert  q=cpu   wait(@2)", "shared_expert  q=cpu   wait(@3)")),
        edit(SHARED, ("shared_expert  q=cpu   wait(@2)", "shared_expert  q=cpu   wait(@1)")),
    ),
    14: (DENSE, edit(GPU, ("gate, predict", "gate"))),
    15: (PROLOGUE, without(edit(DENSE, ("wait(@1)", "wait(@0)")), 1)),
    16: (
        GPU_TWO,
        edit(
            GPU_TWO,
            (_READ_A, _LOAD_B.replace("@8 ", "@7 ")),
            (_LOAD_B, _READ_A.replace("@7 ", "@8 ").replace("wait(@6)", "wait(@6, @7)")),
            ("q=gpu1  wait(@8)", "q=gpu1  wait(@7)"),
            ("wait(@5, @7, @9,", "wait(@5, @8, @9,"),
            ("wait(@7, @10)", "wait(@8, @10)"),
        ),
    ),
}


def outcome(check: Callable[[], None]) -> str:
    try:
        check()
    except PlanError as error:
        return str(error)
    return ""


def verify_case(rule: int, programs: list[Program]) -> str:
    if rule == 12:
        return outcome(lambda: verify_programs(programs))
    return outcome(lambda: verify(programs[0]))


def compare(path: Path, text: str, update: bool) -> None:
    if update:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"{path.name} is missing: run pytest with --update-golden"
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("rule", CASES)
@pytest.mark.parametrize("accepted", [True, False], ids=["accepted", "refused"])
def test_golden(rule: int, accepted: bool, pytestconfig: pytest.Config) -> None:
    """Issue: "Verifier: one accepted and one refused golden file per rule"."""
    update = bool(pytestconfig.getoption("--update-golden"))
    programs = parse_programs(CASES[rule][0 if accepted else 1], source="case")
    stem = f"v{rule:02d}_{'accepted' if accepted else 'refused'}"
    compare(FOLDER / f"{stem}.plan", print_programs(programs), update)
    from_file = parse_programs((FOLDER / f"{stem}.plan").read_text(encoding="utf-8"), stem)
    assert from_file == programs
    message = verify_case(rule, from_file)
    c = CPrograms(encode(programs))
    assert not c.error
    c_message = c.verify_all() if rule == 12 else c.verify_one(0)
    assert verdict(c_message) == verdict(message)
    if accepted:
        assert message == ""
    else:
        assert verdict(message).endswith(f" V{rule}")
        compare(FOLDER / f"{stem}.txt", message + "\n", update)


def test_every_rule_has_a_case() -> None:
    """The rules of the verifier's docstring are those that have golden files."""
    import pdscope.ir.verify

    rules = re.findall(r"^V(\d+) ", pdscope.ir.verify.__doc__ or "", re.M)
    assert [int(r) for r in rules] == list(CASES)
    assert len(list(FOLDER.iterdir())) == 3 * len(CASES)
