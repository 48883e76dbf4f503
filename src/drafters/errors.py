"""Errors a user can act on: each message says what is wrong, both values, and what to set."""


class OutriderError(Exception):
    """Base of every error the scripts report as one line instead of a traceback."""

    exit_code = 1


class ConfigError(OutriderError):
    """A setting is unknown, of the wrong type, out of range or at odds with another."""

    exit_code = 2


class TargetError(OutriderError):
    """The target model cannot be found, fetched, verified or used."""


class DataError(OutriderError):
    """A prompt, record or rendered conversation cannot be used for training."""


class ContractError(OutriderError):
    """Two artifacts, or an artifact and the loaded target, were not made for each other."""


class ArtifactError(OutriderError):
    """A folder written by Outrider is incomplete, damaged or of another kind."""
