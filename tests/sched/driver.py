"""A driver of the scheduler without threads: virtual clock, one device, one engine with a pool of pages.

It carries out every action, and asserts the protocol while it does: each prefetch is answered once, each request
is dispatched at most once and forgotten exactly once, and no page is in two hands.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from flatcake.sched.actions import (
    Action,
    Actions,
    CancelPrefetch,
    Dispatch,
    Forget,
    Request,
    RequestId,
    ReturnPages,
    StartPrefetch,
)
from flatcake.sched.mas import Scheduler


@dataclass(slots=True)
class Read:
    """A prefetch as the device sees it."""

    request: Request
    pages: int
    end_ns: int
    cancelled: bool = False


class Driver:
    """Runs events in the order of their time; ties in the order in which they were scheduled."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        read_ns: Callable[[Request], int],
        compute_ns: Callable[[Request], int],
        first_layers_ns: Callable[[Request], int] | None = None,
        pages_total: int = 1 << 30,
        running_max: int = 1,
        check: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.now_ns = 0
        self.read_ns, self.compute_ns, self.first_layers_ns = read_ns, compute_ns, first_layers_ns
        self.pages_total, self.pages_free = pages_total, pages_total
        self.running_max, self.check = running_max, check
        self.requests: dict[RequestId, Request] = {}
        self.reads: dict[int, Read] = {}
        self.engine_pages: dict[RequestId, int] = {}  # of dispatched requests, until they are forgotten
        self.running: set[RequestId] = set()
        self.dispatched: dict[RequestId, tuple[int, Dispatch]] = {}
        self.forgotten: dict[RequestId, int] = {}
        self.cancelled: set[RequestId] = set()
        self.starts: list[tuple[int, RequestId]] = []
        self.trace: list[Action] = []
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0
        self._todo: deque[Action] = deque()

    def at(self, time_ns: int, event: Callable[[], None]) -> None:
        """Schedule an event."""
        heapq.heappush(self._events, (time_ns, self._order, event))
        self._order += 1

    def submit(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.carry_out(self.scheduler.submit(request, self.now_ns))

    def cancel(self, request_id: RequestId) -> None:
        if request_id not in self.forgotten:
            self.cancelled.add(request_id)
        self.running.discard(request_id)
        self.carry_out(self.scheduler.cancel(request_id, self.now_ns))

    def take_back(self, pages: int) -> None:
        self.carry_out(self.scheduler.take_back(pages, self.now_ns))

    def run(self, until_ns: int | None = None) -> None:
        """Run until nothing is scheduled and no tick is due, or until a time."""
        while True:
            tick_ns = self.scheduler.next_tick_ns()
            times = [self._events[0][0]] if self._events else []
            times += [] if tick_ns is None else [tick_ns]
            if not times or (until_ns is not None and min(times) > until_ns):
                return
            self.now_ns = max(self.now_ns, min(times))
            if self._events and self._events[0][0] <= self.now_ns:
                heapq.heappop(self._events)[2]()
            else:
                self.carry_out(self.scheduler.tick(self.now_ns))

    def carry_out(self, actions: Actions) -> None:
        """Do what the scheduler says, then let the engine pull as much as it can run."""
        self._todo.extend(actions)
        while True:
            while self._todo:
                if self.check:
                    self.scheduler.check()
                action = self._todo.popleft()
                self.trace.append(action)
                self._do(action)
            if len(self.running) >= self.running_max or not self.scheduler.can_dispatch():
                return
            actions = self.scheduler.next_ready(self.now_ns)
            assert isinstance(actions[0], Dispatch)
            self._todo.extend(actions)

    def assert_silent(self) -> None:
        """Nothing is left anywhere, and every request had its end."""
        self.scheduler.check()
        stats = self.scheduler.stats()
        for name in ("waiting", "fetching", "ready", "running", "ended", "prefetches", "slots", "pages"):
            assert stats[name] == 0, stats
        assert not self.reads and not self.engine_pages and self.pages_free == self.pages_total
        assert set(self.forgotten) == set(self.requests), "lost or not forgotten"
        assert set(self.requests) - self.cancelled <= set(self.dispatched), "never dispatched"
        assert stats["submitted"] == stats["forgotten"] == stats["done"] + stats["cancelled"] == len(self.requests)
        assert self.scheduler.next_tick_ns() is None and not self.scheduler.can_dispatch()

    def _do(self, action: Action) -> None:
        assert action.request_id not in self.forgotten, (action, "after Forget")
        if isinstance(action, StartPrefetch):
            self._start(action)
        elif isinstance(action, CancelPrefetch):
            read = self.reads[action.ticket]
            assert not read.cancelled
            read.cancelled = True
        elif isinstance(action, ReturnPages):
            assert action.ticket not in self.reads, "pages returned under a read in flight"
            self._free(action.pages)
        elif isinstance(action, Dispatch):
            self._dispatch(action)
        else:
            self._forget(action)

    def _start(self, start: StartPrefetch) -> None:
        request = self.requests[start.request_id]
        assert start.pages == request.pages and start.ticket not in self.reads
        if start.pages > self.pages_free:
            self._todo.extend(self.scheduler.pages_refused(start.ticket, self.now_ns))
            return
        self.pages_free -= start.pages
        self.starts.append((self.now_ns, start.request_id))
        end_ns = self.now_ns + self.read_ns(request)
        self.reads[start.ticket] = Read(request, start.pages, end_ns)
        self.at(end_ns, lambda: self._end_read(start.ticket))
        if self.first_layers_ns is not None:
            self.at(min(end_ns, self.now_ns + self.first_layers_ns(request)), lambda: self._first_layers(start.ticket))
        self._todo.extend(self.scheduler.started(start.ticket, self.now_ns))

    def _first_layers(self, ticket: int) -> None:
        self.carry_out(self.scheduler.first_layers_done(ticket, self.now_ns))

    def _end_read(self, ticket: int) -> None:
        request = self.reads.pop(ticket).request
        size = {"ssd_bytes": request.ssd_bytes, "dram_bytes": request.dram_bytes}
        self.carry_out(self.scheduler.prefetch_done(ticket, self.now_ns, **size))

    def _dispatch(self, dispatch: Dispatch) -> None:
        request_id = dispatch.request_id
        assert request_id not in self.dispatched, "dispatched twice"
        assert request_id not in self.cancelled, "dispatched after cancel"
        assert (dispatch.ticket is not None) == (dispatch.prefix in ("fetched", "streaming"))
        assert (dispatch.ticket in self.reads) == (dispatch.prefix == "streaming")
        self.dispatched[request_id] = (self.now_ns, dispatch)
        self.engine_pages[request_id] = dispatch.pages
        self.running.add(request_id)
        end_ns = self.now_ns + self.compute_ns(self.requests[request_id])
        if dispatch.ticket in self.reads:  # computing waits for the last layer
            end_ns = max(end_ns, self.reads[dispatch.ticket].end_ns + 1)
        self.at(end_ns, lambda: self._end_compute(request_id))

    def _end_compute(self, request_id: RequestId) -> None:
        self.running.discard(request_id)
        self.carry_out(self.scheduler.done(request_id, self.now_ns))

    def _forget(self, forget: Forget) -> None:
        self.forgotten[forget.request_id] = self.now_ns
        self._free(self.engine_pages.pop(forget.request_id, 0))

    def _free(self, pages: int) -> None:
        self.pages_free += pages
        assert self.pages_free <= self.pages_total
        if pages:
            self._todo.extend(self.scheduler.pages_freed(self.now_ns))
