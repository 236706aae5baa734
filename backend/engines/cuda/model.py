"""A decoder of transformers over the engine's pages, its leaves replaced by fused ones.

transformers' modules are the model code: one registered attention function serves every decoder
family as it is. A leaf is replaced by its fused form only after that gave the same on random input.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from backend.engines.cuda.kernels import Kernels
from backend.engines.cuda.leaves import Attention, Norm, Product, Unit
from backend.engines.cuda.pages import PAGE, Pages, PassLayout, Scoring
from backend.engines.cuda.prompts import choose
from backend.engines.cuda.stream import Stream
from backend.engines.models.attention import AttentionError, attending_by
from backend.engines.models.spec import AttentionSpec

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 7


class PagedModel:
    """A causal language model of transformers whose keys and values lie in ``blocks`` pages; a row
    has at most ``row_pages`` of them.

    ``lm`` was made with ``attn_implementation=ATTENTION``. ``taps`` are the layers, counted from 1,
    whose output drafts read. ``fused`` counts replaced leaves by kind, ``refused`` names those that
    gave something else.

    Raises ValueError for a size of heads that is not a power of two.
    """

    def __init__(
        self,
        lm: nn.Module,
        kernels: Kernels,
        *,
        blocks: int,
        row_pages: int,
        taps: Sequence[int] = (),
    ) -> None:
        self.lm, self.kernels = lm, kernels
        self.row_pages = row_pages
        self.layout: PassLayout | None = None
        weight = next(lm.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.stream = Stream(self.device)
        config: Any = lm.config
        config = config.get_text_config()
        modules = [m for m in lm.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]
        shapes = [self._kv_shape(module, config, blocks) for module in modules]
        self.stacked_kv = [
            torch.zeros(shapes.count(shape), *shape, device=self.device, dtype=self.dtype)
            for shape in dict.fromkeys(shapes)
        ]
        """Keys and values [layers, blocks, 2, kv_heads, PAGE, dim], of layers of the same shape."""
        views = {tuple(kv.shape[1:]): iter(kv) for kv in self.stacked_kv}
        self.kv = [next(views[shape]) for shape in shapes]
        """The same by layer [blocks, 2, kv_heads, PAGE, dim]."""
        self.scratch = (blocks - 1) * PAGE
        """A place in the last page, for tokens of no row."""
        heads = config.num_attention_heads
        self._pages = [Pages(kv, heads, self._current_layout, kernels.attention) for kv in self.kv]
        self._by_layer: dict[int, Pages] = {}
        for module, pages in zip(modules, self._pages, strict=True):
            object.__setattr__(module, "pages", pages)
            self._by_layer[int(getattr(module, "layer_idx"))] = pages  # noqa: B009 (mypy)
        self.states: torch.Tensor | None = None
        """[tokens, taps, hidden] of the last pass: the output of the layers ``taps``."""
        self.taps = tuple(taps)
        self._tapped: dict[int, torch.Tensor] = {}
        layers = [m for m in lm.modules() if type(m).__name__.endswith("DecoderLayer")]
        for tap in taps:
            layers[tap - 1].register_forward_hook(self._keep_states(tap))
        self.fused = dict.fromkeys(("attentions", "units", "norms", "products"), 0)
        self.refused: list[str] = []
        self.prompts_by: set[str] = set()
        """Attention for prompts, of all layers (``prompts.LIBRARIES``)."""

    @staticmethod
    def _kv_shape(module: nn.Module, config: Any, blocks: int) -> tuple[int, ...]:
        """Return the shape of a layer's keys and values. Raises ValueError (the class)."""
        dim = int(getattr(module, "head_dim"))  # noqa: B009 (mypy)
        if dim & (dim - 1):
            raise ValueError(f"head_dim {dim} is not a power of two")
        return blocks, 2, config.num_key_value_heads, PAGE, dim

    def run(
        self,
        ids: torch.Tensor,
        position: torch.Tensor,
        layout: PassLayout,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits [wanted, vocab] of packed tokens ``ids`` at ``position``, int64[tokens].

        ``wanted`` int64 are the places whose logits are computed; None: all.
        """
        self.layout = layout
        keep = 0 if wanted is None else wanted
        with attending_by(self._attend):
            out = self.lm(
                input_ids=ids[None],
                position_ids=position[None],
                use_cache=False,
                logits_to_keep=keep,
            )
        if self.taps:
            self.states = torch.stack([self._tapped[tap] for tap in self.taps], 1)
        logits: torch.Tensor = out.logits[0]
        return logits

    @torch.inference_mode()
    def fuse(self) -> None:
        """Replace leaves by fused ones where they give the same, and choose what attends for
        prompts; before the first pass.
        """
        self._fuse_children(self.lm)
        self.prompts_by = {choose(p.kv, p.heads, p.scoring)[0] for p in self._pages}

    def _keep_states(self, tap: int) -> Callable[[nn.Module, object, object], None]:
        def keep(_: nn.Module, __: object, output: object) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            assert isinstance(hidden, torch.Tensor)
            self._tapped[tap] = hidden.view(-1, hidden.shape[-1])

        return keep

    def _attend(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,  # [1, heads, rows, key_dim]
        key: torch.Tensor,  # [1, kv_heads, rows, key_dim]
        value: torch.Tensor,  # [1, kv_heads, rows, value_dim]
        sinks: torch.Tensor | None,  # [heads]
    ) -> torch.Tensor:
        """Store and attend (``models.attention.Attend``). Raises AttentionError for sinks."""
        if sinks is not None:
            raise AttentionError(f"layer {spec.layer} has attention sinks, which are not supported")
        pages = self._by_layer[spec.layer]
        pages.store(key[0].transpose(0, 1), value[0].transpose(0, 1))
        pages.scoring = Scoring(spec.scale, spec.window, spec.softcap)
        return pages.attend(query[0].transpose(0, 1).contiguous(), pages.scoring)[None]

    def _current_layout(self) -> PassLayout:
        assert self.layout is not None
        return self.layout

    def _fuse_children(self, parent: nn.Module) -> None:
        for name, module in list(parent.named_children()):
            kind, candidates = self._candidates(module)
            fused = self._nearest(module, candidates) if kind else None
            if fused is not None:
                setattr(parent, name, fused)
                self.fused[kind] += 1
                continue
            if kind:
                self.refused.append(f"{type(module).__name__} of {type(parent).__name__}")
            self._fuse_children(module)

    def _candidates(self, module: nn.Module) -> tuple[str, Iterator[nn.Module]]:
        """Return a leaf's kind and its fused forms; an empty kind for what is not a leaf."""
        kernels = self.kernels
        if hasattr(module, "pages"):
            return "attentions", (Attention(module, kernels, shift=shift) for shift in (0, 1))
        if hasattr(module, "down_proj"):
            return "units", (Unit(module, kernels, gelu=gelu) for gelu in (False, True))
        if type(module).__name__.endswith("RMSNorm"):
            forms = ((0, False), (0, True), (1, True))
            return "norms", (Norm(module, kernels, shift=s, wide=wide) for s, wide in forms)
        if type(module) is nn.Linear:
            return "products", iter([Product([module], kernels)])
        return "", iter(())

    def _nearest(self, module: nn.Module, candidates: Iterator[nn.Module]) -> nn.Module | None:
        """Return the form nearest to the module's own result; None where none is near."""
        best, least = None, 1e-5 if self.dtype == torch.float32 else 1e-2
        try:
            run = self._attention_probe(module) if hasattr(module, "pages") else self._probe(module)
            wanted = run(module).double()
            for candidate in candidates:
                error = float((run(candidate).double() - wanted).norm() / wanted.norm())
                if error < least:
                    best, least = candidate, error
        except Exception as error:  # other inputs, a shape, or a kernel too large for the GPU
            logger.info("%s is not fused: %s", type(module).__name__, error)
        return best

    def _probe(self, module: nn.Module) -> Callable[[nn.Module], torch.Tensor]:
        """Return what runs a leaf on random input."""
        x = self._random_states(module)
        return lambda leaf: leaf(x)

    def _attention_probe(self, module: nn.Module) -> Callable[[nn.Module], torch.Tensor]:
        """Return what runs an attention block on a prompt in the first page; its result has the
        keys and values stored there, too.
        """
        integers: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        self.layout = PassLayout(
            torch.zeros(1, 16, **integers),
            torch.zeros(1, **integers),
            torch.tensor([0, _PROBE_TOKENS], **integers),
            torch.tensor([(2 << n) - 1 for n in range(_PROBE_TOKENS)], device=self.device),
            torch.arange(_PROBE_TOKENS, **integers),
            _PROBE_TOKENS,
        )
        x = self._random_states(module)
        position = torch.arange(_PROBE_TOKENS, device=self.device)[None]
        rotary = next(m for name, m in self.lm.named_modules() if name.endswith("rotary_emb"))
        layer_type = getattr(module, "layer_type", None)
        try:
            angles = rotary(x, position)
        except TypeError:  # a rotation for each type of layer (Gemma 3)
            angles = rotary(x, position, layer_type)
        pages = module.pages
        assert isinstance(pages, Pages)

        def run(block: nn.Module) -> torch.Tensor:
            pages.kv[0].zero_()
            with attending_by(self._attend):
                out = block(x, position_embeddings=angles, attention_mask=None)[0]
            return torch.cat((out.flatten(), pages.kv[0].flatten()))

        return run

    def _random_states(self, module: nn.Module) -> torch.Tensor:
        """Return random input [1, tokens, width] of a leaf."""
        width = next(iter(module.parameters())).shape[-1]
        generator = torch.Generator(self.device).manual_seed(width)
        shape = (1, _PROBE_TOKENS, width)
        return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
