"""The loop's inside: carries out what the scheduler says, on one daemon thread, over a real store.

The scheduler is pure and its actions are data; here they become leases closed, pages taken and given back, restores
begun and cancelled.  One lock guards the scheduler and the table of requests; store and engine are called without it.
Read path:  submit -> sched -> [driver]: pages, store.restore -> ready -> next_ready
"""

import logging
import threading
from collections import Counter, deque

from flatcake.clock import Clock
from flatcake.loop.ready import Entry, Fetch
from flatcake.loop.request import EnginePages, LoopOptions, as_table
from flatcake.messages import Int64Array
from flatcake.sched.actions import Action, Actions, CancelPrefetch, Forget, ReturnPages, StartPrefetch
from flatcake.sched.mas import Scheduler
from flatcake.sched.shared import SharedClock
from flatcake.store import Store
from flatcake.trace import span
from flatcake.units import SECOND

log = logging.getLogger(__name__)

_SLEEP_NS_MAX, _NEVER_NS = 3600 * SECOND, 1 << 62
_COUNTS = (
    "takes_refused",  # by the engine, at any time
    "late_at_hand_out",  # hits from DRAM that waited for pages beyond their deadline
    "restores_short",  # delivered less than was leased
    "restores_given_up",  # their reads did not return
    *("dram_restores", "dram_restore_ns"),  # begun at hand-out
)


