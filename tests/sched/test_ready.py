"""The ready queue against a sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from flatcake.sched.ready import ReadyQueue


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 20))))
def test_ready_queue_is_a_sorted_list(steps: list[tuple[bool, int, int]]) -> None:
    queue, model = ReadyQueue(), {}
    for adds, order_ns, number in steps:
        if adds and number not in model:
            model[number] = order_ns
            queue.add(number, order_ns)
        elif not adds and number in model:
            del model[number]
            queue.remove(number)
        queue.check()
        assert len(queue) == len(model) and (number in queue) == (number in model)
        assert queue.first() == min(model, key=lambda n: (model[n], n), default=None)
