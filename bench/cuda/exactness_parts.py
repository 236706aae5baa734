"""Parts of the probe that compare bits and texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from backend.engines.cuda.heads import DeviceHead, HeadProposal
from backend.engines.cuda.kernels import plain_kernels, triton_kernels
from backend.engines.cuda.linear import Tiling, linear
from backend.engines.cuda.model import PagedModel
from backend.engines.cuda.pages import PAGE
from backend.engines.cuda.step import Slots, VerifyStep
from backend.engines.head.folder import HeadConfig
from backend.engines.head.network import HeadNetwork
from backend.engines.models.attention import ATTENTION
from backend.engines.spine import CANDIDATES
from backend.request import SamplingParams
from backend.sampling.distributions import target_probs
from backend.sampling.draw import HEAD
from backend.sampling.draw import draw as host_draw
from bench.cuda.kernel_parts import ATTENTIONS, AttentionCase, tilings
from bench.cuda.measuring import Probe
from bench.cuda.step import Shape, Step, Weights, new_kv

TEXT_TOKENS = 40


def bits(probe: Probe) -> dict[str, Any]:
    """Compare the logits of rows alone and in a batch, of chains and of decoding their tokens, and
    products and attention over all ways of cutting them.
    """
    shape = replace(probe.shape, layers=probe.of(4, 2))
    weights = Weights(shape, probe.device, probe.dtype)
    kv = new_kv(shape, probe.of(64 * 40, 256), probe.device, probe.dtype)
    whole_rows, found = probe.of(64, 4), {}
    kernels = triton_kernels(invariant=True)
    many = Step(weights, kv, whole_rows, 1, 2048, kernels)
    many.fill(probe.context)
    many.run()
    together = many.logits.clone()
    for rows in probe.of((1, 2, 8, 17, 33), (1, 2)):
        one = Step(weights, kv, rows, 1, 2048, kernels)
        for field in ("ids", "position", "place", "table", "start"):
            target = getattr(one, field)
            target.copy_(getattr(many, field)[: len(target)])
        one.run()
        found[f"{rows} of {whole_rows} rows"] = torch.equal(one.logits, together[:rows])
    chain = Step(weights, kv, 4, 4, 2048, kernels)
    chain.fill(probe.context)
    chain.run()
    verified = chain.logits.view(4, 4, -1).clone()
    for at in range(4):
        one = Step(weights, kv, 4, 1, 2048, kernels)
        one.table.copy_(chain.table)
        one.start.fill_(probe.context + at)
        for field in ("ids", "position", "place"):
            getattr(one, field).copy_(getattr(chain, field).view(4, 4)[:, at])
        one.run()
        found[f"token {at} of a chain"] = torch.equal(one.logits, verified[:, at])
    if not probe.rehearse:
        found |= _same_products() | _same_attention(probe)
    print({key: same for key, same in found.items() if not same} or "all equal", flush=True)
    return {"same": found}


def _same_products() -> dict[str, bool]:
    """Compare our product over tilings and numbers of tokens with that of a token alone."""
    found = {}
    alone = Tiling(64, 128, 16, 5, 4)
    for n, k in ((6144, 4096), (4096, 14336)):
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
        x = torch.randn(320, k, device="cuda", dtype=torch.bfloat16)
        rows = [linear(row[None], weight, x.new_empty(1, n), tiling=alone) for row in x]
        wanted = torch.cat(rows)
        for tokens in (16, 32, 64, 128, 320):
            for tiling in tilings(tokens):
                out = linear(x[:tokens], weight, x.new_empty(tokens, n), tiling=tiling)
                key = f"product {n} x {k}, {tokens} tokens, {'/'.join(map(str, tiling))}"
                found[key] = torch.equal(out, wanted[:tokens])
    return found


def _same_attention(probe: Probe) -> dict[str, bool]:
    """Compare the attention of chains with that of their tokens one by one."""
    found, rows = {}, 4
    for most in (2, 4, 5, 9):
        case = AttentionCase(probe, probe.shape, rows, most, probe.context, 1)
        one = AttentionCase(probe, probe.shape, rows, 1, probe.context, 1)
        queries = case.q.view(rows, most, *case.q.shape[1:])
        one.kvs, one.table = case.kvs, case.table
        for lanes in (16, 32, 64):
            for cut in ATTENTIONS:
                chain, same = case.run(*cut, lanes).view_as(queries), True
                for at in range(most):
                    one.q, one.start = queries[:, at].contiguous(), case.start + at
                    same &= torch.equal(one.run(*cut, lanes), chain[:, at])
                key = f"attention {'/'.join(map(str, cut))} of {lanes} lanes, chain of {most}"
                found[key] = same
    return found


def distributions(probe: Probe) -> dict[str, Any]:
    """Compare draws on the device with the host's over random rows of every option that bounds
    them, and time the bounds of a step's rows.
    """
    rows, vocab, rounds = probe.of((5000, 2000, 20), (4, 150, 1))
    kernels = triton_kernels(invariant=True)
    numbers = np.random.default_rng(7)
    same, tails, began = 0, 0, time.monotonic()
    done = 0
    for _ in range(rounds):
        params, columns = _random_limits(numbers, rows, probe.device)
        spread = torch.from_numpy(numbers.choice([0.5, 2.0, 5.0], (rows, 1))).to(probe.device)
        logits = (torch.randn(rows, vocab, device=probe.device) * spread).to(probe.dtype)
        words = numbers.integers(0, 2**64, rows, np.uint64)
        bound = kernels.bounds(logits, *columns)
        noise = torch.from_numpy(words.view(np.int64)).to(probe.device)
        drawn = kernels.draw(logits, columns[0], bound, noise).cpu()
        probs = target_probs(logits.cpu(), params)
        wanted = torch.tensor(host_draw(probs, words))
        same += int((drawn == wanted).sum())
        tails += int((probs.gather(1, wanted[:, None]) < HEAD).sum())
        done += rows
        if time.monotonic() - began > probe.of(40.0, 600.0):
            break
    found: dict[str, Any] = {"rows": done, "same": same, "of the tail": tails, "ms": {}}
    for rows in probe.of((1, 64, 320), (2,)):
        _, columns = _random_limits(numbers, rows, probe.device)
        logits = torch.randn(rows, probe.of(128256, 150), device=probe.device).to(probe.dtype)
        replay = probe.graph(partial(kernels.bounds, logits, *columns))
        found["ms"][f"bounds of {rows} rows"] = probe.time_ms(replay)
    print(found, flush=True)
    return found


def _random_limits(
    numbers: np.random.Generator, rows: int, device: str
) -> tuple[list[SamplingParams], list[torch.Tensor]]:
    """Return random options and, as columns on the device, their temperature, top-k, top-p and
    min-p.
    """
    values = {
        "temperature": numbers.choice([0.3, 1.0, 1.7], rows),
        "top_k": numbers.choice([0, 2, 5, 40, 1000], rows),
        "top_p": numbers.choice([1.0, 0.1, 0.5, 0.9, 0.99], rows),
        "min_p": numbers.choice([0.0, 0.05, 0.3], rows),
    }
    lists = [column.tolist() for column in values.values()]
    params = [
        SamplingParams(temperature=heat, top_k=k, top_p=p, min_p=least)
        for heat, k, p, least in zip(*lists, strict=True)
    ]
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    columns = [
        torch.tensor(column, dtype=dtype, device=device)
        for column, dtype in zip(lists, dtypes, strict=True)
    ]
    return params, columns


def model(probe: Probe) -> dict[str, Any]:
    """Time steps of transformers' 8B with fused leaves, acceptance and commit included, and compare
    the texts that different plans and batches write.
    """
    rows_most = probe.of(128, 3)
    start = time.monotonic()
    paged, room = _paged_llama(probe, rows_most)
    found: dict[str, Any] = {
        "load_and_fuse_s": time.monotonic() - start,
        "fused": paged.fused,
        "refused": paged.refused,
    }
    print(found, flush=True)
    need = -(-room // PAGE)
    slots = Slots(rows_most, -(-need // 16) * 16, paged.device)
    blocks = torch.randperm(rows_most * need, device=paged.device).view(rows_most, need)
    slots.table[:, :need] = blocks.int()
    slots.seed.copy_(torch.randint(-(2**62), 2**62, (rows_most,)))
    found["steps"] = {}
    buckets: dict[tuple[int, int], tuple[VerifyStep, Callable[[], object]]] = {}
    for rows in probe.of((1, 8, 32, 64, 128), (1, 2, 3)):
        for most in (1, 3, 5):
            slots.length.fill_(probe.context)
            step = VerifyStep(
                paged, slots, rows, most - 1, tokens=rows * most, most=most, keys=room
            )
            buckets[rows, most] = step, probe.graph(step.run)
            slots.length.fill_(probe.context)
            ms = probe.time_ms(buckets[rows, most][1])
            found["steps"][f"{rows} rows, {most} tokens"] = ms
            print(f"{rows} rows, {most} tokens: {ms:.2f} ms", flush=True)
    first = torch.randint(0, probe.shape.vocab, (rows_most,)).to(paged.device)
    found["texts"] = {}
    for temperature in (0.0, 0.8):
        slots.temperature.fill_(temperature)
        widest = None
        for rows in probe.of((64, 8, 1), (3, 1)):

            def write(
                most: int, guess: torch.Tensor | None, rows: int = rows
            ) -> tuple[torch.Tensor, int]:
                slots.length.fill_(probe.context)
                slots.last.copy_(first)
                return _text(*buckets[rows, most], guess)

            text, _ = write(1, None)
            widest = text if widest is None else widest
            itself, steps = write(5, text)
            wrong = text.clone()
            wrong[:, 3::4] = 7
            wrong[::3] = 9
            found["texts"][f"{rows} rows at temperature {temperature}"] = cell = {
                "same as among more rows": torch.equal(text, widest[:rows]),
                "same where itself was proposed": torch.equal(itself, text),
                "all of itself accepted": steps == -(-TEXT_TOKENS // 5),
                "same where wrong tokens were proposed": torch.equal(write(3, wrong)[0], text),
                "distinct_tokens": int(text.unique().numel()),
            }
            print(rows, temperature, cell, flush=True)
    return found


def proposals(probe: Probe) -> dict[str, Any]:
    """Time a head's proposals on transformers' 8B, and the steps that verify the likeliest nodes of
    the batch: 3 a row in the mean, of 4 places with 4 candidates each.
    """
    found: dict[str, Any] = {}
    for rows, own, head, step in _proposing(probe, probe.of((1, 8, 64), (2,))):
        cell = {"propose_ms": probe.time_ms(probe.graph(head.run))}
        if own == probe.of(128, 8):
            verify = probe.graph(step.run)
            step.slots.length.fill_(probe.context)
            cell["verify_ms"] = probe.time_ms(verify)
        found[f"{rows} rows, {own} tokens of the text"] = cell
        print(rows, own, cell, flush=True)
    return {"ms": found}


def kernels(probe: Probe) -> dict[str, Any]:
    """Return what each kernel of a head's proposals and of their verification takes."""
    found: dict[str, Any] = {}
    for rows, own, head, step in _proposing(probe, probe.of((1, 64), (2,)), invariant=False):
        if own != probe.of(128, 8):
            continue
        for name, run in (("propose", head.run), ("verify", step.run)):
            replay = probe.graph(run)
            step.slots.length.fill_(probe.context)
            ms, spent = probe.time_ms(replay), _kernels_of(probe, replay)
            found[f"{name}, {rows} rows"] = {"ms": ms, "kernels": spent}
            print(name, rows, ms, flush=True)
            for line in spent[:22]:
                print("  ", *line, flush=True)
    return {"steps": found}


