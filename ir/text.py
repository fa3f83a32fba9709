"""Text form of programs: print_program and parse_programs. `parse(print(p)) == p` for every
program that keeps rule V1 of pdscope.ir.verify.

May import pdscope.ir.isa, pdscope.ir.program and pdscope.errors.
"""

import re
from collections.abc import Iterable

from pdscope.errors import PlanError
from pdscope.ir.isa import (
    HOLE_BY_TEXT,
    OPCODE_BY_TEXT,
    OPS,
    QUEUE_BY_TEXT,
    Kind,
    NormSite,
    Opcode,
    Phase,
    ScaleDtype,
    SlotKind,
    Tier,
    WeightDtype,
)
from pdscope.ir.program import Event, Hole, HoleRef, Instr, Out, Program, Slot, WeightFormat

_HEADER = re.compile(r"program @([\w.]+) \{([^{}]*)\}")
_SLOT = re.compile(r"slot %(\w+)\s*: (?:resident \{([^{}]*)\}|cache\[(\d+)\])(?: \{([^{}]*)\})?")
_INSTR = re.compile(
    r"@(\d+)\s*= (?P<body>[^{}]*?)(?: \{(?P<attrs>[^{}]*)\})?\s+q=(?P<queue>[\w.]+)"
    r"(?:\s+wait\((?P<waits>[^()]*)\))?"
)
_HOLE = re.compile(r"(\?[a-z])\[(\d+|\*)\]")


def format_text(fmt: WeightFormat) -> str:
    """ "int4/g64/bf16", "bf16"."""
    text = fmt.dtype.name.lower()
    if fmt.group or fmt.scale is not ScaleDtype.NONE:
        text += f"/g{fmt.group}/{fmt.scale.name.lower()}"
    return text


def _body(i: Instr) -> str:
    if i.opcode is Opcode.RECOMPILE:
        return "recompile -> " + " ".join(f"{h.kind.text}[{h.capacity}]" for h in i.binds)
    text = f"compute {i.opcode.text}" if OPS[i.opcode].compute else i.opcode.text
    if i.stream:
        text = f"stream {text}"
    if i.site is not None:
        text += f" {i.site.name.lower()}"
    if i.tokens:
        text += " tokens"
    if i.predict:
        text += ", predict"
    if i.hole is not None:
        text += f" {i.hole.kind.text}[{'*' if i.hole.index is None else i.hole.index}]"
    slots = ", ".join(f"%{s}" for s in i.slots)
    if i.opcode in (Opcode.LOAD, Opcode.PREFETCH):
        return f"{text} -> {'llc' if i.llc else slots}"
    return f"{text} from {slots}" if slots else text


def _attributes(i: Instr) -> str:
    parts = []
    if i.tier is not Tier.HOST:
        parts.append(f"tier = {i.tier.name.lower()}")
    if i.device:
        parts.append(f"device = {i.device}")
    if i.fmt is not None:
        parts.append(f"format = {format_text(i.fmt)}")
    if i.adapter is not None:
        parts.append(f"adapter = {i.adapter}")
    return f" {{{', '.join(parts)}}}" if parts else ""


def event_text(event: Event) -> str:
    return f"@{event}"


def _default_kind(name: str, experts: int) -> Kind:
    for kind in (Kind.PROLOGUE, Kind.EPILOGUE):
        if name.startswith(kind.name.lower() + "."):
            return kind
    return Kind.MOE if experts else Kind.DENSE


def _header(p: Program) -> str:
    parts = []
    if p.kind is not _default_kind(p.name, p.experts):
        parts.append(f"kind = {p.kind.name.lower()}")
    if p.kind not in (Kind.PROLOGUE, Kind.EPILOGUE) or p.layer != -1:
        parts.append(f"layer = {p.layer}")
    parts.append(f"phase = {p.phase.name.lower()}")
    if p.experts:
        parts.append(f"experts = {p.experts}")
    if p.top_k:
        parts.append(f"top_k = {p.top_k}")
    rows = f"{p.rows_min}" if p.rows_min == p.rows_max else f"{p.rows_min}-{p.rows_max}"
    parts.append(f"rows = {rows}")
    if p.shared:
        parts.append("shared = yes")
    if p.streams != 1:
        parts.append(f"streams = {p.streams}")
    if p.budget:
        parts.append(f"budget = {p.budget}")
    return f"program @{p.name} {{{', '.join(parts)}}}"


