"""Errors of the core: each says who, what and how to fix, and is raised before anything changes.

CoreRunnerError
├── ConfigError            a value of the runner's configuration
├── RequestError           a request that cannot be admitted
│   ├── AudioError         audio that cannot be read; names the file
│   └── QueueFullError     the bounded waiting queue is full
└── SchedulerOutputError   a step description that breaks the runner's rules
"""


class CoreRunnerError(ValueError):
    """Base class of every error that a caller of `core_runner` can mend."""


class ConfigError(CoreRunnerError):
    """A configuration value that cannot work; the message holds the value and the allowed range."""


class RequestError(CoreRunnerError):
    """A request that is refused at admission; no other request is disturbed."""


class AudioError(RequestError):
    """Audio that cannot be read or holds nothing; the message names the file and says why."""


class QueueFullError(RequestError):
    """The waiting queue holds `max_waiting` requests already."""


class SchedulerOutputError(CoreRunnerError):
    """A `SchedulerOutput` that names a slot, block or length that the runner cannot accept."""
