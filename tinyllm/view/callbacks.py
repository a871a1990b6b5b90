"""The callbacks of a run that a command starts: the display, the trackers, and the plot at the end of the run."""

from __future__ import annotations

from collections.abc import Sequence

from tinyllm.callbacks import Callback
from tinyllm.view.plot import PlotAtEnd
from tinyllm.view.progress import show_progress
from tinyllm.view.trackers import Tracker


def run_callbacks(own: Sequence[Callback] | None = None, trackers: Sequence[str] = ()) -> list[Callback]:
    """The plot, the caller's own callbacks (default: the display that fits the output), and trackers by name.

    The plot comes first, so that the display can name its file. Raises MissingExtra for a tracker that is not
    installed.
    """
    return [PlotAtEnd(), *([show_progress()] if own is None else own), *map(Tracker, trackers)]
