"""Whose turn it is."""

from __future__ import annotations

from kvfold.bench.rounds import alternate


def test_subjects_take_turns() -> None:
    order: list[tuple[str, int]] = []

    def measure(subject: str, number: int) -> int:
        order.append((subject, number))
        return len(order)

    found = alternate(("a", "b", "c"), 2, measure)
    assert order == [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("b", 2), ("c", 2)]
    assert found == {"a": (1, 4), "b": (2, 5), "c": (3, 6)}