def _slot(s: Slot, width: int) -> str:
    if s.kind is SlotKind.RESIDENT:
        body = f"resident {{{', '.join(f'e{e}' for e in s.experts)}}}"
    else:
        body = f"cache[{s.size}]"
    parts = []
    if s.device:
        parts.append(f"device = {s.device}")
    if s.fmt is not None:
        parts.append(f"format = {format_text(s.fmt)}")
    attributes = f" {{{', '.join(parts)}}}" if parts else ""
    return f"slot %{s.name:<{width}} : {body}{attributes}"


def print_program(p: Program) -> str:
    """The program's text, ending in a newline. Line numbers are those of Program.line_of."""
    lines = [_header(p)]
    tickets = [f"%{t}.tickets" for t in p.tickets_in]
    if p.ins or tickets:
        lines.append("  in   " + ", ".join([f"@{n}" for n in p.ins] + tickets))
    width = max((len(s.name) for s in p.slots), default=0)
    lines += ["  " + _slot(s, width) for s in p.slots]
    bodies = [_body(i) + _attributes(i) for i in p.instrs]
    label_width = len(str(len(p.instrs) - 1)) + 1
    body_width = max((len(b) for b in bodies), default=0)
    queue_width = max((len(i.queue.text) for i in p.instrs), default=0)
    for n, (i, body) in enumerate(zip(p.instrs, bodies, strict=True)):
        label = f"@{n}"
        waits = f"wait({', '.join(event_text(w) for w in i.waits)})" if i.waits else ""
        line = f"  {label:<{label_width}} = {body:<{body_width}}  q={i.queue.text:<{queue_width}}  "
        lines.append((line + waits).rstrip())
    outs = [f"@{o.name} = @{o.event}" for o in p.outs] + [f"%{t}.tickets" for t in p.tickets_out]
    if outs:
        lines.append("  out  " + ", ".join(outs))
    return "\n".join(lines) + "\n"


def print_programs(programs: Iterable[Program]) -> str:
    """Programs one after the other, a blank line between two."""
    return "\n".join(print_program(p) for p in programs)


