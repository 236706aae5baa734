"""The CUDA engine's kernels against plain torch: on a GPU, or under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from backend.engines.cuda import linear as products
from backend.engines.cuda import plain
from backend.engines.cuda.attention import TILE_TOKENS, attention
from backend.engines.cuda.bounds import bounds
from backend.engines.cuda.candidates import candidates
from backend.engines.cuda.draw import draw
from backend.engines.cuda.kernels import triton_kernels
from backend.engines.cuda.layers import add_rms_norm, apply_gate, rotate_and_store
from backend.engines.cuda.linear import Tiling, linear, tiling_for
from backend.engines.cuda.pages import MAX_NEW_TOKENS, ancestor_words, split_tokens
from backend.request import SamplingParams
from backend.sampling.distributions import Floats, target_probs
from backend.sampling.draw import HEAD
from backend.sampling.draw import draw as host_draw
from backend.sampling.randomness import word
from tests.cuda.cases import PagedCase, attention_reference, paged_case

pytestmark = [
    pytest.mark.slow,
    # Triton's interpreter, on rows that see no key or have only NaN, and by itself
    pytest.mark.filterwarnings("ignore:.*:RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:triton.runtime.interpreter"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNKED = partial(draw, chunk=256 if DEVICE == "cpu" else 4096)
CHAIN = [-1, 0, 1, 2]
TREE = [-1, -1, 0, 0, 1, 2, 4]
# The interpreter multiplies bf16 wrongly.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# Triton multiplies fp32 as tf32 on a GPU.
FP32_ERROR = 1e-5 if DEVICE == "cpu" else 2e-3


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.cpu().double(), wanted.cpu().double()
    return float((found - wanted).norm() / wanted.norm())


def attend(case: PagedCase, tile: int = 32, most: int = 0, **options: float) -> torch.Tensor:
    return attention(
        *case.tensors,
        most=most or case.most,
        scale=0.125,
        split=64,
        tile=tile,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("contexts", "trees"),
    [
        ([0, 5, 63, 130], [[]] * 4),
        ([1, 40, 200], [CHAIN] * 3),
        ([7, 31, 32, 170], [TREE, [], CHAIN, TREE]),
    ],
    ids=["decode", "chains", "trees and others"],
)
@pytest.mark.parametrize(("tile", "page"), [(32, 32), (64, 32), (32, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_attention(
    contexts: list[int], trees: list[list[int]], tile: int, page: int, dtype: torch.dtype
) -> None:
    case = paged_case(8, 2, 64, page, contexts, trees, dtype, DEVICE)
    wanted = attention_reference(case, 0.125)
    assert relative_error(attend(case, tile), wanted) < (
        FP32_ERROR if dtype == torch.float32 else 1e-2
    )


@pytest.mark.parametrize("trees", [[[], [], []], [CHAIN, TREE, []]])
def test_attention_of_a_row_has_the_same_bits_alone(trees: list[list[int]]) -> None:
    case = paged_case(8, 2, 64, 32, [3, 60, 200], trees, HALF, DEVICE)
    together = attend(case, most=8)
    for row in range(3):
        out = attend(case.row(row), most=8)
        first, last = case.first[row], case.first[row + 1]
        assert torch.equal(out, together[first:last])


def test_attention_within_a_window_and_with_capped_scores() -> None:
    case = paged_case(8, 2, 64, 32, [3, 90, 200], [CHAIN, TREE, []], torch.float32, DEVICE)
    out = attend(case, window=48, softcap=2.0)
    wanted = attention_reference(case, 0.125, window=48, softcap=2.0)
    assert relative_error(out, wanted) < FP32_ERROR
    assert relative_error(out, attention_reference(case, 0.125)) > 0.01


def test_where_our_own_product_does_not_run_cublas_multiplies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "linear", None)
    x, weight = torch.randn(3, 64), torch.randn(128, 64)
    multiply = triton_kernels(invariant=True, own_product=False).linear
    assert torch.equal(multiply(x, weight, None), torch.nn.functional.linear(x, weight))
    with pytest.raises(TypeError):
        triton_kernels(invariant=True).linear(x, weight, None)


@pytest.mark.parametrize("context", [2048, 32768, 131072])
def test_a_context_is_cut_into_few_pieces_of_whole_tiles(context: int) -> None:
    split = split_tokens(context)
    assert split % TILE_TOKENS == 0
    assert -(-context // split) <= 64
    assert split == 512 or context > 32768


def test_ancestor_words() -> None:
    assert ancestor_words(CHAIN) == [0b1, 0b11, 0b111, 0b1111, 0b11111]
    assert ancestor_words([-1, -1, 1]) == [0b1, 0b11, 0b101, 0b1101]
    assert ancestor_words(list(range(-1, 62)))[-1] == -1
    with pytest.raises(ValueError, match="at most 63"):
        ancestor_words([-1] * MAX_NEW_TOKENS)


def test_add_rms_norm() -> None:
    x, residual = torch.randn(2, 5, 192, device=DEVICE)
    weight = torch.rand(192, device=DEVICE) + 0.5
    total = x + residual
    wanted = torch.nn.functional.rms_norm(total, (192,), weight, 1e-5)
    out = torch.empty_like(x)
    add_rms_norm(x, residual, weight, 1e-5, out)
    assert torch.equal(residual, total)
    assert relative_error(out, wanted) < 1e-6
    add_rms_norm(None, residual, weight, 1e-5, out.fill_(0))
    assert torch.equal(residual, total)
    assert relative_error(out, wanted) < 1e-6


@pytest.mark.parametrize("rotary", [32, 24])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate_and_store(rotary: int, has_norm: bool) -> None:
    tokens, heads, kv_heads, dim, page = 3, 4, 2, 32, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=DEVICE)
    angle = torch.rand(tokens, rotary // 2, device=DEVICE) * 6
    cos, sin = (torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))
    place = torch.tensor([7, 33, 16], dtype=torch.int32, device=DEVICE)
    q = torch.full((tokens, heads, dim), float("nan"), device=DEVICE)
    kv = torch.full((3, 2, kv_heads, page, dim), float("nan"), device=DEVICE)
    weights = torch.rand(2, dim, device=DEVICE) + 0.5
    norms = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-5} if has_norm else {}
    rotate_and_store(qkv, q, kv, cos, sin, place, **norms)  # type: ignore[arg-type]
    plain_q, plain_kv = torch.empty_like(q), torch.full_like(kv, float("nan"))
    plain.rotate_and_store(qkv, plain_q, plain_kv, cos, sin, place, **norms)  # type: ignore[arg-type]
    assert relative_error(q, plain_q) < 1e-6
    stored = ~plain_kv.isnan()
    assert int(stored.sum()) == tokens * 2 * kv_heads * dim
    assert torch.equal(stored, ~kv.isnan())
    assert relative_error(kv[stored], plain_kv[stored]) < 1e-6


@pytest.mark.parametrize("gelu", [False, True])
def test_gated(gelu: bool) -> None:
    x = torch.randn(3, 2 * 1500, device=DEVICE)
    out, wanted = (torch.empty(3, 1500, device=DEVICE) for _ in range(2))
    apply_gate(x, out, gelu=gelu)
    plain.apply_gate(x, wanted, gelu=gelu)
    assert relative_error(out, wanted) < 1e-6


@pytest.mark.parametrize("rows", [1, 16, 40])
def test_linear(rows: int) -> None:
    x, weight = torch.randn(rows, 256, device=DEVICE), torch.randn(128, 256, device=DEVICE)
    bias = torch.randn(128, device=DEVICE)
    tiling = Tiling(64, 64, 16, 2, 4)
    out = linear(x, weight, torch.empty(rows, 128, device=DEVICE), bias, tiling=tiling)
    assert relative_error(out, x.double() @ weight.T.double() + bias.double()) < FP32_ERROR
    alone = linear(x[:1], weight, torch.empty(1, 128, device=DEVICE), bias, tiling=tiling)
    assert torch.equal(out[:1], alone)


@pytest.mark.parametrize("tokens", [1, 16, 64, 65, 128, 160, 320, 640])
@pytest.mark.parametrize(("columns", "inner"), [(6144, 4096), (4096, 14336), (28672, 4096)])
def test_a_tiling_fits_the_shapes_of_an_8b(columns: int, inner: int, tokens: int) -> None:
    tiling = tiling_for(columns, inner, tokens)
    assert tiling is not None
    stage_bytes = 2 * tiling.inner * (tiling.rows + tiling.columns)
    assert stage_bytes * tiling.stages < 227 * 1024
    assert tiling_for(columns + 1, inner, tokens) is None


@pytest.mark.parametrize("tokens", [1, 64, 65, 128, 160, 320, 640])
@pytest.mark.parametrize(
    ("columns", "inner"), [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)]
)
def test_a_weight_has_a_tiling_for_all_numbers_of_tokens_or_for_none(
    columns: int, inner: int, tokens: int
) -> None:
    tiling = tiling_for(columns, inner, tokens)
    assert tiling is not None
    assert columns % tiling.columns == inner % tiling.inner == 0
    assert tiling.warps == 4 or tiling.columns > 64
    assert tiling_for(columns + 32, inner, tokens) is None
    assert tiling_for(columns, inner + 8, tokens) is None


@pytest.mark.parametrize("invariant", [False, True])
def test_a_product_of_no_rows(invariant: bool) -> None:
    weight = torch.randn(128, 256, device=DEVICE)
    multiply = triton_kernels(invariant=invariant).linear
    assert multiply(weight[:0], weight, None).shape == (0, 128)


def test_linear_refuses_shapes_that_are_not_multiples() -> None:
    x, weight = torch.zeros(1, 64, device=DEVICE), torch.zeros(40, 64, device=DEVICE)
    with pytest.raises(ValueError, match=r"weight \(40, 64\)"):
        linear(x, weight, torch.empty(1, 40, device=DEVICE), tiling=Tiling(64, 128, 16, 2, 4))


def probs_of(logits: torch.Tensor, params: list[SamplingParams]) -> Floats:
    """Return the host's distributions [rows, vocab]."""
    pairs = zip(logits.float().numpy(), params, strict=True)
    return np.stack([target_probs(row, options) for row, options in pairs])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.6])
