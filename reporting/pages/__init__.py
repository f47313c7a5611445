"""Pages to look at: pictures and tables as one self-contained HTML file, without a network or a plotting library.

Every part is a function from data to HTML text, and `document` puts the parts together. A picture is an SVG or a grid
of buttons that is complete before any script runs; page.js only adds what appears when one hovers or picks. Each
picture comes with a sentence that says the same, and with its numbers as a table. Read element.py first, then
document.py, lines.py and devices.py.

    curve = lines("Loss", [Line("train", [(10, 3.1), (20, 2.6), (30, 2.4)])], unit="nats")  # reporting/pages/lines.py
    write(path, document("My page", "What it is about", curve))
"""

from reporting.pages.document import document, write

__all__ = ["document", "write"]
