"""Views of a run: progress in the terminal, plots, trackers, the HTML page."""
