"""The index against a dict: same answers, no rot, and no wrong address beside a writer."""

import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatcake.errors import AddressError, CapacityError, ConfigError, ShapeError
from flatcake.gva import GVA_LIMIT, Medium, decode, encode_array
from flatcake.index import MISS, Index

WORST = 2**64 - 1


def as_keys(pairs):
    return np.array(pairs, np.uint64).reshape(-1, 2)


def as_gvas(values):
    return np.array(values, np.uint64)


def random_keys(rng, count):
    return rng.integers(0, 2**64, (count, 2), dtype=np.uint64)


def addresses(count, start=0):
    return encode_array(Medium.SSD, 1, (start + np.arange(count)) * 4096)


def keys_of_one_home(index, count, rng):
    """Random keys that all live in the same bucket of `index`."""
    found = np.empty((0, 2), np.uint64)
    while len(found) < count:
        keys = random_keys(rng, 100_000)
        homes = index._home(keys[:, 0].copy(), keys[:, 1].copy())
        found = np.concatenate([found, keys[homes == index._buckets - 1]])  # The last bucket wraps to the first.
    return found[:count]


class Model:
    """What an index means: a dict, one row after another."""

    def __init__(self, entries_max):
        self.entries_max, self.entries = entries_max, {}

    def publish(self, pairs, gvas):
        if len(self.entries.keys() | set(pairs)) > self.entries_max:
            return None
        old = []
        for pair, gva in zip(pairs, gvas, strict=True):
            old.append(self.entries.get(pair, WORST))
            self.entries[pair] = gva
        return old

    def claim(self, pairs, gvas, over):
        before = [self.entries.get(pair, WORST) for pair in pairs]
        mine = [row for row, gva in enumerate(before) if gva >= over]
        done = self.publish([pairs[row] for row in mine], [gvas[row] for row in mine])
        return None if done is None else before

    def withdraw(self, pairs, gvas):
        before = len(self.entries)
        for pair, gva in zip(pairs, gvas, strict=True):
            if self.entries.get(pair) == gva:
                del self.entries[pair]
        return before - len(self.entries)


def compare(index, model, universe):
    index.check()
    assert len(index) == len(model.entries)
    assert index.lookup(as_keys(universe)).tolist() == [model.entries.get(pair, WORST) for pair in universe]


# Few values, so that keys share one half, repeat in a batch, and equal what empty slots hold.
HALF = st.sampled_from([0, 1, 2, 3, 2**32, 2**63, WORST - 1, WORST])
UNIVERSE = [(a, b) for a in (0, 1, 2, 3, 2**32, 2**63, WORST - 1, WORST) for b in (0, 1, 2, 3, 2**32, 2**63, WORST)]
PAIR = st.tuples(HALF, HALF)
OVER = (np.uint64(0), np.uint64(2**60), MISS)
"""What `claim` may be asked to supersede: everything, SSD alone, nothing."""
BATCH = st.lists(st.tuples(PAIR, st.sampled_from([0, 1, 4096, 2**60, GVA_LIMIT - 1])), max_size=12)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.sampled_from(["publish", "withdraw", *OVER]), BATCH), max_size=12),
)
def test_index_means_what_a_dict_means(entries_max, operations):
    index, model = Index(entries_max), Model(entries_max)
    for operation, batch in operations:
        pairs, values = [pair for pair, _ in batch], [gva for _, gva in batch]
        keys, gvas = as_keys(pairs), as_gvas(values)
        if operation == "withdraw":
            assert index.withdraw(keys, gvas) == model.withdraw(pairs, values)
            compare(index, model, UNIVERSE)
            continue
        over = () if operation == "publish" else (operation,)
        expected = model.claim(pairs, values, *over) if over else model.publish(pairs, values)
        change = index.claim if over else index.publish
        if expected is None:
            with pytest.raises(CapacityError, match="entries_max"):
                change(keys, gvas, *over)
        else:
            assert change(keys, gvas, *over).tolist() == expected
        compare(index, model, UNIVERSE)


@pytest.mark.parametrize("seed", range(4))
def test_keys_that_share_one_bucket_overflow_and_come_back(seed):
    rng = np.random.default_rng(seed)
    index, model = Index(600), Model(600)
    keys = np.concatenate([keys_of_one_home(index, 250, rng), random_keys(rng, 350)])
    universe = [tuple(row) for row in keys.tolist()]
    for _ in range(60):
        picked = rng.integers(0, len(keys), rng.integers(0, 120))
        values = (rng.integers(0, 3, len(picked)) * 4096).astype(np.uint64)
        pairs = [universe[row] for row in picked]
        if rng.random() < 0.5:
            assert index.publish(keys[picked], values).tolist() == model.publish(pairs, values.tolist()), seed
        else:
            values = as_gvas([model.entries.get(pair, 0) for pair in pairs])
            assert index.withdraw(keys[picked], values) == model.withdraw(pairs, values.tolist()), seed
        compare(index, model, universe)
    assert len(index.reach_counts()) > 10, "the keys were meant to overflow their bucket"
    index.withdraw(keys, as_gvas([model.entries.get(pair, 0) for pair in universe]))
    index.check()
    assert len(index) == 0 and index.reach_counts() == []
    assert not index._passed.any(), "an empty index still makes searches go on"


