"""Binary form of programs, the only one that is executed: encode and decode program.bin.

runtime_c/src/program.h describes the records; runtime_c/src/program.c accepts exactly the bytes
that `decode` accepts. May import pdscope.ir.isa, pdscope.ir.program and pdscope.errors.
"""

import re
import struct
import zlib
from collections.abc import Iterable
from enum import IntEnum
from typing import TypeVar

from pdscope.errors import PlanError
from pdscope.ir import isa
from pdscope.ir.isa import (
    EventName,
    HoleKind,
    Kind,
    NormSite,
    Opcode,
    Phase,
    Queue,
    ScaleDtype,
    SlotKind,
    Tier,
    WeightDtype,
)
from pdscope.ir.program import Event, Hole, HoleRef, Instr, Out, Program, Slot, WeightFormat

_HEADER = struct.Struct("<8sIIQ4I20sI")
_PROGRAM = struct.Struct("<i4B4H4IH2B4B4B4H3I")
_INSTR = struct.Struct("<8B12H4H8HHHBBH")
_SLOT = struct.Struct(f"<{isa.NAME_BYTES}s4BHHI36s")
_LIST = struct.Struct("<32H")
_PER_LIST = 32
_STREAM, _LLC, _TOKENS, _PREDICT = 1, 2, 4, 8  # PDS_INSTR_* of program.h
_FLAGS = {
    Opcode.GATE: _TOKENS | _PREDICT,
    Opcode.LOAD: _STREAM,
    Opcode.PREFETCH: _STREAM | _LLC,
}
_SLOT_NAME = re.compile(rf"[a-z][a-z0-9_]{{0,{isa.NAME_BYTES - 2}}}")

E = TypeVar("E", bound=IntEnum)


def program_order(p: Program) -> tuple[int, int, int]:
    """Sort key of programs in program.bin."""
    return (p.phase, {Kind.PROLOGUE: 0, Kind.EPILOGUE: 2}.get(p.kind, 1), p.layer)


def format_code(fmt: WeightFormat | None) -> int:
    """dtype | scale << 3 | group << 5; 0: the plan's own."""
    if fmt is None:
        return 0
    if fmt.group not in isa.GROUPS:
        raise PlanError(f"weight format: group is {fmt.group}, expected one of {isa.GROUPS}")
    return fmt.dtype | fmt.scale << 3 | isa.GROUPS.index(fmt.group) << 5


def _pad(values: Iterable[int], size: int, what: str, fill: int = 0) -> list[int]:
    found = list(values)
    if len(found) > size:
        raise PlanError(f"{what}: {len(found)} given, at most {size} can be encoded")
    return found + [fill] * (size - len(found))


def _event_code(name: str) -> int:
    for e in EventName:
        if e.text == name:
            return e
    raise PlanError(f"event @{name} is unknown: expected hid or logits")


def _encode_instr(p: Program, i: Instr) -> bytes:
    names = [s.name for s in p.slots]
    waits = [w if isinstance(w, int) else isa.WAIT_IMPORT | p.ins.index(w) for w in i.waits]
    caps = [0] * 8
    for h in i.binds:
        caps[h.kind] = h.capacity
    if len({h.kind for h in i.binds}) != len(i.binds) or 0 in (h.capacity for h in i.binds):
        raise PlanError("a hole is bound twice, or with capacity 0")
    flags = i.stream * _STREAM | i.llc * _LLC | i.tokens * _TOKENS | i.predict * _PREDICT
    if flags & ~_FLAGS.get(i.opcode, 0) or (i.site is None) != (i.opcode is not Opcode.NORM):
        raise PlanError(f"{i.opcode.text} has a field that it does not use")
    index = 0
    if i.hole is not None:
        index = isa.INDEX_ALL if i.hole.index is None else i.hole.index
        if i.hole.index == isa.INDEX_ALL:
            raise PlanError(f"hole index {index} cannot be encoded")
    return _INSTR.pack(
        i.opcode,
        i.queue,
        i.hole.kind if i.hole is not None else 0,
        len(waits),
        i.site or 0,
        format_code(i.fmt),
        len(i.slots),
        flags,
        *_pad(waits, isa.MAX_WAITS, "events waited for"),
        *_pad((names.index(s) for s in i.slots), isa.MAX_SLOT_OPERANDS, "slots"),
        *caps,
        index,
        0 if i.adapter is None else i.adapter + 1,
        i.tier,
        i.device,
        0,
    )


