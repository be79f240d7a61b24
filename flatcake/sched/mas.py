"""FC-MAS, the medium-aware scheduler: a state machine that decides who is prefetched and who is computed next.

Paper §3.3; docs/design.md.  Pure: events in, actions out, time passed in; no I/O, no thread, no clock, no callback.
Read path:  match -> lease -> [mas] -> restore -> wait_layer -> compute

    submit -+- nothing on SSD -----------------------------> ready -> running -> forgotten
            +- waiting -> fetching (pages asked, reading) --> ready: at its original arrival
                  ^---------------- pages taken back <---------+

Nothing is revoked for lack of room: a prefetch that does not fit waits, and nobody passes it, or small ones would keep
it out for ever.  Ready and running requests cannot wait for each other: `take_back` gets the pages of all undispatched
ones for a running one, and reads in flight wait for the device alone.

Differs from §3.3: an age cap.  Equation 1 alone starves a large restore under lasting overload, because the
oldest small request ages as well.
"""

from flatcake.errors import ClosedError, ConfigError
from flatcake.sched.actions import Actions, Prefix, Request, RequestId
from flatcake.sched.budget import Budget
from flatcake.sched.estimate import RestoreModel
from flatcake.sched.settings import SchedConfig
from flatcake.sched.state import Entry, Phase, Stage, State, Ticket