@pytest.mark.parametrize("entries_max", [1, 2, 5, 6, 100, 1000])
def test_index_can_be_filled_to_the_last_entry_and_no_further(entries_max):
    rng = np.random.default_rng(entries_max)
    index = Index(entries_max)
    keys, gvas = random_keys(rng, entries_max), addresses(entries_max)
    assert (index.publish(keys, gvas) == MISS).all()
    index.check()
    extra = random_keys(rng, 1)
    with pytest.raises(CapacityError, match=r"1 new entries, 0 free"):
        index.publish(np.concatenate([keys[:1], extra]), addresses(2, start=10**6))
    index.check()
    assert index.lookup(keys).tolist() == gvas.tolist(), "a refused batch had an effect"
    assert index.lookup(extra)[0] == MISS
    assert index.publish(keys, addresses(entries_max, start=7)).tolist() == gvas.tolist()


def test_repeated_key_in_a_batch_counts_once_and_the_last_address_stays():
    index = Index(2)
    old = index.publish(as_keys([(1, 1), (2, 2), (1, 1), (1, 1)]), as_gvas([10, 20, 11, 12]))
    assert old.tolist() == [WORST, WORST, 10, 11]
    assert index.lookup(as_keys([(1, 1), (2, 2)])).tolist() == [12, 20]
    assert len(index) == 2


def test_withdraw_leaves_a_newer_address_alone():
    index = Index(4)
    key = as_keys([(7, 8)])
    index.publish(key, as_gvas([100]))
    index.publish(key, as_gvas([200]))
    assert index.withdraw(key, as_gvas([100])) == 0
    assert index.lookup(key).tolist() == [200]
    assert index.withdraw(np.repeat(key, 3, axis=0), as_gvas([100, 200, 200])) == 1
    assert index.lookup(key)[0] == MISS and len(index) == 0
    assert index.withdraw(key, as_gvas([200])) == 0
    index.check()


def test_both_halves_are_compared():
    index = Index(8)
    index.publish(as_keys([(1, 2), (3, 4)]), as_gvas([0, 1]))
    assert index.lookup(as_keys([(1, 4), (3, 2), (2, 1), (1, 0), (0, 2), (1, 2)])).tolist() == [WORST] * 5 + [0]


def test_every_valid_address_can_be_held_and_no_other():
    index = Index(8)
    good = as_gvas([0, 2**60 - 1, 2**60, GVA_LIMIT - 1])
    keys = as_keys([(0, 0), (0, WORST), (WORST, 0), (WORST, WORST)])
    assert index.lookup(keys).tolist() == [WORST] * 4, "an empty slot passed for a key"
    index.publish(keys, good)
    assert index.lookup(keys).tolist() == good.tolist()
    with pytest.raises(AddressError):
        decode(int(MISS))
    for bad in (int(MISS), WORST - 1, GVA_LIMIT):
        for act in (index.publish, index.withdraw):
            with pytest.raises(AddressError, match=f"{bad:#x}"):
                act(keys[:2], as_gvas([0, bad]))
    index.check()
    assert index.lookup(keys).tolist() == good.tolist(), "a refused batch had an effect"


def test_lookup_has_no_side_effect():
    rng = np.random.default_rng(0)
    index = Index(1000)
    keys = random_keys(rng, 800)
    index.publish(keys, addresses(800))
    arrays = (index._first, index._last, index._gvas, index._passed)
    before = [array.tobytes() for array in arrays]
    probe = np.concatenate([keys, random_keys(rng, 800), keys])
    probe.flags.writeable = False
    assert (index.lookup(probe) != MISS).sum() == 1600
    assert index.lookup(probe[:0]).shape == (0,)
    assert [array.tobytes() for array in arrays] == before


def test_structured_keys_spread_like_random_ones():
    for keys in (
        as_keys([(0, i) for i in range(5000)]),
        as_keys([(i, 0) for i in range(5000)]),
        as_keys([(i << 32, i << 48) for i in range(5000)]),
        as_keys([(i, i) for i in range(5000)]),
    ):
        index = Index(5000)
        index.publish(keys, addresses(5000))
        index.check()
        assert len(index.reach_counts()) <= 24
        assert index.lookup(keys).tolist() == addresses(5000).tolist()


