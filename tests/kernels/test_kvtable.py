"""The table of the engine's memory: units, sizes, and what it refuses."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from flatcake.errors import ShapeError
from flatcake.kernels.kvtable import (
    BASE,
    PAGE_STRIDE,
    PIECE_OFFSET,
    ROW_SIZE,
    ROW_STRIDE,
    ROWS_PER_PAGE,
    KVTable,
    Tuning,
)


def rows_of(*components: tuple[int, int, int, int, int, int]) -> npt.NDArray[np.int64]:
    return np.array([components], np.int64)


PLAIN = (1 << 20, 4096, 4, 1024, 512, 0)


@pytest.mark.parametrize(
    ("column", "value", "unit_bytes"),
    [
        (BASE, (1 << 20) + 16, 16),
        (BASE, (1 << 20) + 8, 8),
        (PAGE_STRIDE, 4096 + 4, 4),
        (ROW_STRIDE, 1024 + 8, 8),
        (ROW_SIZE, 132, 4),
        (PIECE_OFFSET, 24, 8),
        (ROWS_PER_PAGE, 3, 16),
    ],
)
def test_unit_is_the_largest_that_divides_everything(column: int, value: int, unit_bytes: int) -> None:
    rows = rows_of(PLAIN)
    rows[0, 0, column] = value
    table = KVTable.from_bytes(rows, 2, "cpu")
    assert table.unit_bytes == unit_bytes
    scale = np.full(6, unit_bytes)
    scale[[BASE, ROWS_PER_PAGE]] = 1
    assert np.array_equal(table.rows.numpy() * scale, rows)
    assert table.row_units_gcd * unit_bytes == rows[0, 0, ROW_SIZE]


def test_parts_starts_and_payload_skip_absent_components() -> None:
    rows = np.array(
        [[PLAIN, (1 << 21, 256, 1, 0, 132, 8192)], [(1 << 22, 64, 1, 0, 60, 0), (7, 7, 7, 7, 0, 7)]], np.int64
    )
    table = KVTable.from_bytes(rows, 3, "cpu")
    assert (table.layers, table.components, table.unit_bytes) == (2, 2, 4)
    assert table.parts(0) == [(0, 4 * 512 * 3), (8192, 396)]
    assert table.parts(1) == [(0, 180), (0, 0)]
    assert [table.payload_bytes(layer) for layer in range(2)] == [6144 + 396, 180]
    assert table.starts.tolist() == [[0, 768], [0, 23]]
    assert table.part_units_max == 6144 // 4


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (np.zeros((1, 1, 5), np.int64), "expected int64"),
        (np.zeros((0, 1, 6), np.int64), "expected int64"),
        (np.zeros((1, 1, 6), np.int32), "expected int64"),
        (rows_of((1 << 20, 4096, 4, 1024, 0, 0)), "every component is absent"),
        (rows_of((0, 4096, 4, 1024, 512, 0)), "base address"),
        (rows_of((1 << 20, 4096, 0, 1024, 512, 0)), "count of rows"),
        (rows_of((1 << 20, 4096, 4, 256, 512, 0)), "rows overlap"),
        (rows_of((1 << 20, 256, 1, 1024, 512, 0)), "rows overlap"),
        (rows_of((1 << 20, -4096, 4, 1024, 512, 0)), "smallest entry -4096"),
        (rows_of((1 << 20, 4096, 4, 1024, 510, 0)), "share only 2 bytes"),
        (rows_of(PLAIN, (1 << 21, 4096, 1, 0, 512, 4096 - 16)), "begins before"),
        (rows_of((1 << 20, 1 << 40, 1, 0, 1 << 40, 0)), "fewer than"),
    ],
)
def test_bad_rows_are_refused(rows: npt.NDArray[np.int64], match: str) -> None:
    with pytest.raises(ShapeError, match=match):
        KVTable.from_bytes(rows, 2, "cpu")


@pytest.mark.parametrize(("page_kib", "lanes"), [(4, 1), (32, 1), (64, 2), (128, 4), (512, 8), (4096, 8)])
def test_sums_have_more_lanes_where_more_programs_add_to_each(page_kib: int, lanes: int) -> None:
    size = page_kib << 10
    parts = rows_of((1 << 40, size, 1, 0, size, 0), (1 << 41, size, 1, 0, size, size))
    assert KVTable.from_bytes(parts, 1, "cpu").sum_lanes == lanes


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ((1 << 21, 96, 2, 48, 48, 192), (6, 2, 3, 3, 12, 24)),
        ((1 << 21, 96, 2, 48, 48, 208), (6, 2, 3, 3, 13, 24)),
        ((1 << 21, 112, 2, 48, 48, 192), None),
        ((1 << 21, 96, 1, 48, 48, 192), None),
        ((1 << 21, 96, 2, 48, 32, 192), None),
    ],
    ids=["alike", "a gap between parts", "page strides differ", "rows differ", "row sizes differ"],
)
def test_what_all_parts_share_is_known(second: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    table = KVTable.from_bytes(rows_of((1 << 20, 96, 2, 48, 48, 0), second), 2, "cpu")
    assert table.uniform == expected
    assert KVTable.from_bytes(np.concatenate([table.host_rows] * 2), 2, "cpu").uniform == expected


def test_walk_covers_every_unit_within_its_limits() -> None:
    for rows, tuning in [
        (rows_of(PLAIN), Tuning(tile_units=64)),
        (rows_of((1 << 20, 1 << 20, 1, 0, 1 << 20, 0)), Tuning()),
        (rows_of((1 << 20, 4096, 1, 0, 4096, 0), (1 << 21, 64, 1, 0, 48, 16384)), Tuning()),
    ]:
        table = KVTable.from_bytes(rows, 2, "cpu", tuning)
        for pieces in (1, 7):
            walk = table.walk(pieces, 5)
            item_units = walk.tile_units * walk.steps
            assert walk.chunks * item_units >= table.part_units_max > (walk.chunks - 1) * item_units
            assert walk.items == pieces * table.components * walk.chunks
            assert 1 <= walk.programs <= min(5, walk.items) and walk.tile_units <= tuning.tile_units
            if walk.wide:
                assert not ((table.rows[..., ROW_SIZE]) % walk.tile_units).any()
    assert KVTable.from_bytes(rows_of((1 << 20, 1 << 20, 1, 0, 1 << 20, 0)), 1, "cpu").walk(1, None).wide
    with pytest.raises(ShapeError, match="programs_max=0"):
        table.walk(1, 0)


@pytest.mark.parametrize(
    "given", [{"tile_units": 100}, {"tile_units": 16}, {"wide_units_min": 3}, {"warps": 0}, {"steps": 0}]
)
def test_tuning_is_checked(given: dict[str, int]) -> None:
    with pytest.raises(ShapeError, match=f"Tuning.{next(iter(given))}="):
        Tuning(**given)


def test_host_page_is_a_view_of_the_engines_memory() -> None:
    memory = torch.zeros(4, 3, 2, 16, dtype=torch.uint8)  # pages, rows, K and V, bytes
    rows = rows_of((memory.data_ptr() + 16, 96, 3, 32, 16, 0))
    table = KVTable.from_bytes(rows, 1, "cpu")
    table.host_page(0, 0, 2)[...] = 9
    assert memory[2, :, 1].eq(9).all() and memory.sum() == 9 * 48
