import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from flatcake.gva import Medium
from flatcake.scopes import Scope, ScopeTable
from tests.builders import make_keys


def test_scopes_used_together_go_leaf_first() -> None:
    scopes = ScopeTable()
    root, other, leaf = (scopes.create(name, Medium.SSD, 0) for name in ("root", "other", "leaf"))
    scopes.touch([root, leaf], 5)
    assert list(scopes.oldest(Medium.SSD)) == [other, leaf, root]
    scopes.touch([other], 6)
    assert list(scopes.oldest(Medium.SSD)) == [leaf, root, other]
    assert (root.last_use_ns, leaf.last_use_ns, other.last_use_ns) == (5, 5, 6)


def test_a_parent_is_never_older_than_those_that_hang_on_it() -> None:
    scopes = ScopeTable()
    parent = scopes.create("parent", Medium.SSD, 0)
    children = [scopes.create(f"child {i}", Medium.SSD, 0) for i in range(4)]
    for now_ns, child in enumerate(children, start=1):
        scopes.touch([parent, child], now_ns)
    assert list(scopes.oldest(Medium.SSD)) == [*children, parent]


def test_pinned_scopes_are_passed_over_and_media_are_apart() -> None:
    scopes = ScopeTable()
    first, second = scopes.create("a", Medium.SSD, 0), scopes.create("b", Medium.SSD, 0)
    in_dram = scopes.create("a", Medium.DRAM, 0)
    first.pins = 1
    assert list(scopes.oldest(Medium.SSD)) == [second] and list(scopes.oldest(Medium.DRAM)) == [in_dram]


def test_a_removed_scope_leaves_every_view_and_its_session_gets_a_new_one() -> None:
    scopes = ScopeTable()
    first = scopes.create("a", Medium.SSD, 0)
    scopes.remove(first)
    assert first.withdrawn and not len(scopes) and scopes.of_session("a", Medium.SSD) is None
    second = scopes.create("a", Medium.SSD, 1)
    assert second.scope_id != first.scope_id and scopes.of_session("a", Medium.SSD) is second
    scopes.touch([first, second], 7)
    assert first.last_use_ns == 0 and second.last_use_ns == 7
    scopes.check()


def test_recorded_blocks_are_counted_and_empty_batches_leave_no_trace() -> None:
    scope = ScopeTable().create(None, Medium.DRAM, 0)
    scope.record(make_keys("a", 3), np.arange(3, dtype=np.uint64))
    scope.record(make_keys("a", 0), np.arange(0, dtype=np.uint64))
    scope.record(make_keys("b", 2), np.arange(2, dtype=np.uint64))
    assert scope.blocks == 5 and len(scope.keys) == len(scope.gvas) == 2 and scope.used_blocks == 0


class ScopeMachine(RuleBasedStateMachine):
    """Scopes against a list in the order of use."""

    scopes = Bundle("scopes")

    def __init__(self) -> None:
        super().__init__()
        self.table = ScopeTable()
        self.model: list[Scope] = []
        self.now_ns = 0
        self.names = 0

    @rule(target=scopes, medium=st.sampled_from(Medium), shared=st.booleans())
    def create(self, medium: Medium, shared: bool) -> Scope:
        self.names += 1
        scope = self.table.create(None if shared else f"session {self.names}", medium, self.now_ns)
        self.model.append(scope)
        return scope

    @rule(path=st.lists(scopes, unique=True, min_size=1, max_size=4))
    def touch(self, path: list[Scope]) -> None:
        self.now_ns += 1
        self.table.touch(path, self.now_ns)
        for scope in reversed([scope for scope in path if scope in self.model]):
            self.model.remove(scope)
            self.model.append(scope)

    @rule(scope=scopes, pins=st.integers(0, 1))
    def pin(self, scope: Scope, pins: int) -> None:
        scope.pins = pins

    @rule(scope=consumes(scopes))
    def remove(self, scope: Scope) -> None:
        self.table.remove(scope)
        self.model.remove(scope)

    @invariant()
    def views_agree(self) -> None:
        self.table.check()
        assert set(self.table) == set(self.model)
        for medium in Medium:
            expected = [scope for scope in self.model if scope.medium is medium and not scope.pins]
            assert list(self.table.oldest(medium)) == expected


TestScopeMachine = ScopeMachine.TestCase
TestScopeMachine.settings = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much],  # Rules that need a scope find none at the beginning.
)
