"""The cost of a target that raises: the turns that raise again alone, and no other."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace

from backend.engines.port import Completion, Engine, EngineLostError, Turn

logger = logging.getLogger(__name__)


def run_turns(target: Engine, turns: Seq[Turn]) -> list[Completion]:
    """Submit turns and return what is complete."""
    target.submit(turns)
    return target.poll(timeout_s=1.0)


def run_again(target: Engine, turns: Seq[Turn]) -> list[Completion]:
    """Run the turns of a submission that raised again, without their proposals; where that raises
    too, in halves.

    A turn that raises alone completes with its error. One culprit among n turns costs about 2
    log2(n) passes. Lossless: an exception voids a submission (see ``backend.engines.port``), and
    what the discarded pass drew was never used.
    """
    plain = [replace(turn, proposal=None, device_proposal=None) for turn in turns]
    try:
        return run_turns(target, plain)
    except EngineLostError:
        raise
    except Exception as error:
        if len(plain) == 1:
            logger.exception("the target failed on sequence %d alone", plain[0].sequence.id)
            return [
                Completion(
                    plain[0].sequence.id, [], error=f"the engine failed ({type(error).__name__})"
                )
            ]
    half = len(plain) // 2
    return run_again(target, plain[:half]) + run_again(target, plain[half:])
