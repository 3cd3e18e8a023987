"""What everything that learns shares: the loop, its schedule, its checkpoints and its curve."""

from kvfold.training.checkpoint import CHECKPOINT, Checkpoint, Metrics, Point, read_checkpoint
from kvfold.training.corpus import Corpus, Excerpt, open_corpora, open_corpus
from kvfold.training.curve import plot_curve
from kvfold.training.learner import Learner, StepOutcome
from kvfold.training.loop import train
from kvfold.training.record import Progress, TrainingRecord
from kvfold.training.settings import Precision, TrainingSettings

__all__ = [
    "CHECKPOINT",
    "Checkpoint",
    "Corpus",
    "Excerpt",
    "Learner",
    "Metrics",
    "Point",
    "Precision",
    "Progress",
    "StepOutcome",
    "TrainingRecord",
    "TrainingSettings",
    "open_corpora",
    "open_corpus",
    "plot_curve",
    "read_checkpoint",
    "train",
]
