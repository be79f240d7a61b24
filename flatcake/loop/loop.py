"""A serving loop over a store: submit requests, take them when their prefix is there, compute, say done.  Paper §3.3.

    loop = flatcake.Loop(store, pages=engine_pages)
    loop.submit(flatcake.LoopRequest(tokens=prompt))
    ready = loop.next_ready(timeout_s=1.0)  # prefix on SSD: already, or partly, in ready.pages
    ... ready.wait_layer(layer) before each layer; ready.result() before a token is shown ...
    loop.done(ready)

Read path:  [submit]: match, lease -> sched -> restore -> [next_ready] -> wait_layer, compute -> [done]

Requests with blocks on SSD take their pages when their prefetch starts; all others, and those that are to be
recomputed, when they are handed out.  So a handed-out request always has its pages.  When the engine has none for
a request whose turn has come, requests that have theirs already are handed out before it, and no prefetch gets
pages until it has: it waits for running requests only, and those wait for nobody.
"""

import itertools
from types import TracebackType

from flatcake.clock import Clock, MonotonicClock
from flatcake.errors import ClosedError, ShapeError
from flatcake.gva import Medium
from flatcake.loop.driver import Driver
from flatcake.loop.outlet import Outlet
from flatcake.loop.ready import Entry, Ready, media_of
from flatcake.loop.request import EnginePages, LoopOptions, LoopRequest, pages_wanted, sched_config
from flatcake.sched.actions import Request
from flatcake.sched.mas import Scheduler
from flatcake.sched.settings import SchedConfig
from flatcake.store import Store
from flatcake.trace import span


