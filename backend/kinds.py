"""The kinds of engines, one line each: what is known of a kind before an engine of it is made.

A new kind is a module that has ``make(engine, service) -> Engine`` (``backend.engines.registry``)
and its line here; settings of its own are fields of ``backend.config.EngineConfig``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import metadata


@dataclass(frozen=True, slots=True)
class Kind:
    """``module`` has ``make``.

    ``model``: it runs one, which the setting ``model`` names. ``on_cpu``: a Hugging Face folder, on
    CPUs too. ``dtypes`` that it runs (none: it does not ask). ``package``: a distribution that it
    needs, in just this version. ``weight_bytes``: by dtype the bytes of a weight that is looked up,
    and of one that is multiplied, where these are not the dtype's; ``packs_head``: it multiplies by
    a copy of a tied embedding. ``scratch_tokens``: KV beside the ledger's. ``token_bytes`` of host
    memory for each of ``remembered_tokens`` (0: it remembers none). ``free``: a draft that costs
    next to nothing, as its ``EngineLimits`` say. ``target``: it can be one; ``tells_features``: as
    one, it tells what it holds behind its layers (``Features``); ``reads_target``: as a draft, it
    reads that. ``architectures`` of a model folder's config.json (none: the Llama family's).
    ``tokenizer``: its model folder has one, else texts are bytes. ``known_s``: the seconds of a
    pass where nobody need measure it. ``behaviour`` above 0: we measure its passes; it is a version
    of what they do, raised by hand where they take another time, which has them measured anew.
    ``drafts``: the kinds that it can have as a target (none: all). ``manages_kv``: it plans the
    memory of its GPUs, finds KV and draws tokens by itself. ``refuses``:
    attributes of a request that it does not serve, with the reason.
    """

    module: str
    model: bool = True
    on_cpu: bool = False
    dtypes: tuple[str, ...] = ()
    package: tuple[str, str] | None = None
    weight_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)
    packs_head: bool = False
    scratch_tokens: int = 0
    token_bytes: int = 0
    free: bool = False
    target: bool = True
    tells_features: bool = False
    reads_target: bool = False
    architectures: tuple[str, ...] = ()
    tokenizer: bool = True
    known_s: float = 0.0
    behaviour: int = 0
    drafts: tuple[str, ...] = ()
    manages_kv: bool = False
    refuses: dict[str, str] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Whether we measure its passes."""
        return self.behaviour > 0

    @property
    def missing(self) -> str:
        """What must be installed for it and is not, and what is there; empty where it can run."""
        if self.package is None:
            return ""
        name, version = self.package
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "none"
        return "" if found == version else f"{name}=={version} (found: {found})"


_ANEW = "TensorRT-LLM's executor would begin it anew in every turn"
_NOT_REPORTED = "the TensorRT-LLM engine does not tell it turn by turn"

KINDS = {
    "openvino": Kind(
        "backend.engines.openvino.engine",
        on_cpu=True,
        dtypes=("bf16", "int8", "fp32"),
        package=("openvino", "2026.4.1"),
        weight_bytes={"fp32": (4, 8), "bf16": (4, 6), "int8": (4, 2)},  # as read, and as packed
        packs_head=True,
        scratch_tokens=128 * 32,
        tells_features=True,
        behaviour=4,
    ),
    "torch": Kind(
        "backend.engines.torch.engine",
        on_cpu=True,
        dtypes=("bf16", "fp32", "fp64"),
        tells_features=True,
        behaviour=2,
    ),
    "cuda": Kind(
        "backend.engines.cuda.engine",
        on_cpu=True,
        dtypes=("bf16", "fp32", "fp64"),
        tells_features=True,
        behaviour=1,
    ),
    "head": Kind(
        "backend.engines.head.engine",
        on_cpu=True,
        dtypes=("bf16", "fp32", "int8"),
        target=False,
        reads_target=True,
        architectures=("SpindleHead",),
        behaviour=2,
    ),
    "lookup": Kind("backend.engines.lookup", model=False, target=False, free=True, known_s=2e-5),
    "suffix": Kind(
        "backend.engines.suffix",
        model=False,
        target=False,
        free=True,
        known_s=1e-4,
        token_bytes=64,  # 32 in the ring, the rest its share of what is noted of texts
    ),
    "fake": Kind("backend.engines.fake", model=False, tokenizer=False, known_s=1e-6),
    "trtllm": Kind(
        "backend.engines.trtllm.deployment",
        drafts=("trtllm", "lookup", "suffix"),
        manages_kv=True,
        refuses={
            "guide_type": _ANEW,
            "top_p_decay": _ANEW,
            "return_context_logits": _NOT_REPORTED,
            "return_generation_logits": _NOT_REPORTED,
            "return_prompt_log_probs": _NOT_REPORTED,
            "top_log_probs": _NOT_REPORTED,
        },
    ),
    "trt_graph": Kind("backend.engines.trt_graph.runtime", behaviour=1),
}
