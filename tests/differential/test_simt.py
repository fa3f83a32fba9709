"""The emulator of a GPU's blocks does what the PTX ISA says, and names what a GPU cannot do.

Holds of the issue "The GPU runtime": the GPU's kernels are tested where there is no GPU. Formulas
for fragments are written from the PTX ISA's text on mma.m16n8k16 and ldmatrix, not from simt.c.
"""

import threading
from typing import Any

import numpy as np
import pytest
from support import simt
from support.simt import Fault, probe

POISON = 0xFFFFFFFF


def bf16(x: Any) -> Any:
    """The bits of a float32 whose lower half is 0."""
    return x.view(np.uint32) >> 16


def test_mma_fragments() -> None:
    """D = A B + D for the fragments' (row, column) of "Matrix Fragments for mma.m16n8k16": whole
    numbers, so that every order of summing gives the same."""
    rng = np.random.default_rng(1)
    blocks = [
        (
            rng.integers(-8, 9, (16, 16)).astype(np.float32),
            rng.integers(-8, 9, (16, 8)).astype(np.float32),
            rng.integers(-99, 100, (16, 8)).astype(np.float32),
        )
        for _ in range(2)  # two warps
    ]
    given = np.zeros((64, 10), np.uint32)
    for warp, (a, b, d) in enumerate(blocks):
        for lane in range(32):
            group, member = lane >> 2, lane % 4
            words = given[warp * 32 + lane]
            for i in range(8):
                row = group if i < 2 or 4 <= i < 6 else group + 8
                col = member * 2 + (i & 1) + (0 if i < 4 else 8)
                words[i // 2] |= bf16(a[row, col]) << 16 * (i % 2)
            for i in range(4):
                row, col = member * 2 + (i & 1) + (0 if i < 2 else 8), group
                words[4 + i // 2] |= bf16(b[row, col]) << 16 * (i % 2)
            for i in range(4):
                row, col = group + (0 if i < 2 else 8), member * 2 + (i & 1)
                words[6 + i] = d[row, col].view(np.uint32)
    out = probe("mma", given, 256, threads=64).view(np.float32).reshape(2, 32, 4)
    for warp, (a, b, d) in enumerate(blocks):
        wanted = a @ b + d
        for lane in range(32):
            for i in range(4):
                row, col = (lane >> 2) + (0 if i < 2 else 8), lane % 4 * 2 + (i & 1)
                assert out[warp, lane, i] == wanted[row, col]


@pytest.mark.parametrize("name", ["ldmatrix", "ldmatrix_trans"])
def test_ldmatrix_fragments(name: str) -> None:
    """Register m of thread t: row t / 4 of matrix m, columns t % 4 * 2 and the next, the first in
    the lower half; of the transposed matrix with .trans. Threads 8m .. 8m+7 name its rows."""
    rows = np.random.default_rng(2).integers(0, 1 << 16, (32, 8)).astype(np.uint16)
    out = probe(name, rows, 128).reshape(32, 4)
    for m in range(4):
        matrix = rows[8 * m : 8 * m + 8].astype(np.uint32)
        if name == "ldmatrix_trans":
            matrix = matrix.T
        for t in range(32):
            low, high = matrix[t // 4, t % 4 * 2], matrix[t // 4, t % 4 * 2 + 1]
            assert out[t, m] == low | high << 16


def test_shuffles() -> None:
    """Values come from lanes of the thread's own warp."""
    v = np.arange(64, dtype=np.uint32) * 3 + 1
    out = probe("shuffles", v, 256, threads=64).reshape(64, 4)
    tid = np.arange(64)
    warp, lane = tid & 32, tid & 31
    assert (out[:, 0] == v[warp + (lane * 5 + 1) % 32]).all()
    assert (out[:, 1] == v[warp + (lane ^ 5)]).all()
    assert (out[:, 2].view(np.float32) == v[warp + 7]).all()
    assert (out[:, 3].view(np.float32) == v[tid ^ 16]).all()


def test_every_thread_of_every_block_runs_once() -> None:
    """Indices, and shared memory that holds nothing of an earlier block."""
    out = probe("places", np.zeros(4, np.uint32), 4 * 96 * 24, grid=(4, 3, 2), threads=96)
    out = out.reshape(24, 96, 4)
    assert (out[:, :, 0] == np.arange(24)[:, None]).all()
    assert (out[:, :, 1] == np.arange(96)).all()
    assert (out[:, :, 2] == np.arange(96)).all()
    assert (out[:, :, 3] == POISON).all()


@pytest.mark.parametrize("n", [1, 31, 32, 40, 127])
def test_barriers_do_without_threads_that_left(n: int) -> None:
    v = np.arange(128, dtype=np.uint32) + 5
    out = probe("leavers", v, 128, n=n, threads=128)
    assert (out[:n] == v[:n]).all()  # n steps around a ring of n
    assert (out[n:] == 0).all()


def test_a_missing_barrier_shows() -> None:
    """Threads read what others have not written yet, in a block of either order of turns."""
    v = np.arange(64, dtype=np.uint32)
    out = probe("unsynchronised", v, 64, threads=64)
    assert (out[:32] == POISON).all()
    out = probe("unsynchronised", v, 64, threads=64, grid=(2, 1, 1))  # the second writes last
    assert (out[32:] == POISON).all()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("two_barriers", r"pds_sync, while thread 0 is in pds_sync of line \d+ .*thread 3\)"),
        ("half_a_warp", "pds_shfl: waits for threads that never come .* thread 16 is in pds_sync"),
        ("two_functions", "pds_shfl, while thread 0 is in pds_warp_sync"),
        ("mma_by_some", "pds_mma_bf16 by 31 of a warp's 32 threads"),
    ],
)
def test_divergence_is_an_error(name: str, text: str) -> None:
    """With file and line, and no hang; the next launch is sound."""
    with pytest.raises(Fault, match=rf"simt_probes\.c:\d+: {text}"):
        probe(name, np.zeros(4, np.uint32), 64, n=3, threads=64)
    test_barriers_do_without_threads_that_left(40)


def test_a_copy_is_there_after_its_wait() -> None:
    """Not sooner: of two groups a wait may leave the last, and what was not committed is in none.
    Zeros, and no read, where it is not valid."""
    given = np.arange(256, dtype=np.uint32).reshape(32, 2, 4)
    first, second = given[:, 0], given[:, 1] * (np.arange(32) % 2 == 0)[:, None]
    for n, there in (
        (0, (True, True)),
        (1, (True, False)),
        (2, (False, False)),
        (3, (True, False)),
    ):
        out = probe("copies", given, 256, n=n).reshape(32, 2, 4)
        assert (out[:, 0] == (first if there[0] else POISON)).all(), n
        assert (out[:, 1] == (second if there[1] else POISON)).all(), n


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "pds_load16: 0x[0-9a-f]+ is not 16-byte aligned"),
        (1, "pds_load16: 0x[0-9a-f]+ is not 16-byte aligned"),
        (2, "pds_store16: 0x[0-9a-f]+ is not 16-byte aligned"),
        (3, "pds_copy16: 0x[0-9a-f]+ is not 16-byte aligned"),
        (4, "pds_copy16: 0x[0-9a-f]+ is not 16-byte aligned"),
        (5, "pds_copy16: byte 1024 of 1024 bytes of shared memory"),
        (6, "pds_ldmatrix: 0x[0-9a-f]+ is not 16-byte aligned"),
        (7, "wrote to byte 1024 of its 1024 bytes of shared memory"),
    ],
)
def test_bad_addresses_are_errors(n: int, text: str) -> None:
    with pytest.raises(Fault, match=text):
        probe("addresses", np.zeros(64, np.uint32), 64, n=n)


