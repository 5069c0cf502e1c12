"""Every error that verl_fapo raises on purpose.

FAPOError
|-- UsageError           the user can mend it: one line, exit code 2
|   |-- SettingsError    a ``fapo.*`` setting, or a veRL setting beside it
|   |-- ModelError       a model folder
|   |-- DataError        a data file
|   `-- RouterError      a replica that the router does not have, an address that is none
`-- RunError             the run can not go on: named in the run folder, exit code 1
    |-- GenRMError       the judge's replicas did not start, or the last one died
    |-- JudgeError       too many judgements without a verdict
    |-- StalledError     nothing moved for too long, or a worker or Ray itself died
    `-- WarmUpError      the demo's own models could not be made
"""


class FAPOError(Exception):
    """Base of the tree."""


class UsageError(FAPOError):
    """Something the user set or named is wrong; the message names it and the way out."""


class SettingsError(UsageError):
    """A setting is unknown, out of range, or does not go with another."""


class ModelError(UsageError):
    """A model path does not lead to a model."""


class DataError(UsageError):
    """A data file is missing, unreadable, or lacks a column."""


class RouterError(UsageError):
    """The router was told of a replica that is none."""


class RunError(FAPOError):
    """Training stopped for a reason that is not the user's settings."""


class GenRMError(RunError):
    """The GenRM replicas could not be started in time, or the last one died."""


class JudgeError(RunError):
    """The share of unknown verdicts is above ``fapo.judge.max_unknown_rate``."""


class StalledError(RunError):
    """A worker died, or the run made no progress for ``fapo.stall_seconds``."""


class WarmUpError(RunError):
    """The training of one of the demo's models failed."""
