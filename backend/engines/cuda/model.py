"""A decoder of transformers over the engine's pages, its leaves replaced by fused ones.

transformers' modules are the model code. One registered attention function stores keys and values
in pages and attends over them, so every decoder family works as it is. Norms, gated units,
attention blocks and products are replaced one by one by fused ones, each only after it gave the
module's own result on random input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

from backend.engines.cuda import plain

PAGE = 32
"""Tokens of a KV page."""

ATTENTION = "spindle_paged"
"""The name under which transformers knows the attention function."""


@dataclass
class Layout:
    """What the attention of a pass reads, for rows of new tokens packed one after the other.

    ``table`` int32[rows, blocks], ``start`` int32[rows] (committed tokens), ``first``
    int32[rows + 1], ``ancestors`` int64[tokens] (see ``attention``), ``place`` int32[tokens]
    (block times page plus offset). ``most`` bounds the new tokens of a row. ``spans``, for prompts,
    are each row's committed and new tokens as the host knows them: such a pass is causal, of any
    length, and is not captured.
    """

    table: torch.Tensor
    start: torch.Tensor
    first: torch.Tensor
    ancestors: torch.Tensor
    place: torch.Tensor
    most: int
    spans: list[tuple[int, int]] | None = None


@dataclass
class Paged:
    """KV and attention of one layer, as its module finds them."""

    model: PagedModel
    kv: torch.Tensor
    heads: int
    options: tuple[float, int, float] = (0.0, 0, 0.0)
    """Scale, window and cap of scores, as the module last gave them to the attention function."""

    def store(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values [tokens, kv_heads, dim] into the pages of the pass."""
        place = self.model.layout.place.long()
        block, offset = place // PAGE, place % PAGE
        self.kv[block, 0, :, offset] = key
        self.kv[block, 1, :, offset] = value

    def attend(self, q: torch.Tensor, scale: float, window: int, softcap: float) -> torch.Tensor:
        """Return the attention of queries [tokens, heads, dim], same shape."""
        layout, out = self.model.layout, torch.empty_like(q)
        if layout.spans is not None:
            return self._prefill(q, out, layout, scale, window, softcap)
        inputs = (layout.table, layout.start, layout.first, layout.ancestors, out)
        if not self.model.fast:
            options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
            return plain.attention(q, self.kv, *inputs, **options)
        attention = self.model.attention(self.heads, *self.kv.shape[2::2], window, softcap)
        result: torch.Tensor = attention(q, self.kv, *inputs, most=layout.most, scale=scale)
        return result

    def _prefill(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        layout: Layout,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """Attend causally, a row after the other, over its gathered pages."""
        assert layout.spans is not None
        at = 0
        for row, (context, new) in enumerate(layout.spans):
            keys = context + new
            pages = self.kv[layout.table[row, : -(-keys // PAGE)].long()]
            k, v = (
                pages[:, which].transpose(0, 1).reshape(self.kv.shape[2], -1, self.kv.shape[4])
                for which in (0, 1)
            )
            position = torch.arange(context, keys, device=q.device)
            age = position[:, None] - torch.arange(keys, device=q.device)
            seen = (age >= 0) & (age < window) if window else age >= 0
            queries = q[at : at + new].transpose(0, 1)
            if softcap:
                groups = self.heads // self.kv.shape[2]
                k, v = (x[:, :keys].repeat_interleave(groups, 0) for x in (k, v))
                scores = torch.tanh(queries @ k.transpose(1, 2) * (scale / softcap)) * softcap
                weights = scores.float().masked_fill(~seen, -torch.inf).softmax(-1)
                attended = weights.to(v.dtype) @ v
            else:
                attended = functional.scaled_dot_product_attention(
                    queries[None],
                    k[None, :, :keys],
                    v[None, :, :keys],
                    attn_mask=seen,
                    scale=scale,
                    enable_gqa=True,
                )[0]
            out[at : at + new] = attended.transpose(0, 1)
            at += new
        return out


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' modules: query [1, heads, tokens, dim], key and value
    [1, kv_heads, tokens, dim]; returns [1, tokens, heads, dim].
    """
    if s_aux is not None:
        raise NotImplementedError("attention sinks are not served")
    paged: Paged = module.paged  # type: ignore[assignment]
    paged.store(key[0].transpose(0, 1), value[0].transpose(0, 1))
    window = sliding_window or getattr(module, "sliding_window", None) or 0
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    paged.options = (scale, window, softcap or 0.0)
    q = query[0].transpose(0, 1).contiguous()
    return paged.attend(q, *paged.options)[None], None


AttentionInterface.register(ATTENTION, _attend)


class Product(nn.Module):
    """A linear layer of some weights [columns, inner], packed where they have the same input."""

    def __init__(self, linears: list[nn.Linear], *, fast: bool) -> None:
        super().__init__()
        weights, biases = [x.weight for x in linears], [x.bias for x in linears]
        packed = weights[0] if len(weights) == 1 else torch.cat([w.data for w in weights])
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if any(bias is not None for bias in biases):
            parts = [
                weight.new_zeros(len(weight)) if bias is None else bias.data
                for weight, bias in zip(weights, biases, strict=True)
            ]
            self.bias = nn.Parameter(torch.cat(parts), requires_grad=False)
        self.fast = fast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``x`` [..., inner] by our kernel where its tiles fit, else by torch."""
        if self.fast:
            from backend.engines.cuda.linear import linear, tiling_for

            rows = x.reshape(-1, x.shape[-1])
            tiling = tiling_for(*self.weight.shape, len(rows))
            if tiling is not None:
                out = rows.new_empty(len(rows), len(self.weight))
                linear(rows, self.weight, out, self.bias, tiling=tiling)
                return out.view(*x.shape[:-1], -1)
        return functional.linear(x, self.weight, self.bias)


class FusedNorm(nn.Module):
    """An RMS norm in one kernel."""

    def __init__(self, weight: torch.Tensor, eps: float, *, wide: bool, fast: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps, self.wide, self.fast = eps, wide, fast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of ``x`` [..., hidden]."""
        rows = x.reshape(-1, x.shape[-1])
        add_rms_norm = _kernels(self.fast)[0]
        out = add_rms_norm(
            None, rows, self.weight, self.eps, torch.empty_like(rows), wide=self.wide
        )
        return out.view(x.shape)


class FusedUnit(nn.Module):
    """A gated unit: one product for gate and up, the activation, and the product down."""

    def __init__(self, unit: nn.Module, *, gelu: bool, fast: bool) -> None:
        super().__init__()
        parts = (
            [unit.gate_up_proj] if hasattr(unit, "gate_up_proj") else [unit.gate_proj, unit.up_proj]
        )
        self.gate_up = Product(parts, fast=fast)  # type: ignore[arg-type]
        self.down = Product([unit.down_proj], fast=fast)  # type: ignore[list-item]
        self.gelu, self.fast = gelu, fast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the unit's output for ``x`` [1, tokens, hidden]."""
        both = self.gate_up(x)
        rows = both.view(-1, both.shape[-1])
        inner = rows.new_empty(len(rows), rows.shape[-1] // 2)
        _kernels(self.fast)[2](rows, inner, gelu=self.gelu)
        out: torch.Tensor = self.down(inner.view(*x.shape[:-1], -1))
        return out


class FusedAttention(nn.Module):
    """An attention block: one product, rotation and storing in one kernel, attention, a product."""

    def __init__(self, block: nn.Module, *, shift: int, fast: bool) -> None:
        """``block`` has run once; ``shift`` is added to the weights of its norms (Gemma: 1)."""
        super().__init__()
        parts = (
            [block.qkv_proj]
            if hasattr(block, "qkv_proj")
            else [block.q_proj, block.k_proj, block.v_proj]
        )
        self.qkv = Product(parts, fast=fast)  # type: ignore[arg-type]
        self.o = Product([block.o_proj], fast=fast)  # type: ignore[list-item]
        self.paged: Paged = block.paged  # type: ignore[assignment]
        self.fast = fast
        self.norms: dict[str, Any] = {}
        if hasattr(block, "q_norm"):
            dim = self.paged.kv.shape[-1]
            weights = [norm.weight for norm in (block.q_norm, block.k_norm)]
            if any(weight.numel() != dim for weight in weights):
                raise ValueError("norms of whole queries and keys")
            q_norm, k_norm = (weight.data + shift for weight in weights)
            self.norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": _eps(block.q_norm)}

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Return the block's output for ``hidden_states`` [1, tokens, hidden]."""
        paged = self.paged
        qkv = self.qkv(hidden_states[0])
        q = qkv.new_empty(len(qkv), paged.heads, paged.kv.shape[-1])
        cos, sin = (angle[0].contiguous() for angle in position_embeddings)
        place = paged.model.layout.place
        _kernels(self.fast)[1](qkv, q, paged.kv, cos, sin, place, **self.norms)
        attended = paged.attend(q, *paged.options)
        return self.o(attended.view(len(qkv), -1))[None], None


def _kernels(fast: bool) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return add_rms_norm, rotate_and_store and gated, in Triton or in plain torch."""
    if fast:
        from backend.engines.cuda import layers

        return layers.add_rms_norm, layers.rotate_and_store, layers.gated
    return plain.add_rms_norm, plain.rotate_and_store, plain.gated


class PagedModel:
    """A causal language model of transformers whose keys and values lie in ``blocks`` pages.

    ``lm`` was made with ``attn_implementation=ATTENTION``. ``fast`` runs the Triton kernels, else
    the same functions in plain torch. ``max_tokens`` and ``max_keys`` bound a captured pass.
    """

    def __init__(
        self, lm: nn.Module, *, blocks: int, max_tokens: int, max_keys: int, fast: bool
    ) -> None:
        self.lm, self.fast, self.max_tokens, self.max_keys = lm, fast, max_tokens, max_keys
        self.layout: Layout
        self._attentions: dict[tuple[int, ...], Any] = {}
        weight = next(lm.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        config = lm.config.get_text_config()  # type: ignore[union-attr, operator]
        self.blocks_of: list[nn.Module] = [
            m for m in lm.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")
        ]
        self.kv: list[torch.Tensor] = []
        for module in self.blocks_of:
            dim = int(module.head_dim)  # type: ignore[arg-type]
            if dim & (dim - 1):
                raise ValueError(f"head_dim {dim}: only powers of two are served")
            size = (blocks, 2, config.num_key_value_heads, PAGE, dim)
            self.kv.append(torch.zeros(size, device=self.device, dtype=self.dtype))
            module.paged = Paged(self, self.kv[-1], config.num_attention_heads)  # type: ignore[assignment]
        self.fused = dict.fromkeys(("norms", "units", "attentions", "products"), 0)
        self.refused: list[str] = []

    def attention(self, *key: int) -> Any:
        """Return the attention kernel for (heads, kv_heads, dim, window, softcap)."""
        if key not in self._attentions:
            from backend.engines.cuda.attention import PagedAttention

            heads, kv_heads, dim, window, softcap = key
            self._attentions[key] = PagedAttention(
                heads=heads,
                kv_heads=kv_heads,
                dim=dim,
                page=PAGE,
                max_tokens=self.max_tokens,
                max_keys=self.max_keys,
                device=self.device,
                tile=128,
                window=window,
                softcap=softcap,
            )
        return self._attentions[key]

    @torch.inference_mode()
    def fuse(self) -> None:
        """Replace leaves by fused ones where they give the same on random input."""
        self._fuse_children(self.lm)

    def _fuse_children(self, parent: nn.Module) -> None:
        for name, module in list(parent.named_children()):
            new, kind = self._replacement(module)
            if new is not None:
                setattr(parent, name, new)
                self.fused[kind] += 1
                continue
            if kind:
                self.refused.append(f"{type(module).__name__} of {type(parent).__name__}")
            self._fuse_children(module)

    def _replacement(self, module: nn.Module) -> tuple[nn.Module | None, str]:
        if hasattr(module, "paged"):
            return self._fused_attention(module), "attentions"
        if hasattr(module, "down_proj") and (
            hasattr(module, "gate_up_proj") or hasattr(module, "up_proj")
        ):
            x = self._random(5, _inner(module))[None]
            units = (
                lambda gelu=gelu: FusedUnit(module, gelu=gelu, fast=self.fast)
                for gelu in (False, True)
            )
            return self._best(module, units, lambda m: m(x)), "units"
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "weight"):
            weight, eps = module.weight.data, _eps(module)
            x = self._random(5, len(weight))[None]
            norms = (
                lambda shift=shift, wide=wide: FusedNorm(
                    weight + shift, eps, wide=wide, fast=self.fast
                )
                for shift, wide in ((0, False), (0, True), (1, True))
            )
            return self._best(module, norms, lambda m: m(x)), "norms"
        if type(module) is nn.Linear:
            return Product([module], fast=self.fast), "products"
        return None, ""

    def _fused_attention(self, module: nn.Module) -> nn.Module | None:
        """Compare on a prompt of 7 tokens in the first pages, which hold nothing yet."""
        paged: Paged = module.paged  # type: ignore[assignment]
        ints = {"dtype": torch.int32, "device": self.device}
        self.layout = Layout(
            torch.zeros(1, 16, **ints),
            torch.zeros(1, **ints),
            torch.tensor([0, 7], **ints),
            torch.tensor([(2 << n) - 1 for n in range(7)], device=self.device),
            torch.arange(7, **ints),
            7,
        )
        x = self._random(7, _inner(module))[None]
        position = torch.arange(7, device=self.device)[None]
        rotary = self._rotary()
        try:
            angles = rotary(x, position)
        except TypeError:  # a rotation for each type of layer (Gemma 3)
            angles = rotary(x, position, getattr(module, "layer_type", None))

        def run(block: nn.Module) -> torch.Tensor:
            paged.kv[0].zero_()
            out = block(x, position_embeddings=angles, attention_mask=None)[0]
            return torch.cat((out.flatten(), paged.kv[0].flatten()))

        candidates = (
            lambda shift=shift: FusedAttention(module, shift=shift, fast=self.fast)
            for shift in (0, 1)
        )
        return self._best(module, candidates, run)

    def _rotary(self) -> nn.Module:
        return next(m for name, m in self.lm.named_modules() if name.endswith("rotary_emb"))

    def _best(
        self,
        module: nn.Module,
        candidates: Iterator[Callable[[], nn.Module]],
        run: Callable[[nn.Module], torch.Tensor],
    ) -> nn.Module | None:
        """Return the candidate nearest to the module's own result, None where none is near."""
        tolerance = 1e-5 if self.dtype == torch.float32 else 1e-2
        wanted, best, least = run(module).double(), None, tolerance
        for make in candidates:
            try:
                candidate = make()
                error = float((run(candidate).double() - wanted).norm() / wanted.norm())
            except (ValueError, AttributeError, TypeError):
                continue  # a shape that the fused leaf does not know
            if error < least or (best is None and error == 0.0):
                best, least = candidate, error
        return best

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(rows)
        return torch.randn(rows, columns, generator=generator, device=self.device, dtype=self.dtype)

    def run(
        self,
        ids: torch.Tensor,
        position: torch.Tensor,
        layout: Layout,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits [wanted, vocab] of packed tokens ``ids`` at ``position``, int64[tokens].

        ``wanted`` int64 are the places whose logits are computed; None: all.
        """
        self.layout = layout
        keep = 0 if wanted is None else wanted
        out = self.lm(
            input_ids=ids[None], position_ids=position[None], use_cache=False, logits_to_keep=keep
        )
        logits: torch.Tensor = out.logits[0]
        return logits


def _inner(module: nn.Module) -> int:
    """Return the width of a block's input."""
    first = next(m for m in module.modules() if isinstance(m, nn.Linear))
    return first.in_features


def _eps(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)))
