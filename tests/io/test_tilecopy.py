"""The GPU's copier without a GPU: its kernels are interpreted."""

import weakref
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flatcake.io.engine import Buffer
from flatcake.io.pieces import Work
from flatcake.io.plan import make_tiles
from flatcake.io.tilecopy import GpuCopier, HostCopier, PieceTables, TileCopy
from flatcake.kernels.copies import CopyRuns
from flatcake.kernels.gather import gather_runs
from flatcake.kernels.launch import Launches
from flatcake.kernels.scatter import scatter_runs
from flatcake.layout import LaneTable
from flatcake.messages import Int64Array, Plan, PlanKind, Runs
from tests.builders import make_keys, make_limits
from tests.fakes import FakeCuda
from tests.stores import Memory, simple_layout

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, not interpreted, here")


class Noted(Launches):
    """Writes down which kernels had to be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[tuple[Any, Hashable]] = []

    def again(self, kernel: Any, programs: int, args: tuple[Any, ...], *, key: Hashable, stream: int | None) -> bool:
        return (kernel, key) in self.compiled

    def first(self, kernel: Any, programs: int, args: tuple[Any, ...], *, key: Hashable, warps: int) -> None:
        super().first(kernel, programs, args, key=key, warps=warps)
        self.compiled.append((kernel, key))


@pytest.mark.parametrize("sums", [False, True], ids=["bytes", "sums"])
@pytest.mark.parametrize("programs_max", [None, 1, 3])
def test_no_copy_after_the_first_ones_starts_the_compiler(programs_max: int | None, sums: bool) -> None:
    memory, device = Memory(simple_layout(layers=2)), FakeCuda()
    before = memory.snapshot()
    copier = GpuCopier(memory.kv.geometry(8), memory.kv, device, programs_max=programs_max)
    noted = Noted()
    copier.table = replace(copier.table, launches=noted)
    copier.warm(sums=sums)
    assert memory.is_equal(before), "a page was touched"
    warmed, pieces = list(noted.compiled), 9
    tables = PieceTables(copier, pieces + 1, 2, device.new_stream(), sums=sums)
    tables.set_pages(np.full(2, -1))
    tables.push(0, np.zeros((pieces, 3), np.int64), np.zeros(pieces, np.uint32))
    for runs in (scatter_runs, gather_runs):
        for count in (1, 2, pieces):
            made: CopyRuns = runs(tables.kernel_tables, copier.table, programs_max)
            made.launch(device.window(1 << 16), 0, count)
    assert noted.compiled == warmed, "a restore waits for the compiler"


@pytest.mark.parametrize(("sums", "dim"), [(False, 24), (True, 24), (True, 2048)], ids=["bytes", "sums", "lanes"])
def test_tables_of_pieces_go_up_share_by_share(sums: bool, dim: int) -> None:
    memory, device, count = Memory(simple_layout(layers=2, page_count=8, dim=dim)), FakeCuda(), 8
    copier = GpuCopier(memory.kv.geometry(8), memory.kv, device, programs_max=None)
    rng = np.random.default_rng(0)
    pieces, pages, seeds = rng.integers(0, 9, (count, 3)), rng.integers(0, 9, (3, 2)), rng.integers(0, 9, count)
    tables = PieceTables(copier, count, pages.size, device.new_stream(), sums=sums)
    tables.set_pages(pages)
    for first, last in ((0, 3), (3, 4), (4, count)):
        tables.push(first, pieces[first:last], seeds[first:last].astype(np.uint32))
        there, page_table, found, seed_table = tables.kernel_tables
        assert (there[:last].numpy() == pieces[:last]).all() and (page_table.numpy() == pages.reshape(-1)).all()
        if sums:
            assert found is not None and seed_table is not None
            assert (seed_table[:last].numpy() == seeds[:last]).all() and not found.any()
    if sums:
        assert found is not None and found.shape[1] == (1 if dim == 24 else 2)
        found += torch.arange(count, dtype=torch.int32)[:, None]
        tables.fetch(2, 5)
        assert tables.sums.tolist() == [[row] * found.shape[1] for row in (0, 0, 2, 3, 4, 0, 0, 0)]


@pytest.mark.parametrize(
    ("block_tokens", "dim"),
    [(4, 24), (8, 24), (12, 24), (8, 2048)],
    ids=["one page", "two pages", "three pages", "lanes of sums"],
)
def test_plans_that_follow_on_one_stream_share_tables_and_nothing_else(block_tokens: int, dim: int) -> None:
    memory, device = Memory(simple_layout(layers=2 if dim < 100 else 1, dim=dim)), FakeCuda()
    geometry = memory.kv.geometry(block_tokens)
    lanes, copier = LaneTable.of(geometry), GpuCopier(geometry, memory.kv, device, programs_max=None)
    host, stream, made = HostCopier(geometry, memory.kv), device.new_stream(), set()
    rng, slot_bytes = np.random.default_rng(0), 2 << 20
    limits = make_limits(slot_bytes=slot_bytes, first_tile_bytes=slot_bytes)
    for plan_id, blocks in enumerate((3, 1, 4, 4)):
        table = np.array([[1, 0, 8, 10 + plan_id, 0, blocks, 0]])
        plan = Plan(kind=PlanKind.SAVE, plan_id=plan_id, runs=Runs(table), keys=make_keys(str(plan_id), blocks))
        work = Work(plan, make_tiles(plan.runs, lanes, limits), lanes, 7)
        pages = rng.permutation(12)[: blocks * geometry.pages_per_block].reshape(blocks, -1)
        slots = [Buffer.of(torch.zeros(slot_bytes, dtype=torch.uint8)) for _ in range(2)]
        pieces, found = work.pieces.complete(), []
        for one, slot in zip((copier, host), slots, strict=True):
            copy = one.start(work.tiles, pieces, pages, stream, sums=True)
            copy.push(slice(0, len(pieces)))
            copy.gather(0, slot)
            copy.fetch_sums([0])
            found.append(copy.sums_of(slice(0, len(pieces))).copy())
        assert torch.equal(slots[0].tensor, slots[1].tensor) and found[0].tolist() == found[1].tolist()
        made.add(id(next(iter(copier._tables.values()))))
    assert len(copier._tables) == 1 and len(made) < 4, "no plan used the tables of the one before it"


def test_a_plan_leaves_tables_alone_that_are_still_on_their_way() -> None:
    memory, device = Memory(simple_layout(layers=2)), FakeCuda(manual=True)
    geometry = memory.kv.geometry(8)
    lanes, copier = LaneTable.of(geometry), GpuCopier(geometry, memory.kv, device, programs_max=None)
    stream, tables = device.new_stream(), list[PieceTables]()
    limits = make_limits(slot_bytes=1 << 20)
    for plan_id in range(3):
        runs = Runs(np.array([[1, 0, 8, 10, 0, 3, 0]]))
        plan = Plan(kind=PlanKind.SAVE, plan_id=plan_id, runs=runs, keys=make_keys(str(plan_id), 3))
        work = Work(plan, make_tiles(runs, lanes, limits), lanes, 7)
        copy = copier.start(work.tiles, work.pieces.complete(), np.full((3, 2), plan_id), stream, sums=True)
        copy.push(slice(0, len(work.pieces)))
        tables += copier._tables.values()
        if plan_id:
            device.run()
    assert tables[0] is not tables[1] and tables[1] is tables[2]
    assert [table.kernel_tables[1][:6].tolist() for table in tables] == [[0] * 6, [2] * 6, [2] * 6]


def started(copier: GpuCopier, memory: Memory, pages: Int64Array, stream: object) -> TileCopy:
    """The copy of a restore of as many blocks as `pages` has, all of whose pieces have been pushed."""
    lanes = LaneTable.of(memory.kv.geometry(8))
    runs = Runs(np.array([(0, 0, 16, 1, 0, len(pages), 0)], np.int64))
    plan = Plan(kind=PlanKind.RESTORE, plan_id=1, runs=runs, keys=make_keys("a", len(pages)))
    tiles = make_tiles(runs, lanes, make_limits())
    pieces = Work(plan, tiles, lanes, 7).pieces.complete()
    copy = copier.start(tiles, pieces, pages, stream, sums=True)
    copy.push(slice(0, len(pieces)))
    return copy


def test_plans_at_the_same_time_have_tables_of_their_own_also_where_streams_have_one_pointer() -> None:
    """Torch deals out the same 32 streams again and again, as other objects; a data plane may have more plans."""
    memory, device = Memory(simple_layout(layers=2)), FakeCuda()
    copier, streams = GpuCopier(memory.kv.geometry(8), memory.kv, device, programs_max=None), []
    for _ in range(2):
        streams.append(device.new_stream())
    assert device.pointer(streams[0]) == device.pointer(streams[1])
    memory.fill(seed=1)
    slot = Buffer.of(device.window(1 << 16))
    copy = started(copier, memory, np.array([[0, 1], [2, 3]]), streams[0])
    copy.gather(0, slot)
    memory.fill(seed=2)
    other = memory.snapshot()
    started(copier, memory, np.array([[4, 5], [6, 7]]), streams[1])
    copy.scatter(0, slot)
    for raw, was in zip(memory.raws, other, strict=True):
        pages, before = raw.view(64, -1), was.view(64, -1)
        assert torch.equal(pages[4:], before[4:]), "pages of the other plan were written"
        assert not torch.equal(pages[:4], before[:4])


def test_tables_live_until_what_was_pushed_of_them_is_up() -> None:
    """A plan may be given up before its tables are on the device; the next one of its stream takes others."""
    memory, device = Memory(simple_layout(layers=2)), FakeCuda(manual=True)
    copier, stream = GpuCopier(memory.kv.geometry(8), memory.kv, device, programs_max=None), device.new_stream()
    pages = np.array([[0, 1], [2, 3]])
    tables = weakref.ref(started(copier, memory, pages, stream)._tables)  # type: ignore[attr-defined]
    started(copier, memory, pages, stream)
    assert tables() is not None, "memory is let go that a copy in the stream still reads"
    device.run()
    for _ in range(2):
        started(copier, memory, pages, device.new_stream())
    assert tables() is None