def test_pack_rounds_to_nearest_even() -> None:
    """Against bf16 of torch's kind: ties, infinities, the largest float, and a NaN of any bits."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 32, 4096, dtype=np.uint64).astype(np.uint32)
    bits[:8] = [0x3F808000, 0x3F818000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F800001, 1, 0]
    out = probe("pack", bits, 4096, n=4096)[:-1]
    kept = bits.astype(np.uint64)
    wanted = ((kept + 0x7FFF + (kept >> 16 & 1)) >> 16).astype(np.uint32)
    wanted[np.isnan(bits.view(np.float32))] = 0x7FFF
    assert (out & 0xFFFF == wanted[:-1]).all()
    assert (out >> 16 == wanted[1:]).all()


def test_threads_of_the_process_do_not_disturb_each_other() -> None:
    """Eight launches of 1024 threads at once, each with stacks of its own and its own error."""
    wrong: list[object] = []

    def work(number: int) -> None:
        for _ in range(4):
            out = probe("deep", np.zeros(4, np.uint32), 1024, threads=1024, grid=(2, 1, 1))
            if not (out == 1023 * 512 + 1024 * np.arange(1024)).all():
                wrong.append(number)
            try:
                probe("addresses", np.zeros(64, np.uint32), 64, n=number)
            except Fault as error:
                text = str(error)
                if ("pds_store16" in text) != (number == 2):
                    wrong.append(text)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_too_many_threads() -> None:
    with pytest.raises(Fault, match="1025 threads a block"):
        probe("deep", np.zeros(4, np.uint32), 1025, threads=1025)


def test_the_list_of_kernels() -> None:
    """The names that Python reads in list.h are those that C has, and structs have their sizes."""
    library = simt.library()
    entries = simt.ffi().cast("entry *", library.pds_simt_image.entries)
    found = [simt.ffi().string(entries[i].name).decode() for i in range(library.pds_simt_image.n)]
    names = [f"pds_cu_{name}" for name in simt.kernels()]
    assert [name for name in names if name in found] == found
    p = simt.params("pds_cu_norm", x=np.zeros(4, np.float32), rows=1)
    assert p.head.bytes == simt.ffi().sizeof("pds_cu_norm") and p.rows == 1
