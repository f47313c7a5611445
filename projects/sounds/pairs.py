"""FSDP within pairs of devices: each pair holds the model once, and the pairs are data parallel."""

from strategies.layout import Layout

LAYOUT = Layout(mesh={"data": -1, "pair": 2}, batch=("data", "pair"), embed="pair")