def test_draw_is_the_hosts(temperature: float) -> None:
    rows, vocab = (24, 3000) if DEVICE == "cpu" else (512, 128256)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 2.5
    words = np.array([word(seed, 100 + seed) for seed in range(rows)], np.uint64)
    probs = probs_of(logits, [SamplingParams(temperature=temperature)] * rows)
    wanted = host_draw(probs.__getitem__, words)
    drawn = _drawn(logits, words, [temperature] * rows)
    assert drawn == wanted
    tails = sum(float(probs[row, token]) < HEAD for row, token in enumerate(wanted))
    assert tails or temperature == 0.3


@pytest.mark.parametrize(("vocab", "chunk"), [(900, 1024), (5000, 1024), (5000, 4096)])
def test_draw_from_flat_rows_whose_head_has_hundreds_of_tokens_or_none(
    vocab: int, chunk: int
) -> None:
    rows = 12
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 0.05
    words = np.array([word(seed, seed) for seed in range(rows)], np.uint64)
    probs = probs_of(logits, [SamplingParams(temperature=1.0)] * rows)
    assert int((probs[0] >= HEAD).sum()) > 256 or vocab == 5000
    function = partial(draw, chunk=chunk)
    wanted = host_draw(probs.__getitem__, words)
    assert _drawn(logits, words, [1.0] * rows, function=function) == wanted


