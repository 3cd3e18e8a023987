"""The version of kvfold, kept here alone."""

__version__ = "0.1.0"
