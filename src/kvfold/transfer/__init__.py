"""Transfer: hand a prefix's cache from one model to another of the same architecture (SCD)."""

from kvfold.transfer.baselines import BASELINES, HandedOver, hand_over_by
from kvfold.transfer.calibrate import CalibrationProgress, calibrate
from kvfold.transfer.codec import Codec
from kvfold.transfer.consumer import Answer, Consumer, ConsumerSettings, Stages
from kvfold.transfer.ends import Receiver, Sender
from kvfold.transfer.patch import AlignerSettings
from kvfold.transfer.producer import Producer, ServiceSettings
from kvfold.transfer.settings import CalibrationSettings
from kvfold.transfer.tokens import tokenizer_digest
from kvfold.transfer.wire import Limits

__all__ = [
    "BASELINES",
    "AlignerSettings",
    "Answer",
    "CalibrationProgress",
    "CalibrationSettings",
    "Codec",
    "Consumer",
    "ConsumerSettings",
    "HandedOver",
    "Limits",
    "Producer",
    "Receiver",
    "Sender",
    "ServiceSettings",
    "Stages",
    "calibrate",
    "hand_over_by",
    "tokenizer_digest",
]
