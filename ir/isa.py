"""The instruction table: the single source for Python, the C runtime and the documentation.

`python -m pdscope.ir.isa --write` renders runtime_c/src/pds_isa.h and docs/instruction-set.md in
a checkout; `--check` exits with 1 if either differs. May import the standard library, and
pdscope.ir.verify when the documentation is rendered.
"""

import sys
import zlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

FORMAT_VERSION = 1  # of program.bin
MAGIC = b"PDSPROG\0"
RECORD_BYTES = 64  # header, program, instruction, slot and expert-list records alike

MAX_INSTRS = 256  # per program: the verifier keeps one bit per pair on the C stack
MAX_WAITS = 12
MAX_SLOT_OPERANDS = 4
MAX_SLOTS = 32  # declared by one program: tickets are a 32-bit mask
MAX_EVENTS = 4  # imported, and exported, by one program
MAX_EXPERTS = 1024
MAX_TOP_K = 64
MAX_ROWS = 1 << 20
MAX_DEVICES = 8
MAX_STREAMS = 16
NAME_BYTES = 16  # of a slot name, the final NUL included
WAIT_IMPORT = 0x8000  # flag of an encoded wait: the low bits index the imported events
INDEX_ALL = 0xFFFF  # encoded hole index of ?x[*]


class Kind(IntEnum):
    """What a program is of."""

    PROLOGUE = 0
    DENSE = 1
    MOE = 2
    EPILOGUE = 3


class Phase(IntEnum):
    """Row bucket of a step: 1 row, 2 to 16, more."""

    DECODE = 0
    BATCH = 1
    PREFILL = 2


PHASE_ROWS = {Phase.DECODE: (1, 1), Phase.BATCH: (2, 16), Phase.PREFILL: (17, MAX_ROWS)}


class Queue(IntEnum):
    """Where an instruction runs. Queue order implies nothing about data: only waits do."""

    HOST = 0
    CPU = 1
    H2D_DEMAND = 2
    H2D_SPEC = 3
    AUX = 4
    GPU0 = 8
    GPU1 = 9
    GPU2 = 10
    GPU3 = 11
    GPU4 = 12
    GPU5 = 13
    GPU6 = 14
    GPU7 = 15

    @property
    def text(self) -> str:
        return self.name.lower().replace("_", ".")

    @property
    def gpu(self) -> int | None:
        """Device id of a gpuN queue."""
        return self - Queue.GPU0 if self >= Queue.GPU0 else None


GPU_QUEUES = tuple(q for q in Queue if q >= Queue.GPU0)

QUEUE_DOC = {
    Queue.HOST: "the driver thread: recompile, unload, sync",
    Queue.CPU: "the CPU's workers",
    Queue.H2D_DEMAND: "on-demand copies over the link, served first",
    Queue.H2D_SPEC: "speculative copies over the same link",
    Queue.AUX: "cache prefetches, by workers that have nothing else to do",
}


class HoleKind(IntEnum):
    """Kinds of holes that recompile binds. 0 is "none" in the encoding."""

    R = 1
    L = 2
    C = 3
    N = 4
    P = 5
    U = 6

    @property
    def text(self) -> str:
        return "?" + self.name.lower()


HOLE_DOC = {
    HoleKind.R: "experts on the GPU already",
    HoleKind.L: "experts to load on demand",
    HoleKind.C: "experts that the CPU computes",
    HoleKind.N: "slot prefetches for layer l+1",
    HoleKind.P: "cache prefetches (-> llc) for the next layer with experts",
    HoleKind.U: "slots to give up",
}


class NormSite(IntEnum):
    """Argument of norm."""

    ATTN = 0
    MLP = 1
    FINAL = 2


class Tier(IntEnum):
    """Where a transfer reads the expert from."""

    HOST = 0
    DISK = 1
    DEVICE = 2


class SlotKind(IntEnum):
    RESIDENT = 0
    CACHE = 1


class WeightDtype(IntEnum):
    """Element type of an expert's packed weights. 0, no format, means the plan's own."""

    FP32 = 1
    BF16 = 2
    INT8 = 3
    INT4 = 4


class ScaleDtype(IntEnum):
    NONE = 0
    BF16 = 1
    FP32 = 2


GROUPS = (0, 32, 64, 128, 256)  # elements of K that share a scale; 0: no groups


