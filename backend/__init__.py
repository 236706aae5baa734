"""Serving: the wiring, settings and requests; a folder for each room
(``docs/explanation/how-it-works.md``).
"""

from pathlib import Path

__version__ = "0.4.0"

PROJECT_ROOT = Path(__file__).resolve().parent.parent
"""The folder of the packages: a clone, or ``site-packages``."""