def _encode_program(p: Program, first_instr: int, first_slot: int) -> bytes:
    names = [s.name for s in p.slots]
    return _PROGRAM.pack(
        p.layer,
        p.kind,
        p.phase,
        p.shared,
        p.streams,
        len(p.instrs),
        len(p.slots),
        p.experts,
        p.top_k,
        p.rows_min,
        p.rows_max,
        first_instr,
        first_slot,
        p.budget,
        len(p.ins),
        len(p.outs),
        *_pad(map(_event_code, p.ins), isa.MAX_EVENTS, "imported events"),
        *_pad((_event_code(o.name) for o in p.outs), isa.MAX_EVENTS, "exported events"),
        *_pad((o.event for o in p.outs), isa.MAX_EVENTS, "exported events"),
        sum(1 << names.index(t) for t in p.tickets_in),
        sum(1 << names.index(t) for t in p.tickets_out),
        0,
    )


def encode(programs: Iterable[Program]) -> bytes:
    """program.bin of `programs`, which must be ordered by program_order and should be verified.
    PlanError if a program holds what the records cannot."""
    heads: list[bytes] = []
    instrs: list[bytes] = []
    slots: list[bytes] = []
    lists: list[bytes] = []
    ordered = list(programs)
    if any(program_order(a) > program_order(b) for a, b in zip(ordered, ordered[1:], strict=False)):
        raise PlanError("programs must be ordered by phase: prologue, layers, epilogue in each")
    for p in ordered:
        try:
            heads.append(_encode_program(p, len(instrs), len(slots)))
            for s in p.slots:
                if not _SLOT_NAME.fullmatch(s.name):
                    raise PlanError(f"slot name %{s.name} cannot be encoded")
                resident = s.kind is SlotKind.RESIDENT
                first = len(lists) if resident else 0
                slots.append(
                    _SLOT.pack(
                        s.name.encode(),
                        s.kind,
                        s.device,
                        format_code(s.fmt),
                        0,
                        s.count,
                        0,
                        first,
                        b"",
                    )
                )
                for n in range(0, len(s.experts) if resident else 0, _PER_LIST):
                    part = s.experts[n : n + _PER_LIST]
                    lists.append(_LIST.pack(*_pad(part, _PER_LIST, "experts", 0xFFFF)))
            instrs += [_encode_instr(p, i) for i in p.instrs]
        except (struct.error, ValueError) as error:
            raise PlanError(
                f"{p.name}: a field is out of the range of its record: {error}"
            ) from None
        except PlanError as error:
            raise PlanError(f"{p.name}: {error}") from None
    total = isa.RECORD_BYTES * (1 + len(heads) + len(instrs) + len(slots) + len(lists))
    counts = (len(heads), len(instrs), len(slots), len(lists))
    head = _HEADER.pack(
        isa.MAGIC, isa.FORMAT_VERSION, isa.ISA_HASH, total, *counts, b"", 0
    )  # the CRC comes last
    body = b"".join(heads + instrs + slots + lists)
    crc = zlib.crc32(body, zlib.crc32(head[:-4]))
    return head[:-4] + struct.pack("<I", crc) + body


# --- decoding ---


def _need(condition: bool, record: str, message: str) -> None:
    if not condition:
        raise PlanError(f"program.bin: {record}: {message}; compile the plan again")


def _enum(enum: type[E], value: int, record: str) -> E:
    try:
        return enum(value)
    except ValueError:
        raise PlanError(
            f"program.bin: {record}: {value} is no {enum.__name__}; compile the plan again"
        ) from None


def _format(code: int, record: str) -> WeightFormat | None:
    if code == 0:
        return None
    _need(code >> 5 < len(isa.GROUPS), record, f"weight format {code:#x} is unknown")
    return WeightFormat(
        _enum(WeightDtype, code & 7, record),
        isa.GROUPS[code >> 5],
        _enum(ScaleDtype, code >> 3 & 3, record),
    )


