"""The engine process with a fake target that raises in any pass over a prompt that begins with ``poison``."""

import sys

from backend.engine_process import main
from backend.engines.fake import FakeEngine


def raising(complete):
    def complete_or_raise(engine, turn):
        if engine.name == "target" and bytes(turn.sequence.tokens[:6]) == b"poison":
            raise MemoryError
        return complete(engine, turn)

    return complete_or_raise


if __name__ == "__main__":
    FakeEngine._complete = raising(FakeEngine._complete)
    sys.exit(main())
