"""Programs as data: text form, binary form, and the generated files of the instruction table."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.c_programs import OK, CPrograms
from support.programs import BY_NAME, EPILOGUE, GPU, MOE, PROLOGUE, cpu_plan, gpu_plan, one

from pdscope.errors import PlanError
from pdscope.ir import isa
from pdscope.ir.encode import decode, encode, program_order
from pdscope.ir.isa import Kind, Opcode, Phase, Queue
from pdscope.ir.program import Instr, Out, Program, WeightFormat
from pdscope.ir.text import parse_programs, print_program, print_programs
from pdscope.ir.verify import verify, verify_programs, verify_sequence

ROOT = Path(__file__).resolve().parents[2]

# The listing of the design.
DESIGN = """\
program @l7.decode {layer = 7, phase = decode, experts = 64, top_k = 6, rows = 1}
  in   @hid, %ring.tickets
  slot %hot  : resident {e1, e4}
  slot %ring : cache[6]
  @0  = compute attention                         q=gpu0  wait(@hid)
  @1  = compute gate, predict                     q=gpu0  wait(@0)
  @2  = recompile -> ?r[6] ?l[6] ?c[6] ?n[4] ?p[4] ?u[6]  q=host  wait(@1)
  @3  = stream load ?l[*] -> %ring                q=h2d.demand  wait(@2)
  @4  = stream prefetch ?n[*] -> %ring            q=h2d.spec    wait(@2)
  @5  = prefetch ?p[*] -> llc                     q=aux   wait(@2)
  @6  = compute expert ?c[*]                      q=cpu   wait(@2)
  @7  = compute expert ?r[*] from %hot, %ring     q=gpu0  wait(@2)  // one batched submission
  @8  = compute expert ?l[*] from %ring           q=gpu0  wait(@3)  // as tickets become ready
  @9  = compute combine                           q=gpu0  wait(@6, @7, @8)
  @10 = unload ?u[*] from %ring                   q=host  wait(@7, @8)
  out  @hid = @9, %ring.tickets
