"""The engine process with every delta replaced by the time at which the loop emitted it
(CLOCK_MONOTONIC, ns, ended by ';').
"""

import sys
import time

from backend.core.session import Delta
from backend.engine_process import main
from backend.ipc.server import Ticket


def stamped(chunk):
    def stamp(ticket, delta):
        chunk(ticket, Delta(f"{time.monotonic_ns()};" if delta.text else ""))

    return stamp


if __name__ == "__main__":
    Ticket.chunk = stamped(Ticket.chunk)
    sys.exit(main())
