"""Context parallelism: devices share the positions of each text, also in attention.

LAYOUT
"""

from strategies.layout import Layout

LAYOUT = Layout(mesh={"context": -1}, positions="context")
