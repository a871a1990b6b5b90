"""The name under which docs have shown the report page: see `tinyllm.view.html`."""

from tinyllm.view.html import Section, write_html

__all__ = ["Section", "write_html"]