def test_draw_of_bounded_greedy_and_broken_rows() -> None:
    vocab = 700
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(3))
    logits[1, [20, 600]] = 9.0
    logits[2] = float("nan")
    logits[3, 5:] = float("-inf")
    logits[5:7] = float("-inf")
    logits[7:, 30] = float("inf")
    words = np.arange(9, dtype=np.uint64)
    bound = [float("-inf")] * 9
    bound[4] = float(logits[4].topk(3).values[-1])
    heat = [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    drawn = _drawn(logits, words, heat, bound)
    assert drawn[5:] == [-1] * 4
    assert drawn == _drawn(logits, words, heat, bound, plain.draw)
    assert drawn[:3] == [int(logits[0].argmax()), 20, -1]
    assert 0 <= drawn[3] < 5
    probs = probs_of(logits[4:5], [SamplingParams(temperature=1.0, top_k=3)])
    assert drawn[4:5] == host_draw(probs.__getitem__, words[4:5])


def limits(rows: int, seed: int) -> list[SamplingParams]:
    """Return options of every combination that bounds a row, in random order."""
    numbers = np.random.default_rng(seed)
    return [
        SamplingParams(
            temperature=float(numbers.choice([0.3, 1.0, 1.7])),
            top_k=int(numbers.choice([0, 2, 5, 40, 1000])),
            top_p=float(numbers.choice([1.0, 0.1, 0.5, 0.9, 0.99])),
            min_p=float(numbers.choice([0.0, 0.05, 0.3])),
        )
        for _ in range(rows)
    ]


def bounds_of(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=DEVICE)

    return bounds(
        logits.to(DEVICE),
        column("temperature", torch.float32),
        column("top_k", torch.int32),
        column("top_p", torch.float32),
        column("min_p", torch.float32),
        chunk=64 if DEVICE == "cpu" else 4096,
    ).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_bounds_leave_what_the_host_leaves(dtype: torch.dtype, spread: float) -> None:
    rows, vocab = (16, 150) if DEVICE == "cpu" else (4096, 32000)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(4)) * spread
    logits[0] = 1.0  # a tie of all
    logits[1, 3:] = -torch.inf
    logits = logits.to(dtype)
    params = limits(rows, seed=5)
    bound = bounds_of(logits, params)
    for row in range(rows):
        (probs,) = probs_of(logits[row : row + 1], params[row : row + 1])
        scores = logits[row].float()
        left = (scores >= bound[row]) & (scores > -torch.inf)
        left &= ((scores - scores.max()) / params[row].temperature).exp() > 0.0
        assert np.array_equal(left.numpy(), probs > 0.0), params[row]


