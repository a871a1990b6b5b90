"""The name under which docs have shown the run directory: `from tinyllm.rundir import RunDir`."""

from tinyllm.record.rundir import RunDir

__all__ = ["RunDir"]
