"""The errors kvfold raises on purpose.

Each message says what was given, what was expected and what to do.
"""


class KVFoldError(Exception):
    """Base of every error that kvfold raises on purpose."""


class ConfigError(KVFoldError, ValueError):
    """An option, name, file or combination of them cannot be used."""


class BudgetError(ConfigError):
    """A budget is not a ratio in (0, 1], a positive number of tokens or a number of bytes."""


class ArtifactError(KVFoldError):
    """A saved file (cache, policy, codec, weights) is damaged or belongs to another model."""


class TransferError(KVFoldError):
    """Something fetched or handed over did not arrive whole."""


class UnsupportedModelError(KVFoldError):
    """A model lacks something that kvfold needs; the message names it."""