class Scheduler:
    """Two queues and the prefetches between them.

    Every event takes the monotonic time and returns the actions to carry out, in order.  Time that steps back
    counts as standing still.  Not safe for several threads: the driver holds one lock around each call.
    """

    def __init__(self, config: SchedConfig) -> None:
        self.config = config
        prefetches_max, slots_max, pages_max = config.prefetches_max, config.window_slots, config.pages_held_max
        budget = Budget(prefetches_max=prefetches_max, slots_max=slots_max, pages_max=pages_max)
        self._state = State(budget, readmit_at_arrival=config.readmit == "arrival")
        self._model = RestoreModel()
        self._asked: Ticket | None = None  # the one StartPrefetch without an answer
        self._closed_until_ns = 0  # pages were refused or taken back: no prefetch starts before this

    # Events of the caller.

    def submit(self, request: Request, now_ns: int) -> Actions:
        """Take a request in; its arrival is `now_ns`.  The driver leases its blocks until `Forget`.

        Raises:
            ConfigError: The id is that of a request which has not been forgotten yet.
        """
        state = self._begin(now_ns)
        if request.request_id in state.numbers:
            raise ConfigError(f"request_id={request.request_id!r}: in use until its Forget; expected another id")
        entry = state.enter(request)
        expected_ns = self.estimate(request) if request.restore_ns_max else None
        if expected_ns is not None and expected_ns > request.restore_ns_max:
            state.counters.slow += 1
            state.make_ready(entry, Prefix.SLOW)
        elif request.ssd_bytes == 0:
            state.make_ready(entry, Prefix.DRAM)
        else:
            state.wait(entry)
        return self._end()

    def next_ready(self, now_ns: int) -> Actions:
        """Hand out the next ready request: at most one `Dispatch`, and what its leaving makes possible."""
        state = self._begin(now_ns)
        entry = self._next()
        if entry is not None:
            state.dispatch(entry)
        return self._end()

    def done(self, request_id: RequestId, now_ns: int) -> Actions:
        """The engine has computed a dispatched request.  A second call, or one after `cancel`, does nothing.

        Raises:
            ClosedError: The request has not been dispatched.
        """
        state = self._begin(now_ns)
        entry = self._find(request_id)
        if entry is not None:
            if entry.stage is not Stage.RUNNING:
                raise ClosedError(f"done({request_id!r}): not dispatched yet; cancel it, or wait for its Dispatch")
            state.counters.done += 1
            state.counters.service_ns += state.now_ns - entry.since_ns
            state.finish(entry)
        return self._end()

    def cancel(self, request_id: RequestId, now_ns: int) -> Actions:
        """Drop a request, whatever its state.  A second call, or one after the end, does nothing."""
        state = self._begin(now_ns)
        entry = self._find(request_id)
        if entry is not None:
            state.counters.cancelled += 1
            state.leave(entry)
            state.finish(entry)
        return self._end()

    # Events of the prefetches.

    def started(self, ticket: int, now_ns: int) -> Actions:
        """Answer to `StartPrefetch`: its pages are there and the restore is under way.

        Raises:
            ClosedError: The ticket is not the one that waits for an answer.
        """
        state, asked = self._begin(now_ns), self._answer(ticket)
        state.start(asked)
        return self._end()

    def pages_refused(self, ticket: int, now_ns: int) -> Actions:
        """Answer to `StartPrefetch`: no pages now.  Asked again after `pages_freed`, or `pages_retry_ns` later.

        Raises:
            ClosedError: The ticket is not the one that waits for an answer.
        """
        state, asked = self._begin(now_ns), self._answer(ticket)
        state.counters.pages_refused += 1
        self._closed_until_ns = state.now_ns + self.config.pages_retry_ns
        state.budget.end_reads(asked.slots)
        state.budget.end_pages(asked.pages)
        state.close(asked)
        if not asked.abandoned:
            state.leave(asked.entry)
            state.wait(asked.entry)
        return self._end()

    def first_layers_done(self, ticket: int, now_ns: int) -> Actions:
        """Enough of a prefetch is in its pages to begin; makes the request ready under `first_layers`."""
        state = self._begin(now_ns)
        reading = state.tickets.get(ticket)
        serves = reading is not None and not reading.abandoned and reading.phase is Phase.READING
        if reading and serves and reading.entry.stage is Stage.FETCHING and self.config.ready_when == "first_layers":
            state.make_ready(reading.entry, Prefix.STREAMING)
        return self._end()

    def prefetch_done(self, ticket: int, now_ns: int, *, ssd_bytes: int, dram_bytes: int, alone_ns: int = 0) -> Actions:
        """No read of a prefetch is in flight any more: it has ended well, badly, or by `CancelPrefetch`.

        Args:
            ticket: Of a `started` prefetch; reported once.
            now_ns: Monotonic time.
            ssd_bytes, dram_bytes: What came from each medium; counted and, unless cancelled, learnt from.
            alone_ns: Its share of the time (`SharedClock`); 0: it was alone.

        Raises:
            ClosedError: No such prefetch is in flight.
        """
        state = self._begin(now_ns)
        ended = state.tickets.get(ticket)
        if ended is None or ended.phase is not Phase.READING:
            raise ClosedError(f"prefetch_done({ticket}): not in flight; report each started prefetch once")
        duration_ns = state.now_ns - ended.started_ns
        state.counters.prefetches_done += 1
        state.counters.prefetch_ns += duration_ns
        state.budget.end_reads(ended.slots)
        self._count_bytes(dram_bytes, ssd_bytes)
        if ended.abandoned:
            state.return_pages(ended)
            state.close(ended)
        else:
            self._model.observe(dram_bytes=dram_bytes, ssd_bytes=ssd_bytes, duration_ns=alone_ns or duration_ns)
            state.load(ended)
        return self._end()

    # Events of the engine and of time.

    def take_back(self, pages: int, now_ns: int) -> Actions:
        """The engine lacks `pages` pages in all: undispatched requests give theirs up, the youngest first.

        They wait again at their original arrival.  Pages on their way back since an earlier call count.  No prefetch
        starts before `pages_freed`, or `pages_retry_ns` later.  Cost: O(n log n) in the prefetches that hold pages.
        """
        state = self._begin(now_ns)
        self._closed_until_ns = state.now_ns + self.config.pages_retry_ns
        state.take_back(pages)
        return self._end()

    def pages_freed(self, now_ns: int) -> Actions:
        """The engine has free pages again: after a refusal, ask at once."""
        self._begin(now_ns)
        self._closed_until_ns = 0
        return self._end()

    def tick(self, now_ns: int) -> Actions:
        """Time has passed; due at `next_tick_ns`."""
        self._begin(now_ns)
        return self._end()

    # Questions; they change nothing, `measured` apart.

    def next_tick_ns(self) -> int | None:
        """When `tick` is due at the latest, if no event comes before: a deadline, or asking for pages again."""
        state = self._state
        due = [state.deadlines[0][0] + 1] if state.deadlines else []
        if len(state.waiting) and self._closed_until_ns > state.now_ns:
            due.append(self._closed_until_ns)
        return min(due, default=None)

    def can_dispatch(self) -> bool:
        """Whether `next_ready` would hand out a request."""
        return self._next() is not None

    def estimate(self, request: Request) -> int | None:
        """Expected nanoseconds of its restore alone, once started, from measured ones; None: nothing measured."""
        return self._model.expect_ns(dram_bytes=request.dram_bytes, ssd_bytes=request.ssd_bytes)

    def measured(self, *, dram_bytes: int, ssd_bytes: int, alone_ns: int) -> None:
        """Learn from a restore that was no prefetch: that of a request dispatched with `Prefix.DRAM`."""
        self._count_bytes(dram_bytes, ssd_bytes)
        self._model.observe(dram_bytes=dram_bytes, ssd_bytes=ssd_bytes, duration_ns=alone_ns)

    def stats(self) -> dict[str, int | str]:
        """Settings of the order, depth of each queue, what is held now, and the totals of `Counters`."""
        config = self.config
        names = {"order": config.order, "readmit": config.readmit, "ready_when": config.ready_when}
        return {**names, **self._state.depths(), **self._state.counters.snapshot()}

    def check(self) -> None:
        """Assert that the state is whole and within its limits."""
        state, config = self._state, self.config
        state.check()
        assert not state.actions
        assert state.budget.prefetches <= config.prefetches_max and state.budget.slots <= config.window_slots
        holders = sum(ticket.pages > 0 for ticket in state.tickets.values())
        assert not config.pages_held_max or state.budget.pages <= config.pages_held_max or holders == 1
        asked = [ticket for ticket in state.tickets.values() if ticket.phase is Phase.ASKED]
        assert asked == ([] if self._asked is None else [self._asked])

    def _begin(self, now_ns: int) -> State:
        self._state.now_ns = max(self._state.now_ns, now_ns)
        return self._state

    def _end(self) -> Actions:
        self._expire()
        self._start_next()
        actions = tuple(self._state.actions)
        self._state.actions.clear()
        return actions

    def _expire(self) -> None:
        state = self._state
        while state.deadlines and state.deadlines[0][0] < state.now_ns:
            entry = state.entries[state.deadlines[0][1]]
            state.counters.late += 1
            state.leave(entry)
            state.abandon(entry)
            state.make_ready(entry, Prefix.LATE)

    def _start_next(self) -> None:
        # One at a time: the answer on pages may change who is next.
        state, config = self._state, self.config
        closed = state.now_ns < self._closed_until_ns
        if self._asked is not None or closed or not len(state.waiting) or not state.budget.has_room():
            return
        entry, over_age = self._choose()
        full = -(-(entry.request.ssd_bytes + entry.request.dram_bytes) // config.slot_bytes)
        slots = min(config.restore_slots_max, full)
        if state.budget.admits(slots=slots, pages=entry.request.pages):
            state.counters.over_age += over_age
            self._asked = state.ask(entry, slots)

    def _choose(self) -> tuple[Entry, bool]:
        state, wait_ns_max = self._state, self.config.wait_ns_max
        oldest = state.waiting.oldest()
        assert oldest is not None
        arrival_ns, number = oldest
        if self.config.order != "two_queues":
            return state.entries[number], False
        if wait_ns_max and state.now_ns - arrival_ns > wait_ns_max:
            return state.entries[number], True
        best = state.waiting.best(state.now_ns)
        assert best is not None
        return state.entries[best], False

    def _next(self) -> Entry | None:
        state = self._state
        number = state.ready.first()
        if number is None:
            return None
        if self.config.order == "single_queue":
            oldest = state.waiting.oldest()
            fetching = (t.entry.number for t in state.tickets.values() if t.entry.stage is Stage.FETCHING)
            if number > min((*fetching, oldest[1] if oldest else number)):
                return None
        return state.entries[number]

    def _find(self, request_id: RequestId) -> Entry | None:
        entry = self._state.entries.get(self._state.numbers.get(request_id, -1))
        return None if entry is None or entry.stage is Stage.ENDED else entry

    def _answer(self, ticket: int) -> Ticket:
        asked = self._asked
        if asked is None or asked.ticket != ticket:
            raise ClosedError(f"ticket {ticket}: waits for no answer; answer each StartPrefetch once")
        self._asked = None
        return asked

    def _count_bytes(self, dram_bytes: int, ssd_bytes: int) -> None:
        self._state.counters.dram_bytes += dram_bytes
        self._state.counters.ssd_bytes += ssd_bytes
