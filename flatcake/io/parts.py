"""What a data plane is made of, handed to every restore and save that it runs."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flatcake.clock import Clock
from flatcake.gva import Medium
from flatcake.io.arena import Arena
from flatcake.io.device import Device, Stream
from flatcake.io.engine import Engine, Result, Transfer
from flatcake.io.filepool import FilePool
from flatcake.io.plan import PlanLimits
from flatcake.io.pump import Pump
from flatcake.io.records import ExtentRef, Record, RecordBook
from flatcake.io.tilecopy import Copier
from flatcake.io.window import Window
from flatcake.layout import LaneTable
from flatcake.messages import Completion


class MediumIO(NamedTuple):
    """How one medium is reached."""

    engine: Engine
    """Moves pieces between the medium and the window."""
    host_engine: Engine
    """Moves records between the medium and host memory."""
    locate: Callable[[Any], tuple[Any, Any]]
    """Offset in the medium to file and offset in the file; or many in an int64 array."""


class RecordTurns:
    """Lets those who write to one extent's record do so one after another."""

    def __init__(self) -> None:
        self._queues: dict[ExtentRef, deque[Callable[[], None]]] = {}

    def enter(self, ref: ExtentRef, go: Callable[[], None]) -> None:
        """Call `go` when all who entered before have left."""
        queue = self._queues.setdefault(ref, deque())
        queue.append(go)
        if len(queue) == 1:
            go()

    def leave(self, ref: ExtentRef) -> None:
        queue = self._queues[ref]
        queue.popleft()
        if queue:
            queue[0]()
        else:
            del self._queues[ref]


@dataclass(eq=False, slots=True, kw_only=True)
class Parts:
    """Device, window, media and books of one data plane."""

    rank: int
    epoch: int
    device: Device
    clock: Clock
    pump: Pump
    window: Window
    save_window: Window
    media: Mapping[Medium, MediumIO]
    lanes: LaneTable
    payload_bytes: Sequence[int]
    """Per layer: bytes of a piece without padding."""
    layout: int
    """64-bit digest of the geometry."""
    limits: PlanLimits
    copier: Copier
    book: RecordBook
    verify: bool
    arena: Arena | None = None
    """The memory of the DRAM medium."""
    pool: FilePool | None = None
    """The files of the SSD medium."""
    counts: Counter[str] = field(default_factory=Counter)
    written_bytes: Counter[Medium] = field(default_factory=Counter)
    """What was handed to each medium to write, records included."""
    streams: deque[Stream] = field(default_factory=deque)
    """Streams that no restore or save uses now."""
    record_turns: RecordTurns = field(default_factory=RecordTurns)
    restores_active: int = 0

    def take_stream(self) -> Stream:
        return self.streams.pop() if self.streams else self.device.new_stream()

    def completion(self, plan_id: int, first_bad_block: int | None, reason: str) -> Completion:
        """What this rank says of a plan that is over."""
        return Completion(
            plan_id=plan_id, rank=self.rank, epoch=self.epoch, first_bad_block=first_bad_block, reason=reason
        )

    def transfer(self, medium: int, offset_bytes: int, size_bytes: int, buffer_offset: int) -> Transfer:
        file, at = self.media[Medium(medium)].locate(offset_bytes)
        return Transfer(file, at, size_bytes, buffer_offset)

    def load_record(self, ref: ExtentRef, then: Callable[[Record | None], None], *, anew: bool = False) -> None:
        """Read an extent's record into memory; None if it cannot be read or is another extent's.  Pump only.

        `anew` begins another in the place of one that is not that extent's: whoever needs the old sums has lost them.
        """
        record = self.book.empty(ref)
        batch = [self.transfer(ref.medium, ref.base_bytes, record.raw.nbytes, 0)]
        self.counts["record_read_bytes"] += record.raw.nbytes

        def finish(results: list[Result]) -> None:
            whole = not results[0].error and results[0].moved_bytes == record.raw.nbytes
            found = self.book.accept(record) if whole else None
            then(self.book.find(ref) or self.book.blank(ref) if anew and whole and found is None else found)

        engine = self.media[Medium(ref.medium)].host_engine
        engine.read(batch, record.buffer, lambda results, _: self.pump.post(lambda: finish(results)))
