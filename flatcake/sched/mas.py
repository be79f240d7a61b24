"""FC-MAS, the medium-aware scheduler: a state machine that decides who is prefetched and who is computed next.

Paper §3.3; DESIGN §5.  Pure: events in, actions out, time passed in; no I/O, no thread, no clock, no callback.
Read path:  match -> lease -> [mas] -> restore -> wait_layer -> compute

    submit ─┬─ nothing on SSD ───────────────────────────────┐
            └─ waiting ── asking ── reading ─────────────── ready ── running ── forgotten
                  ↑  (equation 1)  (pages)    │ taken back,   │ ordered by original arrival
                  └───────────────────────────┴───────────────┘

Nothing is revoked for lack of room: a prefetch that does not fit waits, and nobody passes it, or else small ones
would keep a large one out for ever.  Ready and running requests cannot wait for each other: what a running
request may lack is pages, and `take_back` gets all pages of undispatched requests without asking any of them;
their reads in flight wait only for the device.

Differs from §3.3: an age cap.  Equation 1 alone starves a large restore under lasting overload, because the
oldest small request ages as well.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from sortedcontainers import SortedList

from flatcake.errors import ClosedError, ConfigError
from flatcake.sched.actions import (
    Action,
    CancelPrefetch,
    Dispatch,
    Forget,
    Prefix,
    Request,
    RequestId,
    ReturnPages,
    StartPrefetch,
)
from flatcake.sched.budget import Budget
from flatcake.sched.counters import Counters
from flatcake.sched.estimate import RestoreModel
from flatcake.sched.hrrn import ResponseRatioQueue
from flatcake.sched.ready import ReadyQueue
from flatcake.sched.settings import SchedConfig

Actions = tuple[Action, ...]


class _Stage(Enum):
    WAITING = auto()  # in the SSD-preparing queue
    FETCHING = auto()  # a live ticket is asked for or reads; not ready
    READY = auto()
    RUNNING = auto()
    ENDED = auto()  # done or cancelled; reads still in flight


class _Phase(Enum):
    ASKED = auto()  # no answer on pages yet
    READING = auto()
    LOADED = auto()  # ended, pages not handed over yet


@dataclass(slots=True)
class _Entry:
    number: int  # order of submission, hence of arrival
    request: Request
    arrival_ns: int
    stage: _Stage
    prefix: Prefix
    since_ns: int  # when the stage began
    live: "_Ticket | None" = None  # the prefetch that serves this request now
    tickets: int = 0  # open prefetches, abandoned ones included


@dataclass(slots=True)
class _Ticket:
    ticket: int
    entry: _Entry
    slots: int
    pages: int  # of the scheduler's account; 0 once the engine has them
    phase: _Phase = _Phase.ASKED
    abandoned: bool = False
    started_ns: int = 0


@dataclass(slots=True)
class _Event:
    """One event on its way through: the clamped time, and the actions so far."""

    now_ns: int
    actions: list[Action] = field(default_factory=list)


class Scheduler:
    """Two queues and the prefetches between them.

    Every event method takes the monotonic time and returns the actions to carry out, in order.  Time that steps
    back counts as standing still.  Not safe for several threads: the driver holds one lock around each call.
    """

    def __init__(self, config: SchedConfig) -> None:
        self.config = config
        self.counters = Counters()
        self._model = RestoreModel()
        self._waiting = ResponseRatioQueue()
        self._ready = ReadyQueue()
        self._budget = Budget(
            prefetches_max=config.prefetches_max, slots_max=config.window_slots, pages_max=config.pages_held_max
        )
        self._entries: dict[int, _Entry] = {}
        self._numbers: dict[RequestId, int] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._deadlines: SortedList = SortedList()  # (deadline_ns, number) of what can still be late
        self._asked: _Ticket | None = None
        self._closed_until_ns = 0  # pages were refused: no prefetch starts before this
        self._now_ns = 0
        self._submitted = 0
        self._started = 0

    # --- events of the caller -----------------------------------------------------------------------------------

    def submit(self, request: Request, now_ns: int) -> Actions:
        """Take a request in; its arrival is `now_ns`.  It is leased by the driver until `Forget`.

        Raises:
            ConfigError: The id is that of a request which has not been forgotten yet.
        """
        if request.request_id in self._numbers:
            raise ConfigError(f"request_id={request.request_id!r}: expected an id that is not in use; Forget frees it")
        event = self._begin(now_ns)
        entry = _Entry(self._submitted, request, event.now_ns, _Stage.WAITING, Prefix.FETCHED, event.now_ns)
        self._submitted += 1
        self._entries[entry.number] = entry
        self._numbers[request.request_id] = entry.number
        self.counters.submitted += 1
        expected_ns = self.estimate(request) if request.restore_ns_max else None
        if expected_ns is not None and expected_ns > request.restore_ns_max:
            self.counters.slow += 1
            self._make_ready(event, entry, Prefix.SLOW)
        elif request.ssd_bytes == 0:
            self._make_ready(event, entry, Prefix.DRAM)
        else:
            self._wait(entry)
            if request.deadline_ns:
                self._deadlines.add((request.deadline_ns, entry.number))
        return self._end(event)

    def next_ready(self, now_ns: int) -> Actions:
        """Hand out the next ready request: at most one `Dispatch`, and what its leaving makes possible."""
        event = self._begin(now_ns)
        number = self._next_number()
        if number is not None:
            self._dispatch(event, self._entries[number])
        return self._end(event)

    def done(self, request_id: RequestId, now_ns: int) -> Actions:
        """The engine has computed a dispatched request.  A second call, or one after `cancel`, does nothing.

        Raises:
            ClosedError: The request has not been dispatched.
        """
        event = self._begin(now_ns)
        entry = self._find(request_id)
        if entry is not None and entry.stage is not _Stage.ENDED:
            if entry.stage is not _Stage.RUNNING:
                raise ClosedError(f"done({request_id!r}): it is not dispatched; cancel it, or wait for next_ready")
            self.counters.done += 1
            self.counters.service_ns += event.now_ns - entry.since_ns
            self._finish(event, entry)
        return self._end(event)

    def cancel(self, request_id: RequestId, now_ns: int) -> Actions:
        """Drop a request in whatever state it is.  Unknown and finished ones are left alone."""
        event = self._begin(now_ns)
        entry = self._find(request_id)
        if entry is not None and entry.stage is not _Stage.ENDED:
            self.counters.cancelled += 1
            self._leave_stage(entry)
            self._finish(event, entry)
        return self._end(event)

    # --- events of the prefetches -------------------------------------------------------------------------------

    def started(self, ticket: int, now_ns: int) -> Actions:
        """The answer to `StartPrefetch`: the pages are there and the restore is under way."""
        asked = self._answer(ticket)
        event = self._begin(now_ns)
        asked.phase, asked.started_ns = _Phase.READING, event.now_ns
        self.counters.prefetches_started += 1
        if asked.abandoned:
            event.actions.append(CancelPrefetch(ticket, asked.entry.request.request_id))
        return self._end(event)

    def pages_refused(self, ticket: int, now_ns: int) -> Actions:
        """The other answer: no pages now.  Asked again after `pages_freed`, or `pages_retry_ns` later."""
        asked = self._answer(ticket)
        event = self._begin(now_ns)
        self.counters.pages_refused += 1
        self._closed_until_ns = event.now_ns + self.config.pages_retry_ns
        entry = asked.entry
        self._budget.end_reads(asked.slots)
        self._budget.end_pages(asked.pages)
        if not asked.abandoned:
            entry.live = None
            self._wait(entry)
        self._close(event, asked)
        return self._end(event)

    def first_layers_done(self, ticket: int, now_ns: int) -> Actions:
        """Enough of a prefetch is in its pages to begin; makes the request ready under `first_layers`."""
        event = self._begin(now_ns)
        reading = self._tickets.get(ticket)
        wanted = self.config.ready_when == "first_layers"
        if reading is not None and wanted and not reading.abandoned and reading.entry.stage is _Stage.FETCHING:
            self._make_ready(event, reading.entry, Prefix.STREAMING)
        return self._end(event)

    def prefetch_done(self, ticket: int, now_ns: int, *, ssd_bytes: int, dram_bytes: int) -> Actions:
        """No read of a prefetch is in flight any more: it has ended well, badly, or by `CancelPrefetch`.

        Args:
            ticket: Of a `started` prefetch; reported once.
            now_ns: Monotonic time.
            ssd_bytes: What came from SSD, counted and learnt from.
            dram_bytes: What came from DRAM.

        Raises:
            ClosedError: No such prefetch is in flight.
        """
        done = self._tickets.get(ticket)
        if done is None or done.phase is not _Phase.READING:
            raise ClosedError(f"prefetch_done({ticket}): not in flight; report each started prefetch once")
        event = self._begin(now_ns)
        self.counters.prefetches_done += 1
        self.counters.ssd_bytes += ssd_bytes
        self.counters.dram_bytes += dram_bytes
        self._budget.end_reads(done.slots)
        if done.abandoned:
            self._return_pages(event, done)
            self._close(event, done)
            return self._end(event)
        self.measured(dram_bytes=dram_bytes, ssd_bytes=ssd_bytes, duration_ns=event.now_ns - done.started_ns)
        self._load(event, done)
        return self._end(event)

    # --- events of the engine and of time -----------------------------------------------------------------------

    def take_back(self, pages: int, now_ns: int) -> Actions:
        """The engine needs `pages` pages: undispatched requests give theirs up, the youngest first.

        They wait again at their original arrival.  Pages that are on their way back already count.  No prefetch
        starts before `pages_freed` or `pages_retry_ns` later.  Cost: O(n log n) in requests that hold pages.
        """
        event = self._begin(now_ns)
        self._closed_until_ns = event.now_ns + self.config.pages_retry_ns
        missing = pages - sum(t.pages for t in self._tickets.values() if t.abandoned)
        for held in sorted(self._tickets.values(), key=lambda t: -t.entry.number):
            if missing <= 0:
                break
            if held.pages == 0 or held.abandoned or held.phase is _Phase.ASKED:
                continue
            missing -= held.pages
            self.counters.taken_back += 1
            entry = held.entry
            self._leave_stage(entry)
            self._abandon(event, entry)
            self._wait(entry)
        return self._end(event)

    def pages_freed(self, now_ns: int) -> Actions:
        """The engine has free pages again: ask at once after a refusal."""
        event = self._begin(now_ns)
        self._closed_until_ns = 0
        return self._end(event)

    def tick(self, now_ns: int) -> Actions:
        """Time has passed: see `next_tick_ns`."""
        return self._end(self._begin(now_ns))
