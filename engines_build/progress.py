"""How far a stage of the preparation is: a bar with the time left on a terminal, else one line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

BAR = "spindle: {desc} {percentage:3.0f}% |{bar:24}| {elapsed}, {remaining} left"

Progress = Callable[[float, float], None]
"""Takes what is done of a stage and what all of it is, in any unit."""


def set_up_messages(*, verbose: bool) -> None:
    """Print warnings, and with ``verbose`` details too, as lines of the launcher."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="spindle: %(message)s", stream=sys.stdout, force=True)


@contextmanager
def stage(name: str) -> Iterator[Progress]:
    """Show a stage from its beginning to its end. Details would cut a bar: a line then."""
    if not sys.stdout.isatty() or logger.isEnabledFor(logging.INFO):
        print(f"spindle: {name}", flush=True)
        yield lambda _done, _total: None
        return
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    options = {"bar_format": BAR, "file": sys.stdout, "miniters": 0, "smoothing": 0}
    with tqdm(desc=name, total=1.0, **options) as bar, logging_redirect_tqdm():

        def show(done: float, total: float) -> None:
            if not bar.n:
                bar.unpause()  # what came before is no guide to the time left
            bar.update(max(0.0, min(1.0, done / total) - bar.n))

        yield show
        bar.update(1.0 - bar.n)
