"""The handle of a save: started once, settled once."""

from flatcake.io.device import DoneEvent
from flatcake.io.save import Save
from tests.fakes import FakeEvent


def test_a_save_is_started_once() -> None:
    calls: list[int] = []
    save = Save(4, lambda: calls.append(1))
    assert not calls
    save.start()
    save.start()
    assert calls == [1]


def test_waits_end_when_the_time_is_up() -> None:
    save = Save(4, lambda: None)
    assert not save.reusable(0) and save.result(0) is None and not save.published(0)


def test_the_first_result_counts() -> None:
    save = Save(4, lambda: None)
    save.end(4, "")
    save.end(0, "too late")
    result = save.result()
    assert result is not None and (result.blocks, result.written_blocks, result.reason) == (4, 4, "")
    assert save.published()


def test_a_refused_save_is_over_and_not_published() -> None:
    save = Save.ended(4, "no room")
    result = save.result()
    assert result is not None and (result.blocks, result.written_blocks, result.reason) == (4, 0, "no room")
    assert not save.published() and save.reusable()
    save.start()


def test_pages_are_reusable_after_the_first_event_that_is_named() -> None:
    save, event = Save(4, lambda: None), FakeEvent()
    event.reach()
    save.note_reusable(event)
    save.note_reusable(FakeEvent())  # Never reached.
    assert save.reusable()
    assert save.result(0) is None
    other = Save(4, lambda: None)
    other.note_reusable(DoneEvent())
    assert other.reusable()
