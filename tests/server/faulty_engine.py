"""The engine process with fake engines that raise: the target over a prompt that begins with
``poison``, drafts over ``orphan``.
"""

import sys

from backend.engine_process import main
from backend.engines.fake import FakeEngine

RAISES_OVER = {True: b"poison", False: b"orphan"}


def raising(complete):
    def complete_or_raise(engine, job):
        if bytes(job.turn.sequence.tokens[:6]) == RAISES_OVER[engine.name == "target"]:
            raise MemoryError
        return complete(engine, job)

    return complete_or_raise


if __name__ == "__main__":
    FakeEngine._complete = raising(FakeEngine._complete)  # type: ignore[method-assign]
    sys.exit(main())
