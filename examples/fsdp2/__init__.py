"""The parts of examples/train_fsdp2.py: model, experts by peer, data, checkpoints, measurements."""


class UsageError(Exception):
    """What the user asked for cannot be: exit status 2."""


class RunError(Exception):
    """Something went wrong while it ran: exit status 3."""