class Driver:
    """State of a loop, and the thread that acts on it.  What says "lock held" expects `lock` to be held."""

    def __init__(
        self, store: Store, scheduler: Scheduler, pages: EnginePages, clock: Clock, options: LoopOptions, stream: object
    ) -> None:
        self.store, self.scheduler, self.clock, self.options = store, scheduler, clock, options
        self._pages, self._stream = pages, stream
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # something is ready, or has ended
        self._work = threading.Condition(self.lock)
        self.entries: dict[int, Entry] = {}
        """All requests of which anything is left."""
        self.short: deque[Entry] = deque()
        """Their turn has come, but the engine had no pages for them; prefetches get none before these."""
        self.short_until_ns = 0
        """When to ask for those pages again, if none are freed before."""
        self.failure: Exception | None = None
        """What an engine's callback or the store raised at the driver, for the next `next_ready`."""
        self.owed_pages = 0
        """What the engine took back and has not got yet; what returns meanwhile is not asked for at once."""
        self.is_closed = False
        """Nothing further comes in or is handed out."""
        self.counts: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))
        self._open: dict[int, Fetch] = {}
        """Restores under way, oldest first."""
        self._shared = SharedClock()
        self._todo: deque[Action | Entry] = deque()
        """What the thread is to do: actions, and requests of which the last read has returned."""
        self._sleeps_until_ns = 0
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="flatcake-loop", daemon=True)
        self._thread.start()

    # -- for the loop ------------------------------------------------------------------------------------

    def post(self, actions: Actions) -> None:
        """Have the actions of an event carried out, and wake who waits.  Lock held, since before the event."""
        self._todo.extend(actions)
        if self._todo or self._next_ns() < self._sleeps_until_ns:
            self._work.notify()
        if self.scheduler.can_dispatch():
            self.changed.notify_all()

    def take(self, count: int) -> Int64Array | None:
        """Ask the engine for pages.

        Raises:
            PageTableError: It handed over something else; that stays the engine's.
        """
        found = self._pages.take(count)
        if found is None:
            with self.lock:
                self.counts["takes_refused"] += 1
            return None
        return as_table(found, count)

    def give_back(self, pages: Int64Array) -> None:
        """Give pages to the engine; unless it lacks them itself, whoever waits for some gets another try."""
        with self.lock:
            is_owed, self.owed_pages = self.owed_pages > 0, max(0, self.owed_pages - len(pages))
        try:
            self._pages.give_back(pages)
        finally:
            if not is_owed:
                self.pages_freed()

    def pages_freed(self) -> None:
        """The engine may have pages again."""
        with self.lock:
            self.short_until_ns = 0
            self.post(self.scheduler.pages_freed(self.clock.now_ns()))
            if self.short:
                self.changed.notify_all()

    def begin(self, entry: Entry, pages: Int64Array, start: StartPrefetch | None) -> Fetch:
        """Start a request's restore; `track` it next.  Raises what `Store.restore` does."""
        give_up_ns = self.clock.now_ns() + self.options.restore_ns + self.options.grace_ns
        slots, ticket = (start.slots, start.ticket) if start else (None, None)
        stream, limit_ns = self._stream, self.options.restore_ns
        restore = self.store.restore(entry.lease, pages, stream=stream, timeout_ns=limit_ns, slots_max=slots)
        return Fetch(entry, restore, pages, ticket, give_up_ns)

    def track(self, fetch: Fetch) -> None:
        """Count a restore among those under way; `watch` it when the lock is free.  Lock held."""
        self._open[id(fetch)] = fetch
        fetch.begun = self._shared.begin(self.clock.now_ns())

    def watch(self, fetch: Fetch) -> None:
        """Hear from a restore that is tracked."""
        ticket, layers = fetch.ticket, self.store.geometry.layer_count
        if ticket is not None and self.scheduler.config.ready_when == "first_layers":
            last = min(self.options.first_layers, layers) - 1
            fetch.restore.on_layer(last, lambda: self._on_first_layers(ticket))
        fetch.restore.on_end(lambda: self._on_end(fetch))

    def release_soon(self, entry: Entry) -> None:
        """Let go what is left of a forgotten request.  Lock held."""
        self._todo.append(entry)
        self._work.notify()

    def tick(self) -> None:
        """Look at the clock: deadlines, and restores whose reads do not return."""
        with self.lock:
            now_ns = self.clock.now_ns()
            self.post(self.scheduler.tick(now_ns))
            stuck = [fetch for fetch in self._open.values() if fetch.give_up_ns <= now_ns]
        self._give_up(stuck)

    def close(self) -> bool:
        """Wait until nothing is left, give up what does not end, stop the thread; True when all ended by itself."""
        with self.changed:
            is_clean = self.changed.wait_for(lambda: not self.entries, self.options.close_ns / SECOND)
            stuck = list(self._open.values())
        self._give_up(stuck)
        with self.changed:
            self.changed.wait_for(lambda: not self.entries, self.options.grace_ns / SECOND)
            self._stops = True
            self._work.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(self.options.grace_ns / SECOND)
        return is_clean and not self._thread.is_alive()

    def stats(self) -> dict[str, int | str]:
        """Lock held."""
        depths = {"requests": len(self.entries), "short_of_pages": len(self.short), "restores": len(self._open)}
        return {**self.scheduler.stats(), **depths, **self.counts}

    def check(self) -> None:
        """Assert that requests, restores and the scheduler agree.  Lock held."""
        self.scheduler.check()
        assert all(not fetch.is_over for fetch in self._open.values())
        for number, entry in self.entries.items():
            assert entry.sched.request_id == number
            assert all(fetch.entry is entry and fetch.ticket == ticket for ticket, fetch in entry.fetches.items())
            assert not (entry.is_out and entry.is_handing)
        assert not any(entry.is_out or entry.is_forgotten for entry in self.short)

    # -- the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        self.store.plane.parts.device.enter_thread()
        while True:
            with self.lock:
                while not self._todo and not self._stops and self._next_ns() > self.clock.now_ns():
                    self._sleeps_until_ns = self._next_ns()
                    self._work.wait(min(_SLEEP_NS_MAX, self._sleeps_until_ns - self.clock.now_ns()) / SECOND)
                self._sleeps_until_ns = 0
                if self._stops and not self._todo:
                    return
                todo = self._todo.popleft() if self._todo else None
            try:
                self._do(todo)
            except Exception as error:
                log.error("the loop's thread: %s: %s", type(error).__name__, error)
                with self.lock:
                    self.failure = error
                    self.changed.notify_all()

    def _next_ns(self) -> int:
        """When the thread has to look at the clock again.  Lock held."""
        tick_ns = self.scheduler.next_tick_ns()
        due_ns = [_NEVER_NS if tick_ns is None else tick_ns]
        return min(due_ns + [fetch.give_up_ns for _, fetch in zip(range(1), self._open.values(), strict=False)])

    def _do(self, todo: Action | Entry | None) -> None:
        if todo is None:
            self.tick()
        elif isinstance(todo, StartPrefetch):
            self._start(todo)
        elif isinstance(todo, CancelPrefetch):
            self.entries[int(todo.request_id)].fetches[todo.ticket].restore.cancel()
        elif isinstance(todo, ReturnPages):
            self.give_back(self.entries[int(todo.request_id)].fetches.pop(todo.ticket).pages)
        elif isinstance(todo, Forget):
            self._forget(self.entries[int(todo.request_id)])
        else:
            assert isinstance(todo, Entry), todo
            self._release(todo)

    def _start(self, start: StartPrefetch) -> None:
        """Take pages, begin the restore, answer.  Whatever is raised on the way counts as a refusal."""
        fetch = None
        try:
            fetch = self._try_to_start(start)
        finally:
            with self.lock:
                now_ns = self.clock.now_ns()
                if fetch is None:
                    self.post(self.scheduler.pages_refused(start.ticket, now_ns))
                else:
                    fetch.entry.fetches[start.ticket] = fetch
                    self.track(fetch)
                    self.post(self.scheduler.started(start.ticket, now_ns))
        if fetch is not None:
            self.watch(fetch)

    def _try_to_start(self, start: StartPrefetch) -> Fetch | None:
        entry = self.entries[int(start.request_id)]
        pages = None if self.short else self.take(start.pages)
        if pages is None:
            return None
        try:
            with span("loop.prefetch", size_bytes=entry.sched.ssd_bytes + entry.sched.dram_bytes):
                return self.begin(entry, pages, start)
        except Exception:
            self.give_back(pages)
            raise

    def _forget(self, entry: Entry) -> None:
        """Nothing of the scheduler's is left; a restore that began at hand-out may be."""
        with self.lock:
            entry.is_forgotten = True
            if entry in self.short:
                self.short.remove(entry)
            direct = entry.direct
            if entry.is_handing:  # Whoever hands it out will see.
                return
        if direct is None or direct.is_over:
            self._release(entry)
        else:
            direct.restore.cancel()  # `_on_end` has it released.

    def _release(self, entry: Entry) -> None:
        entry.lease.close()
        try:
            if entry.pages is not None:
                self.give_back(entry.pages)
        finally:
            with self.lock:
                self.entries.pop(int(entry.sched.request_id), None)
                self.changed.notify_all()

    def _give_up(self, stuck: list[Fetch]) -> None:
        """Drop restores whose reads do not return: no scatter starts any more, so their pages are free."""
        for fetch in stuck:
            fetch.restore.cancel("deadline").wait()
            self._on_end(fetch, is_given_up=True)

    # -- calls of a restore, on the pump's thread ----------------------------------------------------------

    def _on_first_layers(self, ticket: int) -> None:
        with self.lock:
            self.post(self.scheduler.first_layers_done(ticket, self.clock.now_ns()))

    def _on_end(self, fetch: Fetch, *, is_given_up: bool = False) -> None:
        result, entry = fetch.restore.result(), fetch.entry
        with self.lock:
            if fetch.is_over:
                return
            fetch.is_over = True
            del self._open[id(fetch)]
            alone_ns = self._shared.end(fetch.begun, now_ns := self.clock.now_ns())
            self.counts["restores_given_up"] += is_given_up
            self.counts["restores_short"] += result.blocks < entry.lease.blocks
            moved, actions = entry.bytes_of(result.blocks), Actions()
            if fetch.ticket is not None:
                actions = self.scheduler.prefetch_done(fetch.ticket, now_ns, alone_ns=alone_ns, **moved)
            elif result.blocks:
                self.counts["dram_restores"] += 1
                self.counts["dram_restore_ns"] += result.total_ns
                self.scheduler.measured(alone_ns=alone_ns, **moved)
            self.post(actions)
            if fetch.ticket is None and entry.is_forgotten:
                self.release_soon(entry)
            self.changed.notify_all()
