"""The kinds of engines, one line each: what is known of a kind before an engine of it is made.

A new kind is a module that has ``make(engine, service) -> Engine`` (``backend.engines.registry``)
and its line here; settings of its own are fields of ``backend.config.EngineConfig``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """``module`` has ``make``.

    ``model``: it runs one, which the setting ``model`` names. ``on_cpu``: a Hugging Face folder, on
    CPUs too, in all number formats and forms of attention. ``target``: it can be one.
    ``tokenizer``: its model folder has one, else texts are bytes. ``known_s``: the seconds of a
    pass where nobody need measure it. ``behaviour`` above 0: we measure its passes; it is a version
    of what they do, raised by hand where they take another time, which has them measured anew.
    ``drafts``: the kinds that it can have as a target (none: all). ``asynchronous``: turns run in
    an in-flight batch of its own, with the KV, the draws and the tables of its own.
    """

    module: str
    model: bool = True
    on_cpu: bool = False
    target: bool = True
    tokenizer: bool = True
    known_s: float = 0.0
    behaviour: int = 0
    drafts: tuple[str, ...] = ()
    asynchronous: bool = False

    @property
    def measured(self) -> bool:
        """Whether we measure its passes."""
        return self.behaviour > 0


KINDS = {
    "torch": Kind("backend.engines.torch.engine", on_cpu=True, behaviour=1),
    "lookup": Kind("backend.engines.lookup", model=False, target=False, known_s=2e-5),
    "fake": Kind("backend.engines.fake", model=False, tokenizer=False, known_s=1e-6),
    "trtllm": Kind(
        "backend.engines.trtllm.deployment", drafts=("trtllm", "lookup"), asynchronous=True
    ),
    "trt_graph": Kind("backend.engines.trt_graph.runtime", behaviour=1),
}
