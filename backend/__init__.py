"""Serving: the wiring, settings and requests; a folder for each room
(``docs/explanation/how-it-works.md``).
"""

__version__ = "0.4.0"
