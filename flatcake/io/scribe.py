"""One thread for what may wait on a disk and must not stop the pump: commits, and the publishing that follows them."""

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_NS_PER_S = 1e9


class Scribe:
    """Runs tasks one after another on a daemon thread."""

    def __init__(self, at_end: Callable[[], object]) -> None:
        """Start the thread; the last thing that it does, after `close`, is `at_end`."""
        self._at_end = at_end
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="flatcake-scribe", daemon=True)
        self._thread.start()

    def post(self, task: Callable[[], object]) -> bool:
        """Run `task` soon; False, and nothing was done, when the scribe is closed.  From any thread."""
        with self._lock:
            if not self._is_closed:
                self._queue.put(task)
            return not self._is_closed

    def close(self, wait_ns: int) -> bool:
        """Take nothing new, and wait until all tasks are done; whether they are.  A second call waits again."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._queue.put(None)
        self._thread.join(wait_ns / _NS_PER_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            self._call(task)
        self._call(self._at_end)

    def _call(self, task: Callable[[], object]) -> None:
        try:
            task()
        except Exception:
            log.exception("a task of the scribe failed")
