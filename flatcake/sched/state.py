"""Requests and prefetches of the scheduler: the state of each, and the transitions between states.  Paper §3.3.

Pure.  `mas` maps events to transitions and decides; here a transition moves a request between queues, books the
budget, and notes the actions that follow.  A request may have several prefetches: one that serves it, and
abandoned ones whose reads are still in flight.
"""

from dataclasses import dataclass
from enum import Enum, auto

from sortedcontainers import SortedList

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
from flatcake.sched.hrrn import ResponseRatioQueue
from flatcake.sched.ready import ReadyQueue


class Stage(Enum):
    """Where a request is."""

    WAITING = auto()  # in the SSD-preparing queue
    FETCHING = auto()  # its prefetch is asked for or reads; not ready
    READY = auto()
    RUNNING = auto()
    ENDED = auto()  # done or cancelled; reads still in flight


class Phase(Enum):
    """Where a prefetch is."""

    ASKED = auto()  # no answer on pages yet
    READING = auto()
    LOADED = auto()  # ended; its pages are not handed over yet


@dataclass(slots=True, eq=False)
class Entry:
    """A request that has not been forgotten."""

    number: int  # order of submission, hence of arrival
    request: Request
    arrival_ns: int
    stage: Stage
    since_ns: int  # when the stage began
    prefix: Prefix = Prefix.FETCHED
    live: "Ticket | None" = None  # the prefetch that serves it
    tickets: int = 0  # open prefetches, abandoned ones included


@dataclass(slots=True, eq=False)
class Ticket:
    """A prefetch."""

    ticket: int
    entry: Entry
    slots: int
    pages: int  # on the scheduler's account; 0 once the engine has them
    phase: Phase = Phase.ASKED
    abandoned: bool = False
    started_ns: int = 0