class EventName(IntEnum):
    """Events that cross programs."""

    HID = 0
    LOGITS = 1

    @property
    def text(self) -> str:
        return self.name.lower()


class Buffer(IntEnum):
    """Implicit buffers: what instructions read and write besides slots. Each is one logical
    value; where the runtime keeps copies for several devices, the events that order its users
    order the copies too."""

    HID = 0
    XN = 1
    KV = 2
    ROUTE = 3
    PREDICTION = 4
    DRAFT = 5
    HOLES = 6
    EXPERT_OUT = 7
    SHARED_OUT = 8
    LOGITS = 9


BUFFER_DOC = {
    Buffer.HID: "residual stream; the imported event @hid hands it over",
    Buffer.XN: "normed rows, and their GEMM-input copy",
    Buffer.KV: "the layer's KV cache; persistent",
    Buffer.ROUTE: "expert ids and weights of each row",
    Buffer.PREDICTION: "the predictor's output for the next layer with experts",
    Buffer.DRAFT: "drafts and the residency table; persistent",
    Buffer.HOLES: "the layer's bound holes; kept until every record of its last run has retired",
    Buffer.EXPERT_OUT: "expert outputs per (row, rank): different holes write different parts",
    Buffer.SHARED_OUT: "the shared expert's output",
    Buffer.LOGITS: "logits of the rows that want them",
}
PERSISTENT = (Buffer.KV, Buffer.DRAFT)  # readable without a write in the program


