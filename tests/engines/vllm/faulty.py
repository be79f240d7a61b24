"""The connector over files that fail, stall or tear as a scenario tells them to."""

from flatcake.engines.vllm.connector import FlatCakeConnector
from flatcake.io.seam import Files
from tests.fakes import FaultyFiles


class Faults(FaultyFiles):
    def clear(self) -> None:
        """From now on all calls go through."""
        with self._lock:
            self._faults.clear()
            self._gates.clear()


class FaultyConnector(FlatCakeConnector):
    """Scheduler's and worker's side share one set of files; a scenario finds it here, in the same process."""

    shared: Faults | None = None

    def files(self) -> Files:
        if FaultyConnector.shared is None:
            FaultyConnector.shared = Faults()
        return FaultyConnector.shared
