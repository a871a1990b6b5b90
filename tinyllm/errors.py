"""One family of errors. Each message says what was wrong, where, and the remedy, in one line.

The command line prints `error: <message>` and leaves with the class's exit code; in Python they are exceptions.
"""

from __future__ import annotations


class TinyLLMError(Exception):
    """Base of the family: an expected failure with a message fit for a user."""

    exit_code = 1


class UserError(TinyLLMError):
    """The user's input is at fault and nothing was started or lost."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration field: unknown, of the wrong type, out of range, or in conflict with another."""


class DataError(UserError):
    """A data file, row or column."""


class ModelError(UserError):
    """A model or tokenizer that cannot be loaded, does not fit, or needs attention we do not honour."""


class RewardError(UserError):
    """A reward function or verifier that cannot be built or breaks its contract (as by a wrong count)."""


class EngineError(TinyLLMError):
    """The sampler cannot do what was asked (memory bound, missing ids or log-probabilities)."""


class RunError(UserError):
    """A run directory that is missing, locked by another process, or damaged."""


class TrainingStopped(TinyLLMError):
    """Training cannot go on (three non-finite steps in a row, no group with signal); what was done is saved."""
