"""Breaks of the store, one guard each, and the tests that must notice: a proof that those tests can fail.

`tests/attack/test_mutations.py` runs them.  When a guard moves, its mutation must move too: text that is not found
exactly once fails there.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A replacement in one file of `flatcake`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One guard taken out."""

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    """Each of them must go red."""


def mutation(name: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    """The usual kind: one edit."""
    return Mutation(name=name, edits=(Edit(file=file, old=old, new=new),), tests=tests)


_DATAPLANE, _CATALOG, _ATTACK, _CASES = (
    "tests/test_dataplane.py",
    "tests/test_catalog.py",
    "tests/attack",
    "tests/cases",
)

MUTATIONS = (
    # -- no wrong bytes ---------------------------------------------------------------------------------
    mutation(
        "checksums are not compared",
        "io/judging.py",
        "self._copy.sums_of(rows), self._wanted.of(rows)",
        "self._copy.sums_of(rows), self._copy.sums_of(rows)",
        f"{_DATAPLANE}::test_a_flipped_bit_fails_its_block",
        f"{_DATAPLANE}::test_pieces_in_each_others_place_fail",
    ),
    mutation(
        "half of the key is not compared",
        "index.py",
        "& (self._last.take(slot) == last[row])",
        "",
        "tests/test_index.py::test_both_halves_are_compared",
    ),
    Mutation(
        name="a lease believes an old match",
        edits=(
            Edit(
                file="store.py",
                old="self.catalog.lease(match.keys, self._clock.now_ns(), hold_ns)",
                new="self.catalog.lease(match.keys, self._clock.now_ns(), hold_ns, match.hit)",
            ),
            Edit(
                file="catalog.py",
                old="hold_ns: int | None = None) -> LeaseEntry:",
                new="hold_ns: int | None = None, old: object = None) -> LeaseEntry:",
            ),
            Edit(file="catalog.py", old="hit = self.match(keys.copy())", new="hit = old or self.match(keys.copy())"),
        ),
        tests=(f"{_CASES}/test_sharing.py::test_b15_promise_loss_fetch",),
    ),
    mutation(
        "space is free under those who read it",
        "space.py",
        "        if scope.pins:\n            self.draining.append(scope)\n        else:\n            self._free(scope)",
        "        self._free(scope)\n        if scope.pins:\n            self.draining.append(scope)",
        "tests/test_space.py::test_a_withdrawn_scope_keeps_its_extents_until_the_last_pin",
        f"{_CASES}/test_sharing.py::test_b15_promise_loss_fetch",
    ),
    mutation(
        "a plan lets its pins go",
        "catalog.py",
        "            for scope in entry.pinned:\n                self.space.pin(scope)\n            self._ledger",
        "            entry.pinned = []\n            self._ledger",
        f"{_ATTACK}/test_hangs.py::test_a_late_write_never_reaches_the_next_tenant",
        f"{_CASES}/test_sharing.py::test_b14_reclaim_waits_for_a_read_under_way",
    ),
    mutation(
        "pages are written after they were given back",
        "io/reading.py",
        "            if restore.dropped:\n                return None\n",
        "",
        f"{_DATAPLANE}::test_a_read_that_returns_late_never_reaches_the_pages",
        f"{_CASES}/test_sharing.py::test_b17_a_read_that_is_cancelled_lands_in_its_slot_alone",
    ),
    mutation(
        "a save does not wait for its pages' producer",
        "io/writing.py",
        "parts.device.wait(self._stream, after)\n",
        "pass\n",
        f"{_ATTACK}/test_streams.py::test_pages_are_read_after_their_producer_and_written_after_their_reader",
    ),
    mutation(
        "a restore does not wait for its pages' last reader",
        "io/reading.py",
        "parts.device.wait(self._stream, after)\n",
        "pass\n",
        f"{_ATTACK}/test_streams.py::test_pages_are_read_after_their_producer_and_written_after_their_reader",
    ),
    mutation(
        "a scatter does not wait for the copies to its slot",
        "io/reading.py",
        "self._parts.device.wait(self._stream, point)\n",
        "pass\n",
        f"{_ATTACK}/test_streams.py::test_a_scatter_waits_for_its_own_tile_and_for_none_that_was_asked_for_later",
    ),
    mutation(
        "a tile is scattered before its pieces are made",
        "io/reading.py",
        "        if tile >= self._tiles_ready and not self._restore.dropped:\n",
        "        if not self._tiles_ready and not self._restore.dropped:\n",
        "tests/io/test_reading.py::test_a_tile_is_not_scattered_before_its_pieces_are_made",
    ),
    mutation(
        "tables are used again while they are on their way to the device",
        "io/tilecopy.py",
        "return fits and self.is_up",
        "return fits",
        "tests/io/test_tilecopy.py::test_a_plan_leaves_tables_alone_that_are_still_on_their_way",
    ),
    mutation(
        "a slot is used again before its scatter",
        "io/shelf.py",
        "        if after is NOW:\n            self.free.append(buffer)\n        else:\n"
        "            self.coming.setdefault(line, deque()).append((after, buffer))\n",
        "        if True:\n            self.free.append(buffer)\n        else:\n"
        "            self.coming.setdefault(line, deque()).append((after, buffer))\n",
        f"{_ATTACK}/test_streams.py::test_a_slot_is_used_again_only_when_the_device_has_read_it",
    ),
    mutation(
        "a slot is written before it was gathered",
        "io/writing.py",
        "self._parts.pump.when(event, lambda: self._on_gathered(tile, slot), self)",
        "self._on_gathered(tile, slot)",
        f"{_ATTACK}/test_streams.py::test_a_save_writes_only_what_the_device_has_gathered",
    ),
    mutation(
        "short reads count as whole",
        "io/reading.py",
        "[] if results == self._work.whole[tile] else",
        "[] if not any(result.error for result in results) else",
        f"{_DATAPLANE}::test_a_bad_read_delivers_the_blocks_before_it",
    ),
    mutation(
        "errors of reads and writes are not looked at",
        "io/tilebatch.py",
        "piece_end > good_end[read_of]",
        "piece_end < 0",
        f"{_DATAPLANE}::test_a_bad_read_delivers_the_blocks_before_it",
        f"{_CASES}/test_writing.py::test_b05_one_bad_member_in_a_batch",
    ),
    mutation(
        "a rank reads for a stale plan",
        "io/judging.py",
        "if self._parts.book.is_stale(ref):",
        "if False:",
        f"{_DATAPLANE}::test_a_plan_for_an_earlier_tenant_is_refused",
    ),
    mutation(
        "a rank writes for a stale plan",
        "io/writing.py",
        "if any(parts.book.is_stale(ref) for ref in self._recording.runs):",
        "if False:",
        f"{_DATAPLANE}::test_a_plan_for_an_earlier_tenant_is_refused",
    ),
    mutation(
        "a record of another generation is believed",
        "io/records.py",
        "if _HEADER.unpack_from(record.raw.data) != self._header(record.ref):",
        "if _HEADER.unpack_from(record.raw.data)[:3] != self._header(record.ref)[:3]:",
        f"{_DATAPLANE}::test_a_damaged_header_of_a_record_is_a_miss",
    ),
    mutation(
        "checksums leave the generation out",
        "kernels/checksum.py",
        "_mix64(_mix64(states, layers), generations)",
        "_mix64(_mix64(states, layers), generations * np.uint64(0))",
        "tests/kernels/test_checksum.py",
    ),
    # -- an engine's blocks -----------------------------------------------------------------------------
    mutation(
        "an engine's blocks are not held while they are saved",
        "engines/vllm/saving.py",
        "            self._hold(plan.plan_id, keys, table)\n",
        "            self._held[plan.plan_id] = _Held(keys, [])\n",
        "tests/engines/vllm/test_scheduling.py::test_blocks_are_held_until_their_save_is_over",
    ),
    mutation(
        "of a load with windows a shorter prefix is kept",
        "engines/vllm/groups.py",
        "return len(self.each) == 1 and not self.window_min",
        "return len(self.each) == 1",
        "tests/engines/vllm/test_scheduling.py::test_random_traffic_runs_on_right_bytes_only",
    ),
    # -- publish last -----------------------------------------------------------------------------------
    mutation(
        "a turn is visible before it is written",
        "catalog.py",
        "        return self._open(entry, runs_of(reserved.slots, reserved.blocks), now_ns)",
        "        self.space.index.publish(keys[reserved.blocks], targets[reserved.blocks])\n"
        "        return self._open(entry, runs_of(reserved.slots, reserved.blocks), now_ns)",
        f"{_CATALOG}::test_nothing_is_visible_before_every_rank_has_reported",
    ),
    mutation(
        "a late save is published",
        "catalog.py",
        "                plan.timed_out = True\n                plan.note_failure",
        "                plan.timed_out = True\n                (lambda *a: None)",
        f"{_CATALOG}::test_a_late_save_keeps_its_space_until_its_rank_reports_and_is_not_published",
    ),
    mutation(
        "a save reports before its records are written",
        "io/writing.py",
        "self._recording.start(self._sums, self._on_recorded)",
        "self._end()",
        f"{_DATAPLANE}::test_records_are_read_back_from_their_medium",
    ),
    mutation(
        "the last to publish wins",
        "settle.py",
        "scope.session is None else MISS\n",
        "scope.session is None else np.uint64(0)\n",
        f"{_CATALOG}::test_the_first_to_publish_wins",
    ),
    mutation(
        "a newer address goes with an older scope",
        "index.py",
        "rows = np.flatnonzero(current == gvas)",
        "rows = np.flatnonzero(current != MISS)",
        "tests/test_index.py::test_withdraw_leaves_a_newer_address_alone",
    ),
    # -- honest prefix, reset ---------------------------------------------------------------------------
    mutation(
        "a result does not wait for all verdicts",
        "io/reading.py",
        "or unstarted or not self._judging.is_idle:",
        "or unstarted:",
        f"{_DATAPLANE}::test_a_record_that_comes_last_is_waited_for",
    ),
    mutation(
        "a restore that begins does not see a reset",
        "store.py",
        "if plan.release != self.catalog.release_number:",
        "if False:",
        f"{_ATTACK}/test_callers.py::test_a_restore_that_races_with_reset_is_a_miss",
    ),
    # -- restart ----------------------------------------------------------------------------------------
    mutation(
        "a row of another identity is believed",
        "manifest.py",
        'digest_size=_DIGEST_BYTES, key=origin, person=b"flatcake.row"',
        'digest_size=_DIGEST_BYTES, person=b"flatcake.row"',
        "tests/test_manifest.py::test_a_row_of_another_origin_is_no_row",
    ),
    mutation(
        "what was reclaimed stays in the manifest",
        "space.py",
        "            self.manifest.drop_scope(scope.scope_id)",
        "            pass",
        "tests/test_reopen.py::test_a_reclaimed_scope_is_forgotten_before_its_bytes_are_anothers",
    ),
    mutation(
        "a turn is committed after it is visible",
        "catalog.py",
        "            numbers = [self.space.manifest.commit_turn(row, generation) for row in rows]\n"
        "            with self._lock:  # A deletion that waits drops these rows as well.\n"
        "                plan.committed = [number for number in numbers if number]\n"
        "                return self._end(plan)",
        "            with self._lock:\n"
        "                found = self._end(plan)\n"
        "            plan.committed = [self.space.manifest.commit_turn(row, generation) for row in rows]\n"
        "            return found",
        "tests/test_reopen.py::test_a_turn_is_committed_before_it_is_visible_and_without_the_lock",
    ),
    mutation(
        "a flush leaves the data out",
        "keeper.py",
        "return self._sync_pool() and self.manifest.checkpoint()",
        "return self.manifest.checkpoint()",
        f"{_ATTACK}/test_crash_states.py::test_what_a_power_failure_leaves_holds_every_promise",
    ),
    mutation(
        "a flush leaves the manifest out",
        "keeper.py",
        "return self._sync_pool() and self.manifest.checkpoint()",
        "return self._sync_pool()",
        f"{_ATTACK}/test_crash_states.py::test_what_a_power_failure_leaves_holds_every_promise",
    ),
    mutation(
        "a reset returns before it is on the disk",
        "io/manifestdb.py",
        "return self._transact([manifestrows.dropping_below(scope_limit)]) and self._checkpoint()",
        "return self._transact([manifestrows.dropping_below(scope_limit)])",
        f"{_ATTACK}/test_crash_states.py::test_what_a_power_failure_leaves_holds_every_promise",
    ),
    mutation(
        "a deleted session stays in the manifest",
        "retention.py",
        "            is_written = self._space.manifest.checkpoint()",
        "            is_written = True",
        f"{_ATTACK}/test_crash_states.py::test_what_a_power_failure_leaves_holds_every_promise",
    ),
    mutation(
        "a deletion does not wait for the end of a commit",
        "catalog.py",
        "            with self._lock:  # A deletion that waits drops these rows as well.\n"
        "                plan.committed = [number for number in numbers if number]\n"
        "                return self._end(plan)",
        "            pass\n"
        "        with self._lock:\n"
        "            plan.committed = [number for number in numbers if number]\n"
        "            return self._end(plan)",
        "tests/test_retention.py::test_a_row_that_was_committed_meanwhile_is_gone_when_a_deletion_returns",
    ),
    mutation(
        "a close writes down what was deleted meanwhile",
        "keeper.py",
        "            rows = [row for row in rows if find(row.scope_id) is not None]\n",
        "",
        "tests/test_retention_store.py::test_a_session_that_is_deleted_during_a_close_does_not_come_back",
    ),
    mutation(
        "a close leaves the data out",
        "keeper.py",
        "clean, find = self._sync_pool(), ",
        "clean, find = True, ",
        f"{_ATTACK}/test_crash_states.py::test_what_a_power_failure_leaves_holds_every_promise",
    ),
    mutation(
        "the dump of DRAM is not synced",
        "io/dramdump.py",
        "        files.sync(fd)\n",
        "",
        f"{_ATTACK}/test_crash_states.py::test_what_a_power_failure_leaves_holds_every_promise",
    ),
    # -- directories ------------------------------------------------------------------------------------
    mutation(
        "a directory has no lock",
        "io/seam.py",
        "            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "",
        "tests/io/test_seam.py",
    ),
    mutation(
        "links are followed",
        "io/seam.py",
        "os.O_CLOEXEC | os.O_NOFOLLOW",
        "os.O_CLOEXEC",
        f"{_ATTACK}/test_ownership.py::test_what_is_no_file_of_ours_is_refused_and_kept",
    ),
    mutation(
        "a buffer is given back before its batch is answered",
        "io/staged.py",
        "        try:\n            done(results, event)\n"
        "        finally:  # Not before: `close` believes that what has a buffer has not been answered.\n"
        "            self._reads.give_back(buffer, event)\n",
        "        self._reads.give_back(buffer, event)\n        done(results, event)\n",
        "tests/io/test_staged.py::test_no_close_is_clean_while_somebody_is_being_answered",
    ),
    mutation(
        "a read runs on from extent to extent where layers come at once",
        "io/order.py",
        "opens[:, extents] = True",
        "opens[:, 0] = True",
        "tests/io/test_plan.py::test_small_neighbours_are_no_one_read_where_a_few_layers_come_at_once",
    ),
)