class _Parser:
    """Reads one file; errors name `source` and the line."""

    def __init__(self, text: str, source: str) -> None:
        self.lines = text.splitlines()
        self.source = source
        self.line = 0

    def fail(self, message: str) -> PlanError:
        return PlanError(f"{self.source}:{self.line}: {message}")

    def number(self, text: str, what: str, low: int = 0, high: int = (1 << 20)) -> int:
        if not re.fullmatch(r"-?\d{1,7}", text) or not low <= int(text) <= high:
            raise self.fail(f"{what} is {text!r}, expected a number from {low} to {high}")
        return int(text)

    def pick(self, text: str, names: Iterable[str], what: str) -> str:
        known = list(names)
        if text not in known:
            raise self.fail(f"{what} is {text!r}, expected one of {', '.join(known)}")
        return text

    def attributes(self, text: str | None, known: tuple[str, ...]) -> dict[str, str]:
        found: dict[str, str] = {}
        for part in (text or "").split(","):
            if text is None:
                break
            key, equals, value = (x.strip() for x in part.partition("="))
            self.pick(key, known, "attribute")
            if not equals or not value or key in found:
                raise self.fail(f"attribute {key} must be given once, as `{key} = value`")
            found[key] = value
        return found

    def format(self, text: str | None) -> WeightFormat | None:
        if text is None:
            return None
        parts = text.split("/")
        if len(parts) not in (1, 3):
            raise self.fail(f"format is {text!r}, expected like `bf16` or `int4/g64/bf16`")
        dtype = WeightDtype[
            self.pick(parts[0], (d.name.lower() for d in WeightDtype), "format").upper()
        ]
        if len(parts) == 1:
            return WeightFormat(dtype)
        if not parts[1].startswith("g"):
            raise self.fail(f"format is {text!r}, expected a group like g64")
        scale = self.pick(parts[2], (s.name.lower() for s in ScaleDtype), "scale type")
        return WeightFormat(dtype, self.number(parts[1][1:], "group"), ScaleDtype[scale.upper()])

    def programs(self) -> list[Program]:
        found: list[Program] = []
        current: list[tuple[int, str]] = []
        for n, raw in enumerate(self.lines, 1):
            text = raw.split("//")[0].strip()
            if not text:
                continue
            if text.startswith("program"):
                if current:
                    found.append(self.program(current))
                current = []
            elif not current:
                self.line = n
                raise self.fail("expected `program @name {...}`")
            current.append((n, text))
        if current:
            found.append(self.program(current))
        return found

    def program(self, lines: list[tuple[int, str]]) -> Program:
        self.line, head = lines[0]
        match = _HEADER.fullmatch(head)
        if match is None:
            raise self.fail("expected `program @name {key = value, ...}`")
        name = match[1]
        a = self.attributes(
            match[2],
            ("kind", "layer", "phase", "experts", "top_k", "rows", "shared", "streams", "budget"),
        )
        for key in ("phase", "rows"):
            if key not in a:
                raise self.fail(f"attribute {key} is missing")
        experts = self.number(a.get("experts", "0"), "experts", high=0xFFFF)
        kind = _default_kind(name, experts)
        if "kind" in a:
            kind = Kind[self.pick(a["kind"], (k.name.lower() for k in Kind), "kind").upper()]
        low, dash, high = a["rows"].partition("-")
        rows_min = self.number(low, "rows")
        ins: list[str] = []
        tickets_in: list[str] = []
        slots: list[Slot] = []
        instrs: list[Instr] = []
        outs: list[Out] = []
        tickets_out: list[str] = []
        stage = 0  # in, slots, instructions, out: in this order
        for self.line, text in lines[1:]:
            word = text.split(maxsplit=1)[0]
            here = {"in": 1, "slot": 2, "out": 4}.get(word, 3)
            if here < stage or (here == stage and here in (1, 4)):
                raise self.fail(
                    f"`{word}` is out of place: the order is in, slot, instructions, out"
                )
            stage = here
            if word == "in":
                self.imports(text[2:], ins, tickets_in)
            elif word == "slot":
                slots.append(self.slot(text))
            elif word == "out":
                self.exports(text[3:], outs, tickets_out)
            else:
                instrs.append(self.instr(text, len(instrs)))
        self.line = lines[0][0]
        program = Program(
            kind=kind,
            phase=Phase[self.pick(a["phase"], (p.name.lower() for p in Phase), "phase").upper()],
            rows_min=rows_min,
            rows_max=self.number(high, "rows") if dash else rows_min,
            instrs=tuple(instrs),
            layer=self.number(a.get("layer", "-1"), "layer", low=-1),
            experts=experts,
            top_k=self.number(a.get("top_k", "0"), "top_k", high=0xFFFF),
            shared=self.pick(a.get("shared", "no"), ("yes", "no"), "shared") == "yes",
            streams=self.number(a.get("streams", "1"), "streams", high=0xFF),
            budget=self.number(a.get("budget", "0"), "budget", high=0xFFFF),
            ins=tuple(ins),
            tickets_in=tuple(tickets_in),
            slots=tuple(slots),
            outs=tuple(outs),
            tickets_out=tuple(tickets_out),
        )
        if program.name != name:
            raise self.fail(f"the name is @{name}, its attributes make it @{program.name}")
        return program

    def imports(self, text: str, ins: list[str], tickets: list[str]) -> None:
        for part in (x.strip() for x in text.split(",")):
            if m := re.fullmatch(r"%(\w+)\.tickets", part):
                tickets.append(m[1])
            elif (m := re.fullmatch(r"@([a-z]\w*)", part)) and not tickets:
                ins.append(m[1])
            else:
                raise self.fail(f"{part!r}: expected `in @event, ..., %slot.tickets, ...`")

    def exports(self, text: str, outs: list[Out], tickets: list[str]) -> None:
        for part in (x.strip() for x in text.split(",")):
            if m := re.fullmatch(r"%(\w+)\.tickets", part):
                tickets.append(m[1])
            elif (m := re.fullmatch(r"@([a-z]\w*) = @(\d+)", part)) and not tickets:
                outs.append(Out(m[1], self.number(m[2], "event")))
            else:
                raise self.fail(f"{part!r}: expected `out @name = @i, ..., %slot.tickets, ...`")

    def slot(self, text: str) -> Slot:
        m = _SLOT.fullmatch(text)
        if m is None:
            raise self.fail("expected `slot %name : resident {e1, ...}` or `slot %name : cache[n]`")
        a = self.attributes(m[4], ("device", "format"))
        device = self.number(a.get("device", "0"), "device", high=0xFF)
        fmt = self.format(a.get("format"))
        if m[3] is not None:
            size = self.number(m[3], "cache size", high=0xFFFF)
            return Slot(m[1], SlotKind.CACHE, size=size, device=device, fmt=fmt)
        ids = []
        for part in (x.strip() for x in m[2].split(",") if x.strip()):
            if not part.startswith("e"):
                raise self.fail(f"{part!r}: expected an expert like e7")
            ids.append(self.number(part[1:], "expert", high=0xFFFE))
        return Slot(m[1], SlotKind.RESIDENT, experts=tuple(ids), device=device, fmt=fmt)

    def slot_names(self, text: str) -> tuple[str, ...]:
        names = []
        for part in (x.strip() for x in text.split(",")):
            m = re.fullmatch(r"%(\w+)", part)
            if m is None:
                raise self.fail(f"{part!r}: expected a slot like %ring")
            names.append(m[1])
        return tuple(names)

    def instr(self, text: str, index: int) -> Instr:
        m = _INSTR.fullmatch(text)
        if m is None:
            raise self.fail("expected `@i = instruction q=queue wait(@event, ...)`")
        if int(m[1]) != index:
            said = "signalled twice" if int(m[1]) < index else "out of order"
            raise self.fail(f"V2: event @{m[1]} is {said}: instruction {index} signals @{index}")
        a = self.attributes(m["attrs"], ("tier", "device", "format", "adapter"))
        waits: list[Event] = []
        for part in (x.strip() for x in (m["waits"] or "").split(",") if m["waits"] is not None):
            if w := re.fullmatch(r"@(\d+)", part):
                waits.append(self.number(w[1], "event", high=0x7FFF))
            elif w := re.fullmatch(r"@([a-z]\w*)", part):
                waits.append(w[1])
            else:
                raise self.fail(f"{part!r}: expected an event like @3 or @hid")
        tier = self.pick(a.get("tier", "host"), (t.name.lower() for t in Tier), "tier")
        adapter = a.get("adapter")
        return self.body(
            m["body"].strip(),
            Instr(
                opcode=Opcode.SYNC,
                queue=QUEUE_BY_TEXT[self.pick(m["queue"], QUEUE_BY_TEXT, "queue")],
                waits=tuple(waits),
                tier=Tier[tier.upper()],
                device=self.number(a.get("device", "0"), "device", high=0xFF),
                fmt=self.format(a.get("format")),
                adapter=None if adapter is None else self.number(adapter, "adapter", high=0xFFFE),
            ),
        )

    def body(self, text: str, base: Instr) -> Instr:
        """`text` is what stands between `=` and `q=`, attributes apart; `base` has all the other
        fields."""
        f = dict(base.__dict__)
        words, arrow, target = (x.strip() for x in text.partition("->"))
        words, _, source = (x.strip() for x in words.partition(" from "))
        tokens = words.replace(",", " , ").split()
        if tokens[:1] == ["stream"]:
            f["stream"] = True
            tokens.pop(0)
        compute = tokens[:1] == ["compute"]
        if compute:
            tokens.pop(0)
        name = self.pick(tokens.pop(0) if tokens else "", OPCODE_BY_TEXT, "instruction")
        op = OPCODE_BY_TEXT[name]
        if compute != OPS[op].compute:
            raise self.fail(f"write `{'compute ' if OPS[op].compute else ''}{name}`")
        f["opcode"] = op
        if op is Opcode.NORM:
            site = self.pick(
                tokens.pop(0) if tokens else "", (s.name.lower() for s in NormSite), "norm's place"
            )
            f["site"] = NormSite[site.upper()]
        if op is Opcode.GATE and tokens[:1] == ["tokens"]:
            f["tokens"] = True
            tokens.pop(0)
        if op is Opcode.GATE and tokens == [",", "predict"]:
            f["predict"] = True
            tokens = []
        if OPS[op].holes and tokens:
            m = _HOLE.fullmatch(tokens.pop(0))
            if m is None or m[1] not in HOLE_BY_TEXT:
                raise self.fail("expected a hole like ?c[*] or ?l[0]")
            f["hole"] = HoleRef(
                HOLE_BY_TEXT[m[1]],
                None if m[2] == "*" else self.number(m[2], "hole index", high=0xFFFE),
            )
        if tokens:
            raise self.fail(f"{' '.join(tokens)!r} is not an operand of {name}")
        if source:
            f["slots"] = self.slot_names(source)
        if arrow and op is Opcode.RECOMPILE:
            f["binds"] = self.binds(target)
        elif arrow and op in (Opcode.LOAD, Opcode.PREFETCH):
            if target == "llc":
                f["llc"] = True
            else:
                f["slots"] = self.slot_names(target)
        elif arrow:
            raise self.fail(f"{name} has no result after ->")
        return Instr(**f)

    def binds(self, text: str) -> tuple[Hole, ...]:
        holes = []
        for part in text.split():
            m = _HOLE.fullmatch(part)
            if m is None or m[1] not in HOLE_BY_TEXT or m[2] == "*":
                raise self.fail(f"{part!r}: expected a hole and its capacity, like ?c[8]")
            holes.append(Hole(HOLE_BY_TEXT[m[1]], self.number(m[2], "capacity", high=0xFFFF)))
        return tuple(holes)


def parse_programs(text: str, source: str = "program") -> list[Program]:
    """Programs of a text, in order. `//` begins a comment. PlanError("source:line: ...") if it
    is malformed."""
    return _Parser(text, source).programs()
