"""See `tinyllm.view.html.sections`."""

from tinyllm.view.html.sections import Section, table, text

__all__ = ["Section", "table", "text"]