class Opcode(IntEnum):
    EMBED = 0
    NORM = 1
    ATTENTION = 2
    GATE = 3
    PREDICT = 4
    EXPERT = 5
    SHARED_EXPERT = 6
    MLP = 7
    COMBINE = 8
    LM_HEAD = 9
    LOAD = 10
    PREFETCH = 11
    UNLOAD = 12
    SYNC = 13
    RECOMPILE = 14

    @property
    def text(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class OpInfo:
    """One row of the table. `reads` and `writes` hold for every use; what depends on operands is
    in `effects` of pdscope.ir.verify and its C twin: recompile reads the prediction when it
    binds ?n or ?p, combine reads shared_out when the program has a shared expert, a fused
    predict adds predict's row to gate's."""

    compute: bool
    kinds: tuple[Kind, ...]
    queues: tuple[Queue, ...]
    holes: tuple[HoleKind, ...]
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    doc: str


_LAYER = (Kind.DENSE, Kind.MOE)
_MOE = (Kind.MOE,)
_COMPUTE = (Queue.CPU, *GPU_QUEUES)
_HOST = (Queue.HOST,)
_B = Buffer
_H = HoleKind


def _compute(
    kinds: tuple[Kind, ...],
    reads: tuple[Buffer, ...],
    writes: tuple[Buffer, ...],
    doc: str,
    holes: tuple[HoleKind, ...] = (),
) -> OpInfo:
    return OpInfo(True, kinds, _COMPUTE, holes, reads, writes, doc)


OPS: dict[Opcode, OpInfo] = {
    Opcode.EMBED: _compute(
        (Kind.PROLOGUE,), (), (_B.HID,), "token ids to rows of the residual stream"
    ),
    Opcode.NORM: _compute(
        (Kind.DENSE, Kind.MOE, Kind.EPILOGUE),
        (_B.HID,),
        (_B.XN,),
        "RMS norm before attention (attn), before the MLP or gate (mlp), or before lm_head (final)",
    ),
    Opcode.ATTENTION: _compute(
        _LAYER,
        (_B.XN, _B.HID, _B.KV),
        (_B.HID, _B.KV),
        "appends to the KV cache; adds attention to the residual stream",
    ),
    Opcode.GATE: _compute(
        _MOE,
        (_B.XN,),
        (_B.ROUTE,),
        "true routing; `tokens`: it reads token ids too (hash routing); `, predict` fuses predict",
    ),
    Opcode.PREDICT: _compute(
        _MOE,
        (_B.XN,),
        (_B.PREDICTION,),
        "the predictor's forward: which experts the next layer with experts will choose",
    ),
    Opcode.EXPERT: _compute(
        _MOE,
        (_B.XN, _B.HOLES),
        (_B.EXPERT_OUT,),
        "the experts bound to a hole: ?c on the CPU, ?r and ?l from slots on the slots' GPU; "
        "entries of a slot that is still being filled wait for its ready ticket",
        (_H.R, _H.L, _H.C),
    ),
    Opcode.SHARED_EXPERT: _compute(_MOE, (_B.XN,), (_B.SHARED_OUT,), "the shared expert"),
    Opcode.MLP: _compute(
        (Kind.DENSE,),
        (_B.XN, _B.HID),
        (_B.HID,),
        "a dense layer's MLP, added to the residual stream",
    ),
    Opcode.COMBINE: _compute(
        _MOE,
        (_B.ROUTE, _B.EXPERT_OUT, _B.HID),
        (_B.HID,),
        "weighted expert outputs in rank order, and the shared expert's, added to the residual "
        "stream",
    ),
    Opcode.LM_HEAD: _compute(
        (Kind.EPILOGUE,), (_B.XN,), (_B.LOGITS,), "logits of the rows that want them"
    ),
    Opcode.LOAD: OpInfo(
        False,
        _MOE,
        (Queue.H2D_DEMAND,),
        (_H.L,),
        (_B.HOLES,),
        (),
        "on-demand load into a cache slot, under the slot's free ticket; signals when the copy is "
        "done. `stream`: one record for all entries; it signals once accepted, tickets do the rest",
    ),
    Opcode.PREFETCH: OpInfo(
        False,
        _MOE,
        (Queue.H2D_SPEC, Queue.AUX),
        (_H.N, _H.P),
        (_B.HOLES,),
        (),
        "speculative: ?n into a cache slot (h2d.spec), like load; ?p -> llc pulls the first blocks "
        "of experts into the CPU's last-level cache (aux), until the experts are computed",
    ),
    Opcode.UNLOAD: OpInfo(
        False, _MOE, _HOST, (_H.U,), (_B.HOLES,), (), "gives slots up: signals their free tickets"
    ),
    Opcode.SYNC: OpInfo(
        False, tuple(Kind), _HOST, (), (), (), "the host waits; never the end of a program"
    ),
    Opcode.RECOMPILE: OpInfo(
        False,
        _MOE,
        _HOST,
        (),
        (_B.ROUTE, _B.DRAFT),
        (_B.HOLES, _B.DRAFT),
        "binds the holes from the true routing, the draft, the prediction and the costs",
    ),
}

QUEUE_BY_TEXT = {q.text: q for q in Queue}
OPCODE_BY_TEXT = {op.text: op for op in Opcode}
HOLE_BY_TEXT = {h.text: h for h in HoleKind}


def mask(values: tuple[IntEnum, ...]) -> int:
    """One bit per enum value."""
    return sum(1 << int(v) for v in values)


# --- the generated header ---


def _enum(c_type: str, prefix: str, enum: type[IntEnum]) -> str:
    body = "".join(f"  {prefix}{m.name} = {m.value},\n" for m in enum)
    return f"typedef enum {c_type} {{\n{body}}} {c_type};\n"


def _table() -> str:
    """The facts that a plan and a runtime must share: what ISA_HASH covers."""
    limits = {
        "MAX_INSTRS": MAX_INSTRS,
        "MAX_WAITS": MAX_WAITS,
        "MAX_SLOT_OPERANDS": MAX_SLOT_OPERANDS,
        "MAX_SLOTS": MAX_SLOTS,
        "MAX_EVENTS": MAX_EVENTS,
        "MAX_EXPERTS": MAX_EXPERTS,
        "MAX_TOP_K": MAX_TOP_K,
        "MAX_ROWS": MAX_ROWS,
        "MAX_DEVICES": MAX_DEVICES,
        "MAX_STREAMS": MAX_STREAMS,
        "SLOT_NAME_BYTES": NAME_BYTES,
        "WAIT_IMPORT": WAIT_IMPORT,
        "INDEX_ALL": INDEX_ALL,
        "PERSISTENT_BUFFERS": mask(PERSISTENT),
    }
    out = [f"#define PDS_{k} {v}u\n" for k, v in limits.items()]
    out.append("\n")
    out.append(_enum("pds_kind", "PDS_KIND_", Kind))
    out.append(_enum("pds_phase", "PDS_PHASE_", Phase))
    out.append(_enum("pds_queue", "PDS_QUEUE_", Queue))
    out.append(_enum("pds_hole_kind", "PDS_HOLE_", HoleKind))
    out.append(_enum("pds_norm_arg", "PDS_ARG_NORM_", NormSite))
    out.append(_enum("pds_tier", "PDS_TIER_", Tier))
    out.append(_enum("pds_slot_kind", "PDS_SLOT_", SlotKind))
    out.append(_enum("pds_weight_dtype", "PDS_WEIGHT_", WeightDtype))
    out.append(_enum("pds_scale_dtype", "PDS_SCALE_", ScaleDtype))
    out.append(_enum("pds_event_name", "PDS_EVENT_", EventName))
    out.append(_enum("pds_res", "PDS_RES_", Buffer))
    out.append(_enum("pds_opcode", "PDS_OP_", Opcode))
    out.append(
        "\n/* X(name, text, programs, queues, holes, reads, writes): one bit per enum value */\n"
    )
    rows = [
        f'  X({op.name}, "{op.text}", {mask(i.kinds):#x}, {mask(i.queues):#x}, {mask(i.holes):#x}, '
        f"{mask(i.reads):#x}, {mask(i.writes):#x})"
        for op, i in OPS.items()
    ]
    out.append("#define PDS_ISA_OPS(X) \\\n" + " \\\n".join(rows) + "\n")
    rows = [f'  X({q.name}, "{q.text}")' for q in Queue]
    out.append("#define PDS_ISA_QUEUES(X) \\\n" + " \\\n".join(rows) + "\n")
    rows = [f'  X({b.name}, "{b.name.lower()}")' for b in Buffer]
    out.append("#define PDS_ISA_BUFFERS(X) \\\n" + " \\\n".join(rows) + "\n")
    rows = [
        f'  X({p.name}, "{p.name.lower()}", {PHASE_ROWS[p][0]}u, {PHASE_ROWS[p][1]}u)'
        for p in Phase
    ]
    out.append("/* X(name, text, fewest rows, most rows) */\n")
    out.append("#define PDS_ISA_PHASES(X) \\\n" + " \\\n".join(rows) + "\n")
    return "".join(out)


ISA_HASH = zlib.crc32(_table().encode())


def render_header() -> str:
    """Text of runtime_c/src/pds_isa.h."""
    return (
        "/* pds_isa.h: the instruction table. Generated from ir/isa.py by\n"
        " * `python -m pdscope.ir.isa --write`: do not edit. */\n"
        "#ifndef PDS_ISA_H\n#define PDS_ISA_H\n\n"
        "/* clang-format off */\n"
        f"#define PDS_PROGRAM_FORMAT {FORMAT_VERSION}u\n"
        f"#define PDS_ISA_HASH {ISA_HASH:#010x}u /* of the rest of this table: plans carry it */\n"
        f"{_table()}"
        "/* clang-format on */\n\n#endif\n"
    )


# --- the generated page ---


def _names(values: tuple[IntEnum, ...]) -> str:
    if set(values) >= set(GPU_QUEUES):
        rest = [v for v in values if v not in GPU_QUEUES]
        return ", ".join([getattr(v, "text", v.name.lower()) for v in rest] + ["gpuN"])
    return ", ".join(getattr(v, "text", v.name.lower()) for v in values)


_DOCS_HEAD = """\
<!-- Generated by `python -m pdscope.ir.isa --write`: do not edit. -->
# Instruction set

A plan holds one program per layer, phase and row bucket (decode: 1 row; batch: 2 to 16; prefill:
more), plus a prologue and an epilogue for each phase. `programs/*.plan` is the text form,
`program.bin` the only form that is executed. Instruction `@i` signals event `@i` when it is done,
and starts when every event it waits for has been signalled. Order within a queue implies nothing
about data. Holes are what is bound at run time, from the true output of the gate: the program is
static, the work is not.

```
program @l3.decode {layer = 3, phase = decode, experts = 8, top_k = 2, rows = 1, shared = yes}
  in   @hid
  @0 = compute norm attn      q=cpu   wait(@hid)
  @1 = compute attention      q=cpu   wait(@0)
  @2 = compute norm mlp       q=cpu   wait(@1)
  @3 = compute gate           q=cpu   wait(@2)
  @4 = recompile -> ?c[2]     q=host  wait(@3)
  @5 = compute shared_expert  q=cpu   wait(@2)
  @6 = compute expert ?c[*]   q=cpu   wait(@4)
  @7 = compute combine        q=cpu   wait(@5, @6)
  out  @hid = @7
```

## Instructions

| opcode | programs | queues | holes | reads | writes | what it does |
|---|---|---|---|---|---|---|
"""

_DOCS_ATTRIBUTES = """
Recompile also reads the prediction when it binds ?n or ?p; combine reads shared_out when the layer
has a shared expert; a gate with `, predict` does what predict does too.

Attributes, printed when not the default: `{tier = disk}` or `{tier = device}`, where a transfer
reads from (default: host memory); `{device = N}`, the GPU of a transfer or unload; `{format =
int4/g64/bf16}`, the expert's weight format (element type, group, scale type; default: the plan's
own); `{adapter = N}`, refused for now. Of a program: `streams = N`, the hidden state's
hyper-connection streams; `budget = N`, the expert slots that each GPU may hold, over all layers.
"""

_DOCS_SLOTS = """
## Slots and tickets

`slot %hot : resident {e1, e4}` holds fixed experts, which have no copy in host memory. `slot %ring
: cache[6]` is a ring of slots that all layers share by name. A cache slot has two tickets that only
grow: `ready` (the fill is done) and `free` (its reader is done). `in %ring.tickets` and `out
%ring.tickets` hand them from program to program.
"""

_DOCS_BINARY = f"""
## program.bin

Little-endian records of {RECORD_BYTES} bytes, in this order: one header, then the programs (decode,
batch, prefill; in each prologue, layers, epilogue), the instructions, the slots, and the expert
lists of resident slots (32 ids a record, padded with 0xffff). Format version {FORMAT_VERSION};
`runtime_c/src/program.h` gives every field.

This runtime executes programs of the host and the CPU (`program.bin`), and with those GPU 0's
(`program.gpu.bin`, docs/gpu-plans.md); it refuses others when it loads them.
"""


def render_docs() -> str:
    """Text of docs/instruction-set.md."""
    from pdscope.ir import verify  # late: verify imports this module

    out = [_DOCS_HEAD]
    for op, i in OPS.items():
        name = f"compute {op.text}" if i.compute else op.text
        columns = (i.kinds, i.queues, i.holes, i.reads, i.writes)
        cells = " | ".join(_names(c) for c in columns)
        out.append(f"| `{name}` | {cells} | {i.doc} |\n")
    out += [_DOCS_ATTRIBUTES, "\n## Queues\n\n| queue | what runs there |\n|---|---|\n"]
    out += [f"| `{q.text}` | {doc} |\n" for q, doc in QUEUE_DOC.items()]
    out.append("| `gpu0` to `gpu7` | one GPU's compute |\n")
    out.append(
        "\n## Holes\n\nBound by `recompile -> ?x[capacity]`; `?x[i]` is one entry, `?x[*]` all.\n"
        "An unbound entry retires at once and still signals.\n\n| hole | entries |\n|---|---|\n"
    )
    out += [f"| `{h.text}` | {HOLE_DOC[h]} |\n" for h in HoleKind]
    out += [_DOCS_SLOTS, "\n## Buffers\n\n| buffer | what it holds |\n|---|---|\n"]
    out += [f"| {b.name.lower()} | {BUFFER_DOC[b]} |\n" for b in Buffer]
    rules = (verify.__doc__ or "").split("\nMay import")[0].strip()
    out.append(f"\n## Verifier\n\n```\n{rules}\n```\n")
    out.append(_DOCS_BINARY)
    return "".join(out)


def main(argv: list[str]) -> int:
    """`--write` or `--check` the generated files of the checkout that holds this module."""
    root = Path(__file__).resolve().parents[1]
    if argv not in (["--write"], ["--check"]) or not (root / "runtime_c" / "src").is_dir():
        print("usage, in a checkout: python -m pdscope.ir.isa --write | --check", file=sys.stderr)
        return 2
    stale = []
    for path, text in (
        (root / "runtime_c" / "src" / "pds_isa.h", render_header()),
        (root / "docs" / "instruction-set.md", render_docs()),
    ):
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if argv == ["--write"]:
            path.parent.mkdir(exist_ok=True)
            aside = path.with_name(path.name + ".new")
            aside.write_text(text, encoding="utf-8")
            aside.replace(path)
    for path in stale:
        verb = "wrote" if argv == ["--write"] else "stale (run python -m pdscope.ir.isa --write):"
        print(f"{verb} {path.relative_to(root)}")
    return 1 if stale and argv == ["--check"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
