"""report.html: one file with everything a run recorded, to open from disk without a network.

columns    the record as columns, packed for the page
compare    two runs side by side
sections   sections of a page, and the blocks they are built from
page       write_html: all of it in one file
page.html, style.css, app.js, browser.js    the page itself; charts are drawn by plotly.js
"""

from tinyllm.view.html.page import write_html
from tinyllm.view.html.sections import Section

__all__ = ["Section", "write_html"]
