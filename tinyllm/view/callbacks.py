"""What watches a run: the display, the trackers, and the plot at its end."""

from __future__ import annotations

from collections.abc import Sequence

from tinyllm.callbacks import Callback
from tinyllm.view.plot import PlotAtEnd
from tinyllm.view.progress import show_progress
from tinyllm.view.trackers import make_trackers


def run_callbacks(own: Sequence[Callback] | None = None, trackers: Sequence[str] = ()) -> list[Callback]:
    """The plot, the callbacks of the caller (default: the display that fits), and trackers by name.

    The plot comes first, so that the display can say where it is. Raises ConfigError for a tracker that is not
    installed.
    """
    return [PlotAtEnd(), *([show_progress()] if own is None else own), *make_trackers(trackers)]