"""


@pytest.mark.parametrize("text", [*BY_NAME.values(), DESIGN], ids=[*BY_NAME, "design"])
def test_forms(text: str) -> None:
    """Issue: "`parse(print(p)) == p` for every program"; and decode(encode(p)) == p."""
    p = one(text)
    assert parse_programs(print_program(p)) == [p]
    assert print_program(one(print_program(p))) == print_program(p)
    assert decode(encode([p])) == [p]
    assert CPrograms(encode([p])).status == OK
    lines = print_program(p).splitlines()
    for n in range(len(p.instrs)):
        assert lines[p.line_of(n) - 1].split()[0] == f"@{n}"


def test_whole_plans() -> None:
    """A plan's programs in one text and in one file; the C runtime finds the phase of a row
    count."""
    for programs in (cpu_plan(), gpu_plan()):
        verify_programs(programs)
        assert parse_programs(print_programs(programs)) == programs
        data = encode(programs)
        assert decode(data) == programs
        assert data == encode(programs)
    c = CPrograms(encode(cpu_plan(max_rows=40)))
    assert [c.phase(n) for n in (0, 1, 2, 16, 17, 40, 41)] == [-1, 0, 1, 1, 2, 2, -1]
    assert sorted(cpu_plan(), key=program_order) == cpu_plan()


def test_attributes_are_printed_only_when_set() -> None:
    text = print_program(one(MOE))
    for word in ("streams", "budget", "shared", "kind", "format", "adapter", "device", "tier"):
        assert word not in text
    two = print_program(one(BY_NAME["gpu_two"]))
    for part in ("streams = 4", "{tier = disk}", "{device = 1, format = int4/g64/bf16}", "tokens"):
        assert part in two


MALFORMED = [
    ("  @0 = sync  q=host\n", "1: expected `program"),
    (MOE.replace("program @l1.decode", "program @l2.decode"), "1: the name is @l2.decode"),
    (MOE.replace("phase = decode, ", ""), "1: attribute phase is missing"),
    (MOE.replace("top_k = 2", "topk = 2"), "1: attribute is 'topk'"),
    (MOE.replace("top_k = 2", "top_k = two"), "1: top_k is 'two'"),
    (MOE.replace("@3 = ", "@4 = "), "6: V2: event @4 is out of order"),
    (MOE.replace("@3 = ", "@2 = "), "6: V2: event @2 is signalled twice"),
    (MOE.replace("compute gate ", "compute grate"), "6: instruction is 'grate'"),
    (MOE.replace("compute gate ", "gate         "), "6: write `compute gate`"),
    (MOE.replace("q=host", "q=gpu9"), "7: queue is 'gpu9'"),
    (MOE.replace("?c[2]", "?x[2]"), "7: '?x[2]'"),
    (MOE.replace("?c[2]", "?c[*]"), "7: '?c[*]'"),
    (MOE.replace("wait(@4)", "wait(4)"), "8: '4': expected an event"),
    (MOE.replace("expert ?c[*]", "expert  c[*]"), "8: expected a hole"),
    (MOE.replace("norm attn", "norm     "), "3: norm's place is ''"),
    (MOE.replace("  in   @hid\n", "") + "  in  @hid\n", "10: `in` is out of place"),
    (MOE.replace("out  @hid = @6", "out  @hid"), "10: '@hid'"),
    (GPU.replace("cache[6]", "cache(6)"), "4: expected `slot"),
    (GPU.replace("{e1, e4}", "{1, 4}"), "3: '1': expected an expert"),
    (GPU.replace("from %ring    ", "from ring     ", 1), "16: 'ring': expected a slot"),
    (GPU.replace("-> llc", "=> llc"), "12: '=> llc'"),
]


@pytest.mark.parametrize("text, message", MALFORMED, ids=[m for _, m in MALFORMED])
def test_malformed_text(text: str, message: str) -> None:
    """Bad input: an edited plan. The error names the file, the line and what was expected."""
    with pytest.raises(PlanError) as error:
        parse_programs(text, "x.plan")
    assert str(error.value).startswith(f"x.plan:{message}")


def test_what_records_cannot_hold() -> None:
    p = one(MOE)
    for bad in (
        replace(p, rows_max=1 << 40),
        replace(p, outs=(Out("kv", 0),)),
        replace(p, instrs=(replace(p.instrs[0], waits=tuple(range(13))), *p.instrs[1:])),
        replace(p, instrs=(replace(p.instrs[0], waits=("kv",)), *p.instrs[1:])),
        replace(p, instrs=(replace(p.instrs[0], stream=True), *p.instrs[1:])),
        replace(p, instrs=(replace(p.instrs[0], fmt=WeightFormat(isa.WeightDtype.INT8, 48)),)),
    ):
        with pytest.raises(PlanError, match=r"^l1\.decode: "):
            encode([bad])
    with pytest.raises(PlanError, match="ordered"):
        encode([one(EPILOGUE), one(PROLOGUE)])


def test_another_format_version() -> None:
    """Bad input: a plan of another format version, or of another instruction table, is named as
    that."""
    data = bytearray(encode(cpu_plan(1)))
    data[8] = 9
    with pytest.raises(PlanError, match=r"format version is 9, this PDScope reads 1"):
        decode(bytes(data))
    assert "format version is 9, this library reads 1" in CPrograms(bytes(data)).error
    data = bytearray(encode(cpu_plan(1)))
    data[12] ^= 1
    with pytest.raises(PlanError, match="another instruction table"):
        decode(bytes(data))
    assert "another instruction table" in CPrograms(bytes(data)).error


def test_generated_files_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    """Issue: "`docs/` has [...] the instruction set (generated)"; the C header comes from the
    same table."""
    assert isa.main(["--check"]) == 0, capsys.readouterr().out
    assert isa.main([]) == 2


def big_plan(layers: int = 61) -> list[Program]:
    from support.programs import SHARED, in_phase, renumber

    texts = []
    for phase, rows in (("decode", "1"), ("batch", "2-16"), ("prefill", "17-512")):
        capacity = 2 if phase == "decode" else 8
        middle = [renumber(SHARED, k) for k in range(layers)]
        texts += [in_phase(t, phase, rows, capacity) for t in [PROLOGUE, *middle, EPILOGUE]]
    return [one(t) for t in texts]


def test_verifying_is_quick() -> None:
    """Three phases of 61 layers: well under 0.5 s here, under 10 ms in C (both with slack for a
    loaded machine)."""
    programs = big_plan()
    begin = time.process_time()
    verify_programs(programs)
    assert time.process_time() - begin < 0.5
    data = encode(programs)
    assert len(data) < 250_000
    best = 1.0
    for _ in range(5):
        begin = time.process_time()
        c = CPrograms(data)
        assert c.verify_all() == ""
        best = min(best, time.process_time() - begin)
    assert best < 0.03


def test_import_rules() -> None:
    """ir/ is free of torch, numpy, jinja2: "Running a plan imports neither torch nor
    transformers"."""
    import subprocess

    code = (
        "import sys, pdscope.ir.verify, pdscope.ir.text, pdscope.ir.encode, pdscope.ir.interpret;"
        "sys.exit(bool({'torch', 'numpy', 'jinja2', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_limits_are_refused() -> None:
    """More instructions than the C verifier has room for; a phase without programs; a lone
    program."""
    p = one(PROLOGUE)
    many = replace(p, instrs=tuple(Instr(Opcode.EMBED, Queue.CPU) for _ in range(257)))
    with pytest.raises(PlanError, match=r"prologue\.decode:1: V1: expected 1 to 256 instructions"):
        verify(many)
    with pytest.raises(PlanError, match="V12: there is no program"):
        verify_programs([])
    with pytest.raises(PlanError, match="V12: a phase needs"):
        verify_sequence([p])
    assert (p.kind, p.phase) == (Kind.PROLOGUE, Phase.DECODE)
