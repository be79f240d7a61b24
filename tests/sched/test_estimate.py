"""Expected restore times: unknown until measured, robust to outliers, and not fooled by fixed costs."""

from random import Random

from flatcake.sched.estimate import RestoreModel
from flatcake.units import MS, SECOND, GiB, MiB


def test_unmeasured_media_are_unknown() -> None:
    model = RestoreModel()
    assert model.expect_ns(dram_bytes=0, ssd_bytes=1) is None
    assert model.expect_ns(dram_bytes=0, ssd_bytes=0) == 0
    model.observe(dram_bytes=0, ssd_bytes=MiB, duration_ns=MS)
    assert model.expect_ns(dram_bytes=0, ssd_bytes=2 * MiB) == 2 * MS
    assert model.expect_ns(dram_bytes=1, ssd_bytes=MiB) is None


def test_restores_with_a_fixed_cost_are_within_a_factor_of_two() -> None:
    """5 ms and 3 GB/s, 20 % noise; a bandwidth learnt from one size would be wrong 10 times over at another."""
    random, model = Random(3), RestoreModel()

    def true_ns(size_bytes: int) -> int:
        return 5 * MS + size_bytes * SECOND // (3 * 10**9)

    for _ in range(200):
        size_bytes = random.choice([MiB, 16 * MiB, 128 * MiB, 2 * GiB])
        model.observe(
            dram_bytes=0, ssd_bytes=size_bytes, duration_ns=int(true_ns(size_bytes) * random.uniform(0.8, 1.2))
        )
    for size_bytes in (MiB, 3 * MiB, 16 * MiB, 50 * MiB, 400 * MiB, GiB, 4 * GiB):
        expected_ns = model.expect_ns(dram_bytes=0, ssd_bytes=size_bytes)
        assert expected_ns is not None
        assert true_ns(size_bytes) / 2 < expected_ns < true_ns(size_bytes) * 2


def test_one_hanging_read_does_not_show_and_a_lasting_change_does() -> None:
    model = RestoreModel()
    for _ in range(15):
        model.observe(dram_bytes=0, ssd_bytes=MiB, duration_ns=MS)
    model.observe(dram_bytes=0, ssd_bytes=MiB, duration_ns=60 * SECOND)
    assert model.expect_ns(dram_bytes=0, ssd_bytes=MiB) == MS
    for _ in range(8):
        model.observe(dram_bytes=0, ssd_bytes=MiB, duration_ns=3 * MS)
    assert model.expect_ns(dram_bytes=0, ssd_bytes=MiB) == 3 * MS


def test_hybrid_restores_teach_what_dram_does_not_explain() -> None:
    model = RestoreModel()
    model.observe(dram_bytes=MiB, ssd_bytes=0, duration_ns=MS)
    model.observe(dram_bytes=2 * MiB, ssd_bytes=MiB, duration_ns=7 * MS)
    assert model.expect_ns(dram_bytes=0, ssd_bytes=MiB) == 5 * MS
    assert model.expect_ns(dram_bytes=MiB, ssd_bytes=2 * MiB) == 11 * MS


def test_restores_that_moved_nothing_are_ignored() -> None:
    model = RestoreModel()
    model.observe(dram_bytes=0, ssd_bytes=0, duration_ns=SECOND)
    assert model.expect_ns(dram_bytes=0, ssd_bytes=MiB) is None