def test_rows_without_limits_have_no_bound() -> None:
    logits = torch.randn(3, 150, generator=torch.Generator().manual_seed(6))
    greedy = SamplingParams(temperature=0.0, top_p=0.5, min_p=0.1)
    free = SamplingParams(temperature=1.0)
    bound = bounds_of(logits, [greedy, free, SamplingParams(temperature=1.0, top_k=150)])
    assert bound.tolist() == [-torch.inf] * 3


def test_bounded_draws_are_the_hosts() -> None:
    rows, vocab = (24, 150) if DEVICE == "cpu" else (4096, 32000)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(7)) * 2.0
    params = limits(rows, seed=8)
    words = np.array([word(seed, 9) for seed in range(rows)], np.uint64)
    wanted = host_draw(probs_of(logits, params).__getitem__, words)
    bound = bounds_of(logits, params).tolist()
    assert _drawn(logits, words, [p.temperature for p in params], bound) == wanted


@pytest.mark.parametrize("columns", [5, 150, 700])
def test_candidates_are_those_of_plain_torch(columns: int) -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(8, columns, generator=generator) * 3.0
    logits[5, 2:] = -torch.inf
    logits[6] = torch.nan
    logits[7] = 1.0  # a tie of all
    tokens = torch.randperm(6000, generator=generator)[: 8 * columns].view(8, -1)
    temperature = torch.tensor([0.0, 0.4, 1.0, 1.7, 1.0, 0.8, 1.0, 0.0])
    bound = torch.full((8,), -torch.inf)
    bound[4] = logits[4].topk(3).values[2]
    words = torch.randint(-(2**62), 2**62, (8,), generator=generator)
    given = [x.to(DEVICE) for x in (logits, tokens, temperature, bound, words)]
    found, chance = candidates(*given, chunk=64 if DEVICE == "cpu" else 2048)
    wanted, wanted_chance = plain.candidates(*(x.cpu() for x in given))
    torch.testing.assert_close(chance.cpu(), wanted_chance, rtol=1e-4, atol=1e-6)
    is_node = wanted_chance > 0.0
    assert torch.equal(found.cpu()[:7][is_node[:7]], wanted[:7][is_node[:7]])
    assert found[7].tolist() == tokens[7, :4].tolist()
    assert is_node.sum(1).tolist()[4:7] == [3, 2, 0]


def _drawn(
    logits: torch.Tensor,
    words: np.ndarray,  # type: ignore[type-arg]
    temperature: list[float],
    bound: list[float] | None = None,
    function: Callable[..., torch.Tensor] = CHUNKED,
) -> list[int]:
    rows = len(logits)
    tokens = function(
        logits.to(DEVICE),
        torch.tensor(temperature, device=DEVICE),
        torch.tensor(bound or [float("-inf")] * rows, device=DEVICE),
        torch.from_numpy(words.view(np.int64)).to(DEVICE),
    )
    found: list[int] = tokens.cpu().tolist()
    return found