def _decode_instr(data: bytes, record: str, names: list[str], ins: list[str]) -> Instr:
    f = _INSTR.unpack(data)
    opcode, queue, hole, n_waits, arg, fmt, n_slots, flags = f[:8]
    waits, slots, caps = f[8:20], f[20:24], f[24:32]
    index, adapter, tier, device, reserved = f[32:]
    op = _enum(Opcode, opcode, record)
    _need(
        n_waits <= isa.MAX_WAITS and n_slots <= isa.MAX_SLOT_OPERANDS, record, "too many operands"
    )
    _need(
        not any(waits[n_waits:]) and not any(slots[n_slots:]),
        record,
        "unused operands are not zero",
    )
    _need(all(s < len(names) for s in slots[:n_slots]), record, "slot operand out of range")
    _need(not flags & ~_FLAGS.get(op, 0), record, "flags do not fit the opcode")
    _need(reserved == 0, record, "reserved bytes are not zero")
    _need(op is Opcode.NORM or arg == 0, record, "argument without use")
    _need(hole != 0 or index == 0, record, "hole index without a hole")
    _need(caps[0] == 0 and caps[7] == 0, record, "unknown hole bound")
    events: list[Event] = []
    for w in waits[:n_waits]:
        if w & isa.WAIT_IMPORT:
            _need(w & 0x7FFF < len(ins), record, "imported event out of range")
            events.append(ins[w & 0x7FFF])
        else:
            events.append(w)
    return Instr(
        opcode=op,
        queue=_enum(Queue, queue, record),
        waits=tuple(events),
        site=_enum(NormSite, arg, record) if op is Opcode.NORM else None,
        tokens=bool(flags & _TOKENS),
        predict=bool(flags & _PREDICT),
        hole=HoleRef(_enum(HoleKind, hole, record), None if index == isa.INDEX_ALL else index)
        if hole
        else None,
        binds=tuple(Hole(HoleKind(k), c) for k, c in enumerate(caps) if c),
        slots=tuple(names[s] for s in slots[:n_slots]),
        stream=bool(flags & _STREAM),
        llc=bool(flags & _LLC),
        tier=_enum(Tier, tier, record),
        device=device,
        fmt=_format(fmt, record),
        adapter=adapter - 1 if adapter else None,
    )


