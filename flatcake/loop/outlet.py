"""The loop's way out: the next request whose turn it is gets its pages and its restore.

Runs on the threads of those who call `next_ready`.  A request whose turn has come, but for which the engine has no
pages, waits in `Driver.short`, first come first served; those that have their pages already go before it.
Read path:  sched -> driver -> [outlet]: pages, restore if there was no prefetch -> ready
"""

import time

from flatcake.loop.driver import Driver
from flatcake.loop.ready import Entry, Fetch, Ready
from flatcake.sched.actions import Dispatch, Prefix
from flatcake.trace import span
from flatcake.units import SECOND

_REASONS = {Prefix.LATE: "deadline", Prefix.SLOW: "expected to be slow"}


class Outlet:
    """Hands requests out.  Any number of threads may call."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._clock = driver, driver.clock

    def next_ready(self, timeout_s: float | None) -> Ready | None:
        """As `Loop.next_ready`."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (entry := self._pick(end_s)) is not None:
            ready = self._hand_out(entry)
            if ready is not None:
                return ready
        return None

    def _pick(self, end_s: float | None) -> Entry | None:
        """Wait for a request whose turn it is, and keep others from it."""
        driver = self._driver
        with driver.lock:
            while not driver.is_closed:
                if driver.failure is not None:
                    failure, driver.failure = driver.failure, None
                    raise failure
                entry = self._next(self._clock.now_ns())
                if entry is not None:
                    entry.is_handing = True
                    return entry
                waits_s = [] if end_s is None else [end_s - time.monotonic()]
                if any(wait_s <= 0 for wait_s in waits_s):
                    return None
                if driver.short:
                    waits_s.append(max(0, driver.short_until_ns - self._clock.now_ns()) / SECOND)
                driver.changed.wait(min(waits_s, default=None))
            return None

    def _next(self, now_ns: int) -> Entry | None:
        """The first request that has its pages, or may ask for them now.  Lock held."""
        driver = self._driver
        if driver.short and driver.short_until_ns <= now_ns:
            return driver.short.popleft()
        while driver.scheduler.can_dispatch():
            dispatch, *actions = driver.scheduler.next_ready(now_ns)
            assert isinstance(dispatch, Dispatch), dispatch
            entry = driver.entries[int(dispatch.request_id)]
            entry.prefix, entry.ticket = dispatch.prefix, dispatch.ticket
            driver.post(tuple(actions))
            if dispatch.ticket is not None or not driver.short:
                return entry
            driver.short.append(entry)
        return None

    def _hand_out(self, entry: Entry) -> Ready | None:
        """Give a request its pages and its restore; None when it was cancelled meanwhile, or has to wait for pages."""
        driver = self._driver
        try:
            fetch = self._fetch(entry)
        except BaseException as error:
            error.add_note(f"request {entry.sched.request_id}: it waits for pages again")
            self._fall_short(entry)
            raise
        if fetch is None:
            self._fall_short(entry)
            return None
        with driver.lock:
            entry.is_handing, entry.pages = False, fetch.pages
            is_out = entry.is_out = not entry.is_forgotten
            if fetch.ticket is None:
                entry.direct = fetch
                driver.track(fetch)
            elif not is_out:
                driver.release_soon(entry)
        ready = Ready(entry, fetch.restore, fetch.pages, self._clock.now_ns() - entry.arrival_ns)
        if not is_out:
            fetch.restore.cancel()
        if fetch.ticket is None:
            driver.watch(fetch)
        return ready if is_out else None

    def _fetch(self, entry: Entry) -> Fetch | None:
        """Its prefetch, or a restore into pages that are taken now; None when the engine has too few."""
        driver = self._driver
        if entry.ticket is not None:
            return entry.fetches[entry.ticket]
        pages = driver.take(entry.sched.pages)
        if pages is None:
            return None
        now_ns = self._clock.now_ns()
        if 0 < entry.sched.deadline_ns < now_ns and not entry.prefix.recompute:
            entry.prefix = Prefix.LATE
            with driver.lock:
                driver.counts["late_at_hand_out"] += 1
        if entry.prefix.recompute or not entry.lease.blocks:
            return Fetch(entry, driver.store.plane.nothing(_REASONS.get(entry.prefix, "")), pages, None, now_ns)
        try:
            with span("loop.hand_out", size_bytes=entry.sched.dram_bytes):
                return driver.begin(entry, pages, None)
        except BaseException:
            driver.give_back(pages)
            raise

    def _fall_short(self, entry: Entry) -> None:
        """Put a request back that could not be handed out, ahead of the others."""
        driver = self._driver
        with driver.lock:
            entry.is_handing = False
            if entry.is_forgotten:
                driver.release_soon(entry)
                return
            driver.short.appendleft(entry)
            driver.short_until_ns = self._clock.now_ns() + driver.scheduler.config.pages_retry_ns
