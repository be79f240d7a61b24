"""Which held request may load from SSD next: FC-MAS behind vLLM's question for matched tokens.  Paper §3.3.

vLLM asks again at every step, so waiting is an answer.  Its blocks are its own: it allocates them when a grant is
taken, and a grant that finds none is refused and comes again.
Read path:  match -> lease -> [loads]: held -> granted -> loading -> over
"""

from flatcake.clock import Clock
from flatcake.sched.actions import Actions, CancelPrefetch, Dispatch, Forget, Request, StartPrefetch
from flatcake.sched.mas import Scheduler
from flatcake.sched.settings import SchedConfig


class Loads:
    """The scheduler's two queues, for requests that vLLM holds.  For one thread."""

    def __init__(self, config: SchedConfig, clock: Clock) -> None:
        self.scheduler = Scheduler(config)
        self._clock = clock
        self._asked: StartPrefetch | None = None
        """The one grant that waits for an answer."""
        self._tickets: dict[str, int] = {}
        """Of loads under way."""
        self._known: set[str] = set()
        self._late: set[str] = set()
        """To be computed without their prefix."""
        self._cancels: list[str] = []

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def submit(self, request: Request) -> None:
        """Take a request in; it has something on SSD."""
        self._known.add(str(request.request_id))
        self._carry_out(self.scheduler.submit(request, self._clock.now_ns()))

    def knows(self, request_id: str) -> bool:
        return request_id in self._known

    def is_granted(self, request_id: str) -> bool:
        """Whether its load may begin now."""
        return self._asked is not None and self._asked.request_id == request_id

    def is_late(self, request_id: str) -> bool:
        """Whether its time was up while it was held."""
        return request_id in self._late

    def start(self, request_id: str) -> int:
        """Its blocks are allocated, and the load is ordered; returns the window slots that it may hold."""
        asked = self._asked
        assert asked is not None and asked.request_id == request_id
        self._asked = None
        self._tickets[request_id] = asked.ticket
        self._carry_out(self.scheduler.started(asked.ticket, self._clock.now_ns()))
        return asked.slots

    def refuse(self, request_id: str) -> None:
        """vLLM had no blocks for it; it is granted again soon."""
        if self.is_granted(request_id):
            assert self._asked is not None
            ticket, self._asked = self._asked.ticket, None
            self._carry_out(self.scheduler.pages_refused(ticket, self._clock.now_ns()))

    def end(self, request_id: str, *, ssd_bytes: int, dram_bytes: int) -> None:
        """Its load is over, however it ended."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            now_ns = self._clock.now_ns()
            self._carry_out(self.scheduler.prefetch_done(ticket, now_ns, ssd_bytes=ssd_bytes, dram_bytes=dram_bytes))
            self._hand_out()
        self._late.discard(request_id)  # It is computed now.

    def drop(self, request_id: str) -> None:
        """The request is gone, or needs no load any more.  One under way is dropped, and `end` follows."""
        self._late.discard(request_id)
        if request_id in self._known:
            self._carry_out(self.scheduler.cancel(request_id, self._clock.now_ns()))
            self.refuse(request_id)

    def tick(self) -> None:
        """Time has passed."""
        if self._asked is not None and str(self._asked.request_id) in self._late:
            self.refuse(str(self._asked.request_id))
        due_ns, now_ns = self.scheduler.next_tick_ns(), self._clock.now_ns()
        if due_ns is not None and due_ns <= now_ns:
            self._carry_out(self.scheduler.tick(now_ns))
            self._hand_out()

    def take_cancels(self) -> list[str]:
        """Loads under way that are to be dropped."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def check(self) -> None:
        """Assert that the scheduler and this agree."""
        self.scheduler.check()
        assert set(self._tickets) <= self._known

    def _hand_out(self) -> None:
        """vLLM dispatches by its own order: what is ready is its own at once."""
        while self.scheduler.can_dispatch():
            self._carry_out(self.scheduler.next_ready(self._clock.now_ns()))

    def _carry_out(self, actions: Actions) -> None:
        for action in actions:
            name = str(action.request_id)
            if isinstance(action, StartPrefetch):
                self._asked = action
            elif isinstance(action, CancelPrefetch):
                self._cancels.append(name)
            elif isinstance(action, Forget):
                self._known.discard(name)
            elif isinstance(action, Dispatch):
                if action.prefix.recompute:
                    self._late.add(name)
                self._carry_out(self.scheduler.done(name, self._clock.now_ns()))
