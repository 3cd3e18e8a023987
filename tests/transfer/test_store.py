"""Kept codes: within the bytes and the seconds, and the least recently asked for go first."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.transfer.store import CodeStore


def message(size: int) -> tuple[bytes, ...]:
    return (b"x" * (size // 2), b"y" * (size - size // 2))


def test_the_least_recently_asked_for_go_first():
    store = CodeStore(100, 10.0)
    for name in "abc":
        store.put(name, message(30))
    assert store.get("a") == message(30)
    store.put("d", message(40))
    assert [store.get(name) is not None for name in "abcd"] == [True, False, True, True]
    assert (len(store), store.bytes) == (3, 100)


def test_what_is_kept_for_too_long_goes_whether_it_is_asked_for_or_not():
    now = [0.0]
    store = CodeStore(100, 10.0, lambda: now[0])
    store.put("a", message(30))
    now[0] = 6.0
    store.put("b", message(30))
    assert store.get("a") is not None
    now[0] = 10.0
    assert store.get("a") is None
    assert (len(store), store.bytes) == (1, 30)
    now[0] = 16.0
    store.expire()
    assert (len(store), store.bytes) == (0, 0)


def test_what_is_larger_than_all_is_not_kept_and_nothing_goes_for_it():
    store = CodeStore(100, 10.0)
    store.put("a", message(60))
    store.put("b", message(101))
    assert store.get("a") is not None
    assert store.get("b") is None


def test_another_message_of_a_key_replaces_the_first():
    store = CodeStore(100, 10.0)
    store.put("a", message(60))
    store.put("a", message(70))
    assert store.get("a") == message(70)
    assert store.bytes == 70


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 70), st.floats(0, 6)), max_size=40)
)
def test_bytes_are_those_of_what_is_kept_and_never_too_many(steps):
    now, held = [0.0], {}
    store = CodeStore(100, 10.0, lambda: now[0])
    for key, size, pause in steps:
        now[0] += pause
        store.put(key, message(size))
        held[key] = size
        kept = [key for key in held if store.get(key) is not None]
        assert store.bytes == sum(held[key] for key in kept) <= 100
        assert len(store) == len(kept)
        assert key in kept
