"""The forms of a head that ``make_head`` trains: ours, and an EAGLE-3 head as published."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from backend.engines.eagle.whole_text import load_reader, states_of
from backend.engines.head.network import HeadNetwork
from backend.engines.head.network import load as load_network
from backend.engines.models.spec import PlainLlama
from backend.storage.manifest import weights_sha256
from engines_build.distill.eagle import EagleNetwork, EagleUnroller, eagle_shape, export_eagle
from engines_build.distill.first_head import first_head, taps_of
from engines_build.distill.generate import served_dtype
from engines_build.distill.head import HeadSample, Unroller, Unrolls, export_head
from engines_build.distill.train import choose_shortlist


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The sizes of a head that its card names."""

    layers: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    rows: int


class Form(Protocol):
    """A head from its first weights to its folder."""

    kept_layers: tuple[int, ...]
    """Layers whose states the answers are kept with."""
    name: str
    """Name of its checkpoints."""

    def begin(
        self, samples: Sequence[HeadSample], embedding: Tensor, rows: Tensor, always: set[int]
    ) -> Unrolls:
        """Return what is trained; ``always`` are tokens that it proposes in any case, ``embedding``
        and ``rows`` [vocab, hidden] the target's.
        """
        ...

    def end(self) -> None:
        """Finish the weights after training, as they will be stored."""
        ...

    def export(self) -> HeadSizes:
        """Write the folder."""
        ...


class RecurrentForm:
    """A head of ours (``backend.engines.head``)."""

    def __init__(self, args: argparse.Namespace, config: PlainLlama) -> None:
        self._args, self._config = args, config
        self.kept_layers = taps_of(args.taps, config)
        self.name = f"head-{'-'.join(map(str, self.kept_layers))}"

    def begin(
        self, samples: Sequence[HeadSample], embedding: Tensor, rows: Tensor, always: set[int]
    ) -> Unrolls:
        """Return what is trained (``Form``); ``embedding`` and ``rows`` are [vocab, hidden]."""
        start, count = self._args.start, self._args.shortlist
        network, shortlist = first_head(
            start, self._config, self.kept_layers, samples, count, always
        )
        self._network, self._shortlist = network, shortlist
        return Unroller(network, embedding, rows, shortlist)

    def end(self) -> None:
        """Finish the weights (``Form``)."""
        if self._args.start:
            _mix_in(load_network(self._args.start)[0], self._args.start_share, self._network)
        self._network.bfloat16().float()

    def export(self) -> HeadSizes:
        """Write the folder (``Form``)."""
        export_head(self._network, self._shortlist, self._args.target, self._args.out)
        config = self._network.config
        return HeadSizes(config.layers, config.hidden_size, config.intermediate_size, config.rows)


class EagleForm:
    """An EAGLE-3 head in SafeAILab's files."""

    kept_layers: tuple[int, ...] = ()

    def __init__(self, args: argparse.Namespace, config: PlainLlama) -> None:
        self._args, self._config = args, config
        self._taps = taps_of(args.taps, config) if args.taps else ()
        self.name = f"eagle-{'-'.join(map(str, self._taps))}"

    def begin(
        self, samples: Sequence[HeadSample], embedding: Tensor, rows: Tensor, always: set[int]
    ) -> Unrolls:
        """Return what is trained (``Form``); ``embedding`` and ``rows`` are [vocab, hidden]."""
        config = self._config
        count = min(self._args.shortlist, config.vocab_size)
        targets = ((s.top_ids, s.top_logprobs) for s in samples)
        shortlist = choose_shortlist(targets, count, config.vocab_size, always)
        self._network = EagleNetwork(eagle_shape(config, self._taps, count), shortlist)
        self._rows = rows
        lm = load_reader(self._args.target, served_dtype("cpu"))

        def states(
            tokens: Tensor,  # [n]
        ) -> Tensor:
            with torch.no_grad():
                return states_of(lm, tokens.tolist())

        return EagleUnroller(self._network, states, embedding, rows, shortlist)

    def end(self) -> None:
        """Finish the weights (``Form``)."""
        self._network.half().float()

    def export(self) -> HeadSizes:
        """Write the folder (``Form``)."""
        export_eagle(self._network, self._rows, self._args.out, names_layers=bool(self._taps))
        shape = self._network.shape
        return HeadSizes(
            shape.layers, shape.hidden_size, shape.intermediate_size, shape.draft_vocab_size
        )


FORMS: dict[str, Callable[[argparse.Namespace, PlainLlama], Form]] = {
    "recurrent": RecurrentForm,
    "eagle": EagleForm,
}


def run_name(form: Form, args: argparse.Namespace, sequences: int) -> str:
    """Return the name of a training's checkpoint and curve."""
    name = f"{form.name}-sequences{sequences}-tokens{args.train_tokens}-seed{args.seed}"
    return f"{name}-start{weights_sha256(args.start)[:8]}" if args.start else name


def _mix_in(start: HeadNetwork, share: float, network: HeadNetwork) -> None:
    """Move a network's weights by a share of the way back to those that its training began with, so
    that what these had learnt of other answers is not forgotten (arXiv 2109.01903).
    """
    before = dict(start.named_parameters())
    for name, weights in network.named_parameters():
        weights.data.lerp_(before[name].data, share)