def test_churn_of_many_times_the_capacity_does_not_rot():
    rng = np.random.default_rng(1)
    capacity, batch = 20_000, 500
    index = Index(capacity)
    keys, gvas = random_keys(rng, capacity), addresses(capacity)
    index.publish(keys, gvas)
    fresh = index.reach_counts()
    size_bytes = index.size_bytes
    for turn in range(20 * capacity // batch):
        rows = rng.choice(capacity, batch, replace=False)
        assert index.withdraw(keys[rows], gvas[rows]) == batch
        keys[rows], gvas[rows] = random_keys(rng, batch), addresses(batch, start=(turn + 1) * capacity)
        assert (index.publish(keys[rows], gvas[rows]) == MISS).all()
    index.check()
    assert index.lookup(keys).tolist() == gvas.tolist()
    worn = index.reach_counts()
    assert sum(worn) == sum(fresh) == len(index) == capacity
    assert index.size_bytes == size_bytes
    assert worn[0] >= 0.85 * capacity, (worn, "keys left their home")
    assert len(worn) <= 24, worn
    # Misses stop as early as in a fresh index of the same load: few buckets are passed by anyone.
    assert np.count_nonzero(index._passed) <= 0.35 * len(index._passed)
    index.withdraw(keys, gvas)
    assert not index._passed.any()


def test_size_is_within_the_design_for_five_million_entries():
    index = Index(5_000_000)  # Empty pages: costs address space, hardly memory.
    assert index.size_bytes <= 200_000_000 < 256 * 2**20
    assert index.lookup(as_keys([(1, 2)]))[0] == MISS


def test_buckets_do_not_straddle_cache_lines():
    index = Index(1000)
    assert all(array.ctypes.data % 64 == 0 for array in (index._first, index._last, index._gvas))


@pytest.mark.parametrize("last", [0, 1])
def test_readers_beside_a_writer_never_see_a_foreign_address(last):
    """Key (i, last * i) only ever has an address that says i; keys that stay are found at every moment."""
    index = Index(512)
    stay = numbered_keys(0, 200, last)
    index.publish(stay, address_of(stay, 0))
    newest, done = [0], threading.Event()
    wrong, looked = [], []

    def read():
        while not done.is_set():
            # The keys that are in the table about now; each comes once and never again.
            passing = numbered_keys(newest[0], 3000, last)
            keys = np.concatenate([stay, passing])
            gvas = index.lookup(keys)
            hit = gvas != MISS
            if not hit[: len(stay)].all() or (gvas[hit] >> np.uint64(20) != keys[hit, 0]).any():
                wrong.append((keys, gvas))
            looked.append(int(hit.sum()))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for turn in range(1000):
        newest[0] = 1000 + turn * 300
        batch = numbered_keys(newest[0], 300, last)
        index.publish(batch, address_of(batch, turn % 256))
        index.publish(stay, address_of(stay, (turn + 1) % 256))
        index.withdraw(batch, address_of(batch, turn % 256))
    done.set()
    for reader in readers:
        reader.join()
    assert looked and not wrong
    index.check()
    assert len(index) == len(stay)


def numbered_keys(start, count, last):
    return (start + np.arange(count, dtype=np.uint64))[:, None] * as_gvas([1, last])


def address_of(keys, version):
    return (keys[:, 0] << np.uint64(20)) + np.uint64(version << 12)


@pytest.mark.parametrize("entries_max", [0, -1, 1.5, True, "8", None, 2**32])
def test_index_refuses_a_bad_size(entries_max):
    with pytest.raises(ConfigError, match="entries_max="):
        Index(entries_max)


@pytest.mark.parametrize(
    "keys",
    [
        [(1, 2)],
        np.zeros(2, np.uint64),
        np.zeros((2, 3), np.uint64),
        np.zeros((1, 2), np.int64),
        np.zeros((1, 2), ">u8"),
        np.zeros((1, 2, 1), np.uint64),
    ],
)
def test_calls_refuse_other_keys(keys):
    index = Index(4)
    for call in (
        lambda: index.lookup(keys),
        lambda: index.publish(keys, as_gvas([1])),
        lambda: index.withdraw(keys, as_gvas([1])),
    ):
        with pytest.raises(ShapeError, match=r"keys: expected uint64 \[n, 2\]"):
            call()


@pytest.mark.parametrize("gvas", [[1], as_gvas([1, 2]), as_gvas([]), np.array([1]), as_gvas([[1]])])
def test_calls_refuse_other_addresses(gvas):
    index = Index(4)
    for call in (index.publish, index.withdraw):
        with pytest.raises(ShapeError, match=r"gvas: expected uint64 \[1\]"):
            call(as_keys([(1, 2)]), gvas)
    assert len(index) == 0


def test_watch_tells_of_every_change_in_the_order_asked() -> None:
    index, seen = Index(100), []
    index.watch = lambda keys, before, after: seen.append((keys[:, 0].tolist(), before.tolist(), after.tolist()))
    keys = np.array([[9, 1], [3, 1], [7, 1]], np.uint64)
    miss = int(MISS)
    index.publish(keys, np.array([10, 20, 30], np.uint64))
    index.publish(keys[1:], np.array([21, 30], np.uint64))
    index.withdraw(keys, np.array([10, 20, 30], np.uint64))
    index.withdraw(keys, np.array([10, 20, 30], np.uint64))
    assert seen == [
        ([9, 3, 7], [miss] * 3, [10, 20, 30]),
        ([3, 7], [20, 30], [21, 30]),
        ([9, 7], [10, 30], [miss] * 2),
    ]