class Loop:
    """FC-MAS over a store.  Any number of threads may call.

    Args:
        store: Open; close it after the loop.
        config: Order and limits; None takes `sched_config(store)`.
        pages: The engine's free pages.
        stream: Work queued there may still touch pages that `pages.take` hands over: every restore waits for it
            before its first scatter.  None: for the current stream of the thread that starts the restore.
        clock: Monotonic time; tests bring their own.
        options: Bounds of waits.

    Raises:
        ShapeError: The store has several groups of layers, each with a page table; the loop hands out one.
    """

    def __init__(
        self,
        store: Store,
        config: SchedConfig | None = None,
        *,
        pages: EnginePages,
        stream: object = None,
        clock: Clock | None = None,
        options: LoopOptions | None = None,
    ) -> None:
        if store.plane.kv.groups > 1:
            raise ShapeError(f"a store of {store.plane.kv.groups} groups of layers: expected one; use `Store.restore`")
        self._store = store
        self._clock = clock or MonotonicClock()
        self._options = options or LoopOptions()
        scheduler = Scheduler(config or sched_config(store))
        self._driver = Driver(store, scheduler, pages, self._clock, self._options, stream)
        self._outlet = Outlet(self._driver)
        self._ids = itertools.count(1)

    def submit(self, request: LoopRequest) -> int:
        """Take a request in, and pin what is stored of it until it is done or cancelled; returns its number.

        Raises:
            ShapeError: Its tokens are not 1-D integers.
            PageTableError: It asks for fewer pages than its full blocks fill.
            ClosedError: The loop or the store is closed.

        Cost: hashing and a lookup, as `Store.match`.
        """
        self._require_open()
        keys = self._store.keys(request.tokens, salt=request.salt, extra=request.extra)
        pages = pages_wanted(request, self._store, len(keys))
        with span("loop.submit"):
            lease = self._store.lease(self._store.match(keys), hold_ns=self._options.lease_ns)
        driver, media, block_bytes = self._driver, media_of(lease), self._store.geometry.block_bytes
        on_dram = int((media == int(Medium.DRAM)).sum())
        with driver.lock:
            if not driver.is_closed:
                now_ns = self._clock.now_ns()
                sched = Request(
                    request_id=next(self._ids),
                    ssd_bytes=(len(media) - on_dram) * block_bytes,
                    dram_bytes=on_dram * block_bytes,
                    pages=pages,
                    deadline_ns=now_ns + request.timeout_ns if request.timeout_ns else 0,
                    restore_ns_max=request.restore_ns_max,
                )
                entry = Entry(request, sched, lease, media, block_bytes, now_ns)
                driver.entries[int(sched.request_id)] = entry
                driver.post(driver.scheduler.submit(sched, now_ns))
                return int(sched.request_id)
        lease.close()
        raise ClosedError("the loop is closed; make another one")

    def next_ready(self, timeout_s: float | None = None) -> Ready | None:
        """Wait for the next request whose turn it is.

        Args:
            timeout_s: 0 only looks; None waits as long as the loop is open.

        Returns:
            None when the time is up, or the loop is closed.

        Raises:
            Exception: What a callback of the engine has raised, or the store, since the last call; a request that it
                concerns waits again.
        """
        return self._outlet.next_ready(timeout_s)

    def done(self, ready: Ready | int, *, keep_pages: bool = False) -> None:
        """A handed-out request has been computed: what it held is let go.  A second call does nothing.

        Args:
            ready: From `next_ready`, or its number.
            keep_pages: The engine keeps the pages, and gives them to itself later; ask `result` first.

        Raises:
            ClosedError: It has not been handed out, or its pages are to be kept while they are still written.
        """
        number, driver = _number(ready), self._driver
        with driver.lock:
            entry = driver.entries.get(number)
            if entry is not None and not entry.is_out and not entry.is_cancelled:
                raise ClosedError(f"done({number}): not handed out; cancel it, or wait for it in next_ready")
            fetch = entry.fetch() if entry is not None and keep_pages else None
        if fetch is not None:
            if not fetch.restore.done():
                raise ClosedError(f"done({number}, keep_pages=True): still being restored; ask result() first")
            fetch.restore.cancel().wait()
        with driver.lock:
            if fetch is not None:
                fetch.entry.pages = None
            driver.post(driver.scheduler.done(number, self._clock.now_ns()))

    def cancel(self, ready: Ready | int) -> None:
        """Drop a request, whatever its state; any number of times.  Its pages go back once nothing touches them."""
        number, driver = _number(ready), self._driver
        with driver.lock:
            if number in driver.entries:
                driver.entries[number].is_cancelled = True
            driver.post(driver.scheduler.cancel(number, self._clock.now_ns()))

    def estimate(self, request: LoopRequest) -> int | None:
        """Expected nanoseconds of a request's restore alone, once started, from past ones; None: none measured."""
        match = self._store.match(request.tokens, salt=request.salt, extra=request.extra)
        on_dram = match.tokens_on(Medium.DRAM) // match.block_tokens
        sizes = {
            "dram_bytes": on_dram * match.block_bytes,
            "ssd_bytes": (match.blocks - on_dram) * match.block_bytes,
        }
        with self._driver.lock:
            return self._driver.scheduler.estimate(Request(request_id=0, **sizes))

    def take_back(self, pages: int) -> None:
        """The engine lacks `pages` pages in all: requests that are not handed out give theirs up, and wait again.

        The loop asks for none of them before `pages_freed`, or `SchedConfig.pages_retry_ns` later.
        """
        with self._driver.lock:
            self._driver.owed_pages = pages
            self._driver.post(self._driver.scheduler.take_back(pages, self._clock.now_ns()))

    def pages_freed(self) -> None:
        """The engine has freed pages of its own: ask for some at once.  Those that the loop gave back it knows of."""
        self._driver.pages_freed()

    def tick(self) -> None:
        """Look at the clock now.  Only for callers who brought a clock of their own."""
        self._driver.tick()

    def stats(self) -> dict[str, int | str]:
        """Order, depth of each queue, waits, services and bytes, by name; see `sched.counters`."""
        with self._driver.lock:
            return self._driver.stats()

    def check(self) -> None:
        """Assert that the state is whole."""
        with self._driver.lock:
            self._driver.check()

    def close(self) -> bool:
        """Cancel everything, handed-out requests too, and stop; True when nothing had to be left behind.

        Stop computing first: all pages go back to the engine.  Twice is safe; takes at most the times in the options.
        """
        driver = self._driver
        with driver.lock:
            driver.is_closed = True
            for number, entry in list(driver.entries.items()):
                entry.is_cancelled = True
                driver.post(driver.scheduler.cancel(number, self._clock.now_ns()))
            driver.changed.notify_all()
        return driver.close()

    def __enter__(self) -> "Loop":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- private ----------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._driver.is_closed:
            raise ClosedError("the loop is closed; make another one")


def _number(ready: Ready | int) -> int:
    return ready if isinstance(ready, int) else ready.request_id
