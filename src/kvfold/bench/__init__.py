"""Speed and memory, side by side: one process a measurement, in alternating rounds."""

from kvfold.bench.comparison import BenchResult, Comparison, Outcome
from kvfold.bench.decode import bench_decode
from kvfold.bench.prefill import bench_prefill
from kvfold.bench.settings import DecodeSettings, PrefillSettings
from kvfold.bench.spread import Ratio, Spread

__all__ = [
    "BenchResult",
    "Comparison",
    "DecodeSettings",
    "Outcome",
    "PrefillSettings",
    "Ratio",
    "Spread",
    "bench_decode",
    "bench_prefill",
]
