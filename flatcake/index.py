"""The index: key -> address of a published block, by open addressing over numpy arrays.  Paper §3.2.

Buckets of 8 slots; a key lives in the first bucket from its home that had room.  Every bucket counts the
live keys that passed it when it was full, so a search stops at the first bucket that none has passed.
Deleting frees a slot for good: there are no tombstones, no rebuilds, and no key ever moves.
Sized once; knows neither media nor extents, and never reads tokens.
Read path:  keys -> [index] -> lease -> [index] -> plan
"""

from collections.abc import Callable

import numpy as np

from flatcake.errors import CapacityError, ConfigError
from flatcake.gva import GVA_LIMIT, MEDIUM_LIMIT
from flatcake.keyrows import Numbers, Words, are_distinct, by_medium, check_gvas, grouped, halves

MISS = np.uint64(2**64 - 1)
"""What `lookup` returns for an absent key; of a reserved medium, so never an address."""

_LANES = 8  # Slots of a bucket: one cache line of each array.
_LIVE_MEAN = 5  # Live slots of a bucket when the index is full: 2.5 % of the keys leave their home.
_LINE_WORDS = 8
_HALF = np.uint64(32)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_MIX_LAST = np.uint64(0xC2B2AE3D27D4EB4F)


class Index:
    """Key -> address for at most `entries_max` blocks.  Any number of readers beside one writer.

    `lookup` takes no lock.  What it returns is a hint: a key that is being published or withdrawn meanwhile
    is found or not, and an address may be superseded the moment after.  `publish` and `withdraw` must be
    called by one thread at a time.

    Args:
        entries_max: Most live entries; memory is taken for them at once and never grows.

    Raises:
        ConfigError: `entries_max` is not an integer, 1 or more.

    Cost: 39 bytes an entry: 24 a slot at 5 live slots of 8, and a counter a bucket.
    """

    def __init__(self, entries_max: int) -> None:
        if not isinstance(entries_max, int) or isinstance(entries_max, bool) or not 1 <= entries_max < 2**32:
            raise ConfigError(f"entries_max={entries_max!r}: expected an integer from 1 to 2**32 - 1")
        self.entries_max = entries_max
        self._buckets = -(-entries_max // _LIVE_MEAN)
        self._first = _words(self._buckets * _LANES, 0)
        self._last = _words(self._buckets * _LANES, 0)
        self._gvas = _words(self._buckets * _LANES, int(MISS))  # MISS marks an empty slot.
        self._passed = np.zeros(self._buckets, np.uint32)
        self._live = 0
        self._on_medium = np.zeros(MEDIUM_LIMIT, np.int64)
        self.watch: Callable[[Words, Words, Words], object] | None = None
        """Called after each change with keys, and their addresses before and after it, `MISS` where there is none."""

    def __len__(self) -> int:
        return self._live

    def blocks_on(self, medium: int) -> int:
        """Live entries whose address is on one medium."""
        return int(self._on_medium[medium])

    @property
    def size_bytes(self) -> int:
        """Memory of all arrays, in bytes; constant."""
        return sum(array.nbytes for array in (self._first, self._last, self._gvas, self._passed))

    def lookup(self, keys: Words) -> Words:
        """Find the addresses of many keys.  No side effect, no lock.

        Args:
            keys: uint64 [n, 2], as `keys.chain` returns; may repeat.

        Returns:
            uint64 [n]: the address of each key, or `MISS`.

        Raises:
            ShapeError: `keys` has another shape or dtype.

        Cost: O(n), about three cache lines a key.
        """
        return self._find(*halves(keys))[1]

    def publish(self, keys: Words, gvas: Words) -> Words:
        """Make blocks findable; a key that is there already gets the new address.

        A batch means what its rows mean one after another: of a repeated key the last address stays.

        Args:
            keys: uint64 [n, 2].
            gvas: uint64 [n], the address of each key's block, all of whose bytes are on the medium.

        Returns:
            uint64 [n]: the address that each row superseded, or `MISS` where the key was new.

        Raises:
            ShapeError: A shape or dtype differs from the above.
            AddressError: A value of `gvas` is no valid address.
            CapacityError: More than `entries_max` entries would be live.

            Nothing has changed after any of them.

        Cost: O(n log n).
        """
        first, last = halves(keys)
        check_gvas(gvas, len(first))
        if are_distinct(first):
            slots, old = self._find(first, last)
            self._put(keys, gvas, slots, old)
            return old
        order, starts = grouped(first, last)
        heads, tails = order[starts], order[np.roll(starts, -1)]  # First and last row of each distinct key.
        given = tails.argsort()
        heads, tails = heads[given], tails[given]
        slots, old = self._find(first[heads], last[heads])
        self._put(keys[tails], gvas[tails], slots, old)
        superseded = np.empty(len(first), np.uint64)
        superseded[order[1:]] = gvas[order[:-1]]
        superseded[heads] = old
        return superseded

    def claim(self, keys: Words, gvas: Words, over: np.uint64) -> Words:
        """`publish` the rows whose key is absent or has an address of `over` or more, and leave the others alone.

        Returns:
            uint64 [n]: the address that each key had before, or `MISS`, which is above all addresses.
        """
        first, last = halves(keys)
        check_gvas(gvas, len(first))
        slots, old = self._find(first, last)
        mine = old >= over
        if mine.all() and are_distinct(first):
            self._put(keys, gvas, slots, old)
        else:
            self.publish(keys[mine], gvas[mine])
        return old

    def withdraw(self, keys: Words, gvas: Words) -> int:
        """Remove the entries that still have the given address.

        A key that is absent, or that has been published with another address since, is left alone: a
        reclaimed block never takes a newer copy with it.

        Args:
            keys: uint64 [n, 2]; may repeat.
            gvas: uint64 [n], the address that each entry must have to be removed.

        Returns:
            Number of entries removed.

        Raises:
            ShapeError: A shape or dtype differs from the above.
            AddressError: A value of `gvas` is no valid address.

            Nothing has changed after either.

        Cost: O(n log n).
        """
        first, last = halves(keys)
        check_gvas(gvas, len(first))
        slots, current = self._find(first, last)
        rows = np.flatnonzero(current == gvas)
        slots, kept = np.unique(slots[rows], return_index=True)
        rows = rows[kept]
        self._gvas[slots] = MISS
        np.subtract.at(self._passed, self._passed_by(self._home(first[rows], last[rows]), slots), 1)
        self._live -= len(slots)
        self._on_medium -= by_medium(gvas[rows])
        if self.watch is not None and len(rows):
            rows = np.sort(rows)
            self.watch(keys[rows], gvas[rows], np.full(len(rows), MISS, np.uint64))
        return len(slots)

    def reach_counts(self) -> list[int]:
        """Count live entries by distance: item d is those found d buckets after their home.  Cost: O(slots)."""
        slots = np.flatnonzero(self._gvas != MISS)
        far = (slots // _LANES - self._home(self._first[slots], self._last[slots])) % self._buckets
        return [int(count) for count in np.bincount(far)]

    def check(self) -> None:
        """Assert every invariant.  Without a writer beside it.  Cost: O(slots log slots)."""
        slots = np.flatnonzero(self._gvas != MISS)
        first, last = self._first[slots], self._last[slots]
        assert len(slots) == self._live <= self.entries_max, (len(slots), self._live, self.entries_max)
        assert (self._gvas[slots] < GVA_LIMIT).all(), "an entry holds no valid address"
        assert (self._on_medium == by_medium(self._gvas[slots])).all(), "media are counted wrong"
        assert grouped(first, last)[1].all(), "a key is stored twice"
        found, gvas = self._find(first, last)
        assert (found == slots).all() and (gvas == self._gvas[slots]).all(), "an entry cannot be found"
        passed = np.bincount(self._passed_by(self._home(first, last), slots), minlength=self._buckets)
        assert (passed == self._passed).all(), "a bucket's counter differs from the keys that passed it"

    def _home(self, first: Words, last: Words) -> Numbers:
        """Map keys to buckets.  Mixed, so that ready-made keys need not be random in every bit."""
        mixed = (first ^ last * _MIX_LAST) * _MIX >> _HALF
        return (mixed * np.uint64(self._buckets) >> _HALF).astype(np.int64)

    def _find(self, first: Words, last: Words) -> tuple[Numbers, Words]:
        """Find the slot (-1 where absent) and the address (`MISS` where absent) of each key."""
        slots, gvas = np.empty(len(first), np.int64), np.empty(len(first), np.uint64)
        slots.fill(-1)
        gvas.fill(MISS)
        rows, buckets, wanted = np.arange(len(first)), self._home(first, last), first
        firsts = self._first.reshape(-1, _LANES)
        for _ in range(self._buckets):
            nth, lane = (firsts.take(buckets, axis=0) == wanted[:, None]).nonzero()
            if len(nth):
                slot, row = buckets[nth] * _LANES + lane, rows[nth]
                # The halves are compared before and after the address is read.  A writer that gives the slot to
                # another key writes MISS, then the halves, then the address: one of the three gives it away.
                # Only a slot that went to another key and back in between is missed, and the lease catches that.
                gva = self._gvas.take(slot)
                same = (gva != MISS) & (self._first.take(slot) == first[row]) & (self._last.take(slot) == last[row])
                row = row[same]
                slots[row], gvas[row] = slot[same], gva[same]
                left = (gvas[rows] == MISS).nonzero()[0]
                left = left[self._passed.take(buckets[left]) > 0] if len(left) else left
            else:
                left = self._passed.take(buckets).nonzero()[0]
            if not len(left):
                break
            rows, buckets = rows[left], (buckets[left] + 1) % self._buckets
            wanted = first[rows]
        return slots, gvas

    def _put(self, keys: Words, gvas: Words, slots: Numbers, old: Words) -> None:
        """Give distinct keys their addresses; `_find` has just said where they are."""
        known = (slots >= 0).nonzero()[0]
        added = len(keys) - len(known)
        if self._live + added > self.entries_max:
            raise CapacityError(
                f"index: {added} new entries, {self.entries_max - self._live} free; withdraw some or raise entries_max"
            )
        self._on_medium += by_medium(gvas)
        fresh: Numbers | slice = slice(None)
        if len(known):
            self._gvas[slots[known]] = gvas[known]
            self._on_medium -= by_medium(old[known])
            fresh = (slots < 0).nonzero()[0]
        self._insert(keys[fresh, 0], keys[fresh, 1], gvas[fresh])
        self._live += added
        if self.watch is not None:
            self.watch(keys, old, gvas)

    def _insert(self, first: Words, last: Words, gvas: Words) -> None:
        """Give each of these absent, distinct keys the first free slot from its home; there is room for all."""
        buckets = self._home(first, last)
        table = self._gvas.reshape(-1, _LANES)
        while len(buckets):
            order = buckets.argsort(kind="stable")
            first, last, gvas, buckets = first[order], last[order], gvas[order], buckets[order]
            turn = np.arange(len(buckets)) - buckets.searchsorted(buckets)  # Place in its bucket's queue.
            free = table.take(buckets, axis=0) == MISS
            nth_free = free.cumsum(axis=1)
            fits = turn < nth_free[:, -1]
            slots = buckets * _LANES + (nth_free == turn[:, None] + 1).argmax(axis=1)
            done = fits.nonzero()[0]
            slots = slots[done]
            # The address comes last: until then the slot is empty to readers, whatever its halves are.
            self._first[slots] = first[done]
            self._last[slots] = last[done]
            self._gvas[slots] = gvas[done]
            if len(done) == len(buckets):
                break
            first, last, gvas, buckets = first[~fits], last[~fits], gvas[~fits], buckets[~fits]
            np.add.at(self._passed, buckets, 1)
            buckets = (buckets + 1) % self._buckets

    def _passed_by(self, homes: Numbers, slots: Numbers) -> Numbers:
        """List the buckets that each key passed between its home and its slot, once a key."""
        far = (slots // _LANES - homes) % self._buckets
        step = np.arange(far.sum()) - np.repeat(np.cumsum(far) - far, far)
        return np.asarray((np.repeat(homes, far) + step) % self._buckets)


def _words(count: int, value: int) -> Words:
    """Make an array whose buckets do not straddle cache lines."""
    raw = np.empty(count + _LINE_WORDS - 1, np.uint64)
    start = -raw.ctypes.data % (8 * _LINE_WORDS) // 8
    words = raw[start : start + count]
    words.fill(value)
    return words
