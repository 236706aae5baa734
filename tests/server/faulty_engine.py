"""The engine process with fake engines that raise: the target over a prompt that begins with
``poison``, drafts over ``orphan``; over ``lost`` the target is lost.
"""

import sys

from backend.engines.port import EngineLostError
from backend.ipc.process import main
from tests.fakes.fake_engine import FakeEngine

RAISES_OVER = {True: b"poison", False: b"orphan"}


def raising(complete):
    def complete_or_raise(engine, job):
        if bytes(job.turn.sequence.tokens[:6]) == RAISES_OVER[engine.name == "target"]:
            raise MemoryError
        if bytes(job.turn.sequence.tokens[:4]) == b"lost" and engine.name == "target":
            raise EngineLostError("target: the context is broken")
        return complete(engine, job)

    return complete_or_raise


if __name__ == "__main__":
    FakeEngine.complete = raising(FakeEngine.complete)  # type: ignore[method-assign]
    sys.exit(main())
