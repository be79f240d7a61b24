"""What prefetches hold at the moment: reads in flight, window slots, GPU pages.  docs/design.md.

Pure.  `mas` asks before it starts a prefetch and books every change here.
"""


class Budget:
    """Three limits and what is taken of each.  A limit of 0 pages means no cap."""

    def __init__(self, *, prefetches_max: int, slots_max: int, pages_max: int) -> None:
        self._prefetches_max = prefetches_max
        self._slots_max = slots_max
        self._pages_max = pages_max
        self.prefetches = 0
        self.slots = 0
        self.pages = 0

    def has_room(self) -> bool:
        """Whether any prefetch at all could start; a cheap first question."""
        return self.prefetches < self._prefetches_max and self.slots < self._slots_max

    def admits(self, *, slots: int, pages: int) -> bool:
        """Whether a prefetch of this size may start now.

        One that exceeds the cap on pages by itself may start when nothing else holds pages: it would never start
        otherwise.
        """
        fits = self._pages_max == 0 or self.pages == 0 or self.pages + pages <= self._pages_max
        return fits and self.prefetches < self._prefetches_max and self.slots + slots <= self._slots_max

    def take(self, *, slots: int, pages: int) -> None:
        """Book a prefetch that starts."""
        assert self.admits(slots=slots, pages=pages), (slots, pages)
        self.prefetches += 1
        self.slots += slots
        self.pages += pages

    def end_reads(self, slots: int) -> None:
        """Book that no read of a prefetch is in flight any more."""
        self.prefetches -= 1
        self.slots -= slots
        assert self.prefetches >= 0 and self.slots >= 0

    def end_pages(self, pages: int) -> None:
        """Book that pages went to the engine, by a dispatch or back."""
        self.pages -= pages
        assert self.pages >= 0