def _kernels_of(probe: Probe, launch: Callable[[], object]) -> list[tuple[float, int, str]]:
    """Return microseconds, launches and the name of each kernel, the longest first."""
    rounds, kind = 5, torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kind.CPU if probe.rehearse else kind.CUDA]) as profile:
        for _ in range(rounds):
            launch()
        probe.wait()
    found = [
        (
            round((event.cpu_time_total or event.device_time_total) / rounds, 1),
            event.count // rounds,
            event.key[:90],
        )
        for event in profile.key_averages()
    ]
    return sorted(found, reverse=True)


def _proposing(
    probe: Probe, sizes: tuple[int, ...], *, invariant: bool = True
) -> Iterator[tuple[int, int, HeadProposal, VerifyStep]]:
    """Yield, for numbers of rows and of tokens of the text, a head's proposals and the steps that
    verify them.
    """
    shape, depth = probe.shape, 4
    taps = (1, shape.layers)
    paged, room = _paged_llama(probe, probe.of(64, 2), taps, invariant=invariant)
    hidden = shape.hidden
    network = HeadNetwork(HeadConfig(shape.vocab, hidden, hidden, taps, rows=probe.of(16384, 60)))
    network = network.to(probe.device, probe.dtype).requires_grad_(requires_grad=False)
    embeddings = paged.lm.get_input_embeddings(), paged.lm.get_output_embeddings()  # type: ignore[operator]
    weights = [module.weight.detach() for module in embeddings]
    token_ids = torch.arange(network.config.rows, device=paged.device)
    for rows in sizes:
        for own in probe.of((0, 128, 512), (8,)):
            need = -(-room // PAGE)
            slots = Slots(
                rows, need, paged.device, states=(len(taps), hidden), own=own, dtype=probe.dtype
            )
            slots.table.copy_(torch.arange(rows * need, device=paged.device).view(rows, need))
            slots.length.fill_(probe.context)
            slots.own.fill_(7)
            slots.temperature.fill_(0.8)
            columns = depth * CANDIDATES
            step = VerifyStep(
                paged, slots, rows, columns, tokens=4 * rows, most=depth + 1, keys=room
            )
            head = HeadProposal(DeviceHead("head", network, token_ids, *weights), step, depth)
            yield rows, own, head, step


def random_llama(shape: Shape, device: str, dtype: torch.dtype) -> Any:
    """Return transformers' Llama of a shape with random weights."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.dim,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        initializer_range=shape.hidden**-0.5,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, dtype=dtype
        ).eval()


def _paged_llama(
    probe: Probe, rows: int, taps: tuple[int, ...] = (), *, invariant: bool = True
) -> tuple[PagedModel, int]:
    """Return a Llama of random weights and KV, and the tokens that a row has room for."""
    room = probe.context + 150
    lm = random_llama(probe.shape, probe.device, probe.dtype)
    kernels = plain_kernels() if probe.rehearse else triton_kernels(invariant=invariant)
    blocks = rows * -(-room // PAGE) + 1
    paged = PagedModel(lm, kernels, blocks=blocks, taps=taps)
    paged.fuse()
    for kv in paged.kv:
        kv.normal_().mul_(0.1)
    return paged, room


def _text(
    step: VerifyStep, replay: Callable[[], object], guess: torch.Tensor | None
) -> tuple[torch.Tensor, int]:
    """Return the texts [rows, TEXT_TOKENS] that a bucket writes from where its slots are, and the
    steps it took. ``guess`` [rows, TEXT_TOKENS] are proposed at their places.
    """
    rows, most, device = step.rows, step.most, step.slot.device
    text = torch.full((rows, TEXT_TOKENS + most), -1, dtype=torch.int64, device=device)
    done = torch.zeros(rows, dtype=torch.int64, device=device)
    offset, steps = torch.arange(most, device=device), 0
    while int(done.min()) < TEXT_TOKENS:
        if guess is not None:
            padded = torch.cat((guess, guess.new_full((rows, most), -1)), 1)
            step.token.copy_(padded.gather(1, done[:, None] + offset[:-1]))
            step.chance.copy_(step.token >= 0)
        replay()
        steps += 1
        at = done[:, None] + offset
        is_text = offset < step.count[:, None]
        text.scatter_(1, at, torch.where(is_text, step.emitted, text.gather(1, at)))
        done = (done + step.count).clamp(max=TEXT_TOKENS)
    return text[:, :TEXT_TOKENS], steps
