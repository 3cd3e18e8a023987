"""Resident memory, as the system counts it."""

from __future__ import annotations

import sys

import pytest

from kvfold.bench import memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_grows_with_what_is_held() -> None:
    before = memory.resident()
    held = bytearray(b"x") * (64 * 2**20)
    after, peak = memory.resident(), memory.peak_resident()
    assert before is not None
    assert after is not None
    assert peak is not None
    assert 60 * 2**20 < after - before < 80 * 2**20
    assert peak >= after
    del held


def test_without_proc_the_peak_is_that_of_getrusage(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    expected = memory.peak_resident()
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "missing")
    assert memory.resident() is None
    peak = memory.peak_resident()
    assert peak is not None
    assert expected is not None
    assert peak >= 0.9 * expected
