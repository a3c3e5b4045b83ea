"""The one kind of error whose message is meant for the user."""


class UserError(ValueError):
    """What was asked for cannot be done. The message has one line a problem: what was found, what
    is allowed, what to do. Commands print it without a traceback and end with status 2."""


class Preempted(Exception):
    """The run was told to end, and saved: the same command goes on. Commands end with `STATUS`."""

    STATUS = 75  # EX_TEMPFAIL of sysexits.h: try again
