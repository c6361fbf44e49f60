"""The parts of examples/train_fsdp2.py: model, experts by peer, data, checkpoints, measurements."""


class UsageError(Exception):
    """The user's options or files cannot be used: exit status 2."""


class RunError(Exception):
    """A failure during the run: exit status 3."""