class State:
    """All requests and prefetches.  `now_ns` and `actions` belong to the event that is being worked on."""

    def __init__(self, budget: Budget, *, readmit_at_arrival: bool) -> None:
        self.now_ns = 0
        self.actions: list[Action] = []
        self.budget = budget
        self.counters = Counters()
        self.waiting = ResponseRatioQueue()
        self.ready = ReadyQueue()
        self.entries: dict[int, Entry] = {}
        self.numbers: dict[RequestId, int] = {}
        self.tickets: dict[int, Ticket] = {}
        self.deadlines: SortedList = SortedList()  # (deadline_ns, number) of what can still be late
        self._readmit_at_arrival = readmit_at_arrival
        self._tickets_made = 0

    def enter(self, request: Request) -> Entry:
        """Make the entry of a new request; its stage follows."""
        entry = Entry(self.counters.submitted, request, self.now_ns, Stage.WAITING, self.now_ns)
        self.counters.submitted += 1
        self.entries[entry.number] = entry
        self.numbers[request.request_id] = entry.number
        return entry

    def wait(self, entry: Entry) -> None:
        """Put a request into the SSD-preparing queue, at its original arrival."""
        self._set_stage(entry, Stage.WAITING)
        self.waiting.add(entry.number, size_bytes=entry.request.ssd_bytes, arrival_ns=entry.arrival_ns)
        if entry.request.deadline_ns:
            self.deadlines.add((entry.request.deadline_ns, entry.number))

    def make_ready(self, entry: Entry, prefix: Prefix) -> None:
        """Put a request that is in no queue into the ready queue."""
        if entry.request.ssd_bytes:
            self.counters.to_ready_ns += self.now_ns - entry.arrival_ns
            self.counters.became_ready += 1
        self._set_stage(entry, Stage.READY)
        entry.prefix = prefix
        self.ready.add(entry.number, entry.arrival_ns if self._readmit_at_arrival else self.now_ns)
        if prefix is not Prefix.STREAMING:
            self._forget_deadline(entry)

    def leave(self, entry: Entry) -> None:
        """Take a request out of its queue, if it is in one."""
        if entry.stage is Stage.WAITING:
            self.waiting.remove(entry.number)
        elif entry.stage is Stage.READY:
            self.ready.remove(entry.number)
        self._forget_deadline(entry)

    def ask(self, entry: Entry, slots: int) -> Ticket:
        """Start the prefetch of a waiting request, as far as that is ours to do."""
        self.waiting.remove(entry.number)
        self.counters.prefetch_wait_ns += self.now_ns - entry.since_ns
        ticket = Ticket(self._tickets_made, entry, slots, entry.request.pages)
        self._tickets_made += 1
        self.budget.take(slots=slots, pages=ticket.pages)
        self.tickets[ticket.ticket] = entry.live = ticket
        entry.tickets += 1
        self._set_stage(entry, Stage.FETCHING)
        self.actions.append(StartPrefetch(ticket.ticket, entry.request.request_id, ticket.pages, slots))
        return ticket

    def start(self, ticket: Ticket) -> None:
        """The reads of a prefetch are under way."""
        ticket.phase, ticket.started_ns = Phase.READING, self.now_ns
        self.counters.prefetches_started += 1
        if ticket.abandoned:
            self.actions.append(CancelPrefetch(ticket.ticket, ticket.entry.request.request_id))

    def load(self, ticket: Ticket) -> None:
        """The reads of a prefetch have ended while it serves its request."""
        entry, ticket.phase = ticket.entry, Phase.LOADED
        if entry.stage is Stage.FETCHING:
            self.make_ready(entry, Prefix.FETCHED)
        elif entry.stage is Stage.READY:
            entry.prefix = Prefix.FETCHED
            self._forget_deadline(entry)
        else:
            assert entry.stage is Stage.RUNNING, entry
            self.close(ticket)

    def dispatch(self, entry: Entry) -> None:
        """Hand a ready request and its pages to the engine."""
        self.leave(entry)
        self.counters.dispatched += 1
        self.counters.ready_wait_ns += self.now_ns - entry.since_ns
        self._set_stage(entry, Stage.RUNNING)
        ticket = entry.live
        if ticket is None:
            self.actions.append(Dispatch(entry.request.request_id, entry.prefix, None, 0))
            return
        self.actions.append(Dispatch(entry.request.request_id, entry.prefix, ticket.ticket, ticket.pages))
        self.budget.end_pages(ticket.pages)
        ticket.pages = 0
        if ticket.phase is Phase.LOADED:
            self.close(ticket)

    def finish(self, entry: Entry) -> None:
        """End a request that is in no queue: it is forgotten when none of its reads is in flight."""
        self.abandon(entry)
        self._set_stage(entry, Stage.ENDED)
        if entry.tickets == 0:
            self._forget(entry)

    def abandon(self, entry: Entry) -> None:
        """Part a request from its prefetch, if it has one; what that holds stays booked until its reads return."""
        ticket, entry.live = entry.live, None
        if ticket is None:
            return
        ticket.abandoned = True
        self.counters.prefetches_abandoned += 1
        if ticket.phase is Phase.READING:
            self.actions.append(CancelPrefetch(ticket.ticket, entry.request.request_id))
        elif ticket.phase is Phase.LOADED:
            self.return_pages(ticket)
            self.close(ticket)

    def take_back(self, pages: int) -> None:
        """Get so many pages from undispatched requests, the youngest first; those on their way back count."""
        held = [ticket for ticket in self.tickets.values() if ticket.pages and ticket.phase is not Phase.ASKED]
        missing = pages - sum(ticket.pages for ticket in held if ticket.abandoned)
        for ticket in sorted(held, key=lambda ticket: -ticket.entry.number):
            if missing > 0 and not ticket.abandoned:
                missing -= ticket.pages
                self.counters.taken_back += 1
                self.leave(ticket.entry)
                self.abandon(ticket.entry)
                self.wait(ticket.entry)

    def return_pages(self, ticket: Ticket) -> None:
        """Send the pages of an abandoned prefetch back, unless the engine has them already."""
        self.budget.end_pages(ticket.pages)
        if ticket.pages:
            self.actions.append(ReturnPages(ticket.ticket, ticket.entry.request.request_id, ticket.pages))

    def close(self, ticket: Ticket) -> None:
        """Drop a prefetch that holds nothing any more."""
        entry = ticket.entry
        del self.tickets[ticket.ticket]
        entry.tickets -= 1
        if entry.live is ticket:
            entry.live = None
        if entry.stage is Stage.ENDED and entry.tickets == 0:
            self._forget(entry)

    def depths(self) -> dict[str, int]:
        """How many requests are in each stage, and what prefetches hold."""
        tickets = self.tickets.values()
        fetching = sum(ticket.entry.stage is Stage.FETCHING and not ticket.abandoned for ticket in tickets)
        ended = len({ticket.entry.number for ticket in tickets if ticket.entry.stage is Stage.ENDED})
        depth = {"waiting": len(self.waiting), "fetching": fetching, "ready": len(self.ready), "ended": ended}
        running = len(self.entries) - sum(depth.values())
        held = {"prefetches": self.budget.prefetches, "slots": self.budget.slots, "pages": self.budget.pages}
        return {**depth, "running": running, **held}

    def check(self) -> None:
        """Assert that queues, entries, prefetches and budget agree."""
        self.waiting.check()
        self.ready.check()
        reading = [t for t in self.tickets.values() if t.phase is not Phase.LOADED]
        assert self.budget.prefetches == len(reading)
        assert self.budget.slots == sum(t.slots for t in reading)
        assert self.budget.pages == sum(t.pages for t in self.tickets.values())
        assert self.numbers == {entry.request.request_id: number for number, entry in self.entries.items()}
        late = {number for _, number in self.deadlines}
        assert len(late) == len(self.deadlines)
        open_tickets = dict.fromkeys(self.entries, 0)
        for ticket in self.tickets.values():
            assert self.entries[ticket.entry.number] is ticket.entry
            assert ticket.abandoned != (ticket.entry.live is ticket)
            open_tickets[ticket.entry.number] += 1
        for number, entry in self.entries.items():
            assert number == entry.number and entry.tickets == open_tickets[number]
            assert (number in self.waiting) == (entry.stage is Stage.WAITING)
            assert (number in self.ready) == (entry.stage is Stage.READY)
            assert (entry.live is not None) or entry.stage is not Stage.FETCHING
            assert entry.live is None or entry.stage in (Stage.FETCHING, Stage.READY, Stage.RUNNING)
            assert entry.stage is not Stage.ENDED or entry.tickets > 0
            streaming = entry.stage is Stage.READY and entry.prefix is Prefix.STREAMING
            can_be_late = streaming or entry.stage in (Stage.WAITING, Stage.FETCHING)
            assert (number in late) == (can_be_late and entry.request.deadline_ns > 0)
        assert len(self.waiting) + len(self.ready) <= len(self.entries)

    def _set_stage(self, entry: Entry, stage: Stage) -> None:
        entry.stage, entry.since_ns = stage, self.now_ns

    def _forget_deadline(self, entry: Entry) -> None:
        self.deadlines.discard((entry.request.deadline_ns, entry.number))

    def _forget(self, entry: Entry) -> None:
        del self.entries[entry.number]
        del self.numbers[entry.request.request_id]
        self.counters.forgotten += 1
        self.actions.append(Forget(entry.request.request_id))