class _Decoder:
    def __init__(self, data: bytes) -> None:
        size = isa.RECORD_BYTES
        _need(len(data) >= size, "header", f"the file has {len(data)} bytes, fewer than its header")
        magic, version, isa_hash, total, *counts, reserved, crc = _HEADER.unpack(data[:size])
        _need(magic == isa.MAGIC, "header", "not a program file")
        _need(
            version == isa.FORMAT_VERSION,
            "header",
            f"format version is {version}, this PDScope reads {isa.FORMAT_VERSION}",
        )
        _need(isa_hash == isa.ISA_HASH, "header", "written for another instruction table")
        _need(total == len(data), "header", f"the file has {len(data)} bytes, expected {total}")
        _need(total == size * (1 + sum(counts)), "header", "record counts do not fit the size")
        _need(not any(reserved), "header", "reserved bytes are not zero")
        _need(
            zlib.crc32(data[size:], zlib.crc32(data[: size - 4])) == crc, "header", "CRC is wrong"
        )
        self.data = data
        self.n_programs, self.n_instrs, self.n_slots, self.n_lists = counts
        self.instr = self.slot = self.list = 0  # records consumed
        self.slot_base = 1 + self.n_programs + self.n_instrs

    def record(self, index: int) -> bytes:
        return self.data[index * isa.RECORD_BYTES : (index + 1) * isa.RECORD_BYTES]

    def take_slot(self) -> Slot:
        record = f"slot {self.slot}"
        raw, kind, device, fmt, r0, count, r1, first, rest = _SLOT.unpack(
            self.record(self.slot_base + self.slot)
        )
        name = raw.rstrip(b"\0").decode("latin-1")
        _need(bool(_SLOT_NAME.fullmatch(name)), record, "malformed name")
        _need(r0 == 0 and r1 == 0 and not any(rest), record, "reserved bytes are not zero")
        self.slot += 1
        experts: list[int] = []
        kind = _enum(SlotKind, kind, record)
        if kind is SlotKind.RESIDENT:
            n = -(-count // _PER_LIST)
            _need(
                first == self.list and n <= self.n_lists - first, record, "expert list out of place"
            )
            for k in range(first, first + n):
                experts += _LIST.unpack(self.record(self.slot_base + self.n_slots + k))
            self.list += n
            _need(all(e == 0xFFFF for e in experts[count:]), record, "expert list badly padded")
            del experts[count:]
        else:
            _need(first == 0, record, "a cache has no expert list")
        return Slot(
            name,
            kind,
            tuple(experts),
            0 if kind is SlotKind.RESIDENT else count,
            device,
            _format(fmt, record),
        )

    def take_program(self, index: int) -> Program:
        record = f"program {index}"
        f = _PROGRAM.unpack(self.record(1 + index))
        layer, kind, phase, shared, streams, n_instrs, n_slots, experts, top_k = f[:9]
        rows_min, rows_max, first_instr, first_slot, budget, n_ins, n_outs = f[9:16]
        in_codes, out_codes, out_events = f[16:20], f[20:24], f[24:28]
        tickets_in, tickets_out, reserved = f[28:]
        _need(shared <= 1 and reserved == 0, record, "reserved bytes are not zero")
        _need(n_ins <= isa.MAX_EVENTS and n_outs <= isa.MAX_EVENTS, record, "too many events")
        _need(
            not any(in_codes[n_ins:])
            and not any(out_codes[n_outs:])
            and not any(out_events[n_outs:]),
            record,
            "unused events are not zero",
        )
        _need(n_instrs <= isa.MAX_INSTRS and n_slots <= isa.MAX_SLOTS, record, "too many records")
        _need(
            first_instr == self.instr
            and n_instrs <= self.n_instrs - first_instr
            and first_slot == self.slot
            and n_slots <= self.n_slots - first_slot,
            record,
            "its records are out of place",
        )
        _need((tickets_in | tickets_out) >> n_slots == 0, record, "tickets of a slot out of range")
        program_kind, program_phase = _enum(Kind, kind, record), _enum(Phase, phase, record)
        ins = [_enum(EventName, c, record).text for c in in_codes[:n_ins]]
        outs = [
            Out(_enum(EventName, c, record).text, e)
            for c, e in zip(out_codes[:n_outs], out_events[:n_outs], strict=True)
        ]
        slots = [self.take_slot() for _ in range(n_slots)]
        names = [s.name for s in slots]
        instrs = [
            _decode_instr(
                self.record(1 + self.n_programs + first_instr + k),
                f"{record}: instruction {k}",
                names,
                ins,
            )
            for k in range(n_instrs)
        ]
        self.instr += n_instrs
        return Program(
            kind=program_kind,
            phase=program_phase,
            rows_min=rows_min,
            rows_max=rows_max,
            instrs=tuple(instrs),
            layer=layer,
            experts=experts,
            top_k=top_k,
            shared=bool(shared),
            streams=streams,
            budget=budget,
            ins=tuple(ins),
            tickets_in=tuple(n for k, n in enumerate(names) if tickets_in >> k & 1),
            slots=tuple(slots),
            outs=tuple(outs),
            tickets_out=tuple(n for k, n in enumerate(names) if tickets_out >> k & 1),
        )


def decode(data: bytes) -> list[Program]:
    """Programs of program.bin, in order: decode(encode(ps)) == ps. PlanError if the bytes are
    not well-formed; the programs still need the verifier."""
    d = _Decoder(data)
    programs = [d.take_program(k) for k in range(d.n_programs)]
    _need(
        (d.instr, d.slot, d.list) == (d.n_instrs, d.n_slots, d.n_lists),
        "header",
        "records that no program uses",
    )
    for a, b in zip(programs, programs[1:], strict=False):
        _need(program_order(a) <= program_order(b), "programs", "out of order")
    return programs
