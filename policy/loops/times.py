"""The time a step takes: the tables, each part times its measured factor, and what steps teach."""

import math
from typing import NamedTuple

import numpy as np

from .arrays import Floats, Ints
from .compiling import FLOATS, INTS, entry, helper, record

VERIFY, OVERHEAD, FIRST_DRAFT = 0, 1, 2
"""Places of a step's parts: the target, the overhead, then the drafts in order."""
OCTAVES = 15
"""Places of a shape: 1, 2, 4, ... 16384 tokens."""
MAX_CORRECTION = 8.0  # either way
MAX_SHAPE = math.log(2.0)  # either way
MAX_VERIFYING = math.log(4.0)
LAST_PLACE = OCTAVES - 1 - 1e-9
WIDTH_STEPS = 8.0  # passes that keep a width, on average: about as often prompts change it
APPLY_STEPS = 8  # steps from one curve to the next: making one takes as long as a plan

_RATE = 0.05  # share of a step's surprise that moves a factor
_MAX_SURPRISE = 4.0  # of one step: a garbage collection is no trend
_IDLE_FACTOR, _IDLE_KEEP = 1.5, 0.9995  # an unused draft's slowdown decays, or it would stay unused
_MAX_SHAPE_SURPRISE = 0.25  # of one step
_TABLE_STEPS = 2.0  # steps that what the start measured is worth
_FADING = 0.998  # share of the evidence by octave that a step leaves
_MAX_CHANGE_SURPRISE = 0.5  # of one step, as a share of its pass
_SMALL_CHANGE = 0.05  # share of a pass that a change of width may take if the pass teaches
_LEAST_OCTAVES = 3.0  # octaves that what they have in common holds for all of
_NEIGHBOUR = 0.5  # share of an octave's shape that the next one has, which was not seen
_ENOUGH = 1.0  # evidence below which an octave is as its neighbours are


class Times(NamedTuple):
    """The known times of a step, in seconds: tables, to be multiplied by ``factor``."""

    target_s: Floats
    """[t] a pass of t tokens, corrected in shape; beyond its end the line ``target_slope_s``."""
    target_slope_s: float
    row_s: float
    """A pass, for each row."""
    context_s: float
    """A pass, for each cached token."""
    node_context_s: float
    """A pass, for each cached token before each proposed one."""
    draft_s: Floats
    """[D, t] a draft's forward of t tokens; beyond its end the line ``draft_slope_s[D]``."""
    draft_slope_s: Floats  # [D]
    draft_row_s: Floats
    """[D] a draft's forward, for each row."""
    draft_context_s: Floats
    """[D] a draft's forward, for each cached token."""
    overhead_s: float
    """Every step, besides forwards."""
    speculation_s: float
    """A step that speculates, in addition."""
    factor: Floats
    """[2 + D] measured over predicted time, places as ``VERIFY``; the overhead's is 1."""
    change_s: float
    """A change of the pass's width, as steps showed it; below 0: none has."""
    verifying: float
    """Factor of the decoding tokens of a pass that verifies some, as steps showed it; 1: a pass
    takes the same without proposals.
    """


TIMES = record(
    Times,
    *(FLOATS[1], FLOATS[0], FLOATS[0], FLOATS[0], FLOATS[0], FLOATS[2], FLOATS[1], FLOATS[1]),
    *(FLOATS[1], FLOATS[0], FLOATS[0], FLOATS[1], FLOATS[0], FLOATS[0]),
)


@entry(TIMES, INTS[0])
def verify_s(times: Times, tokens: int) -> float:
    """Return the seconds of a pass of n tokens, rows and context apart."""
    last = len(times.target_s) - 1
    seconds = times.target_s[min(tokens, last)] + times.target_slope_s * max(tokens - last, 0)
    return times.factor[VERIFY] * seconds


@helper
def change_s(times: Times, last_tokens: int, change_tokens: int) -> float:
    """Return what a change of width takes after a pass of ``last_tokens``, in seconds: before any
    step showed it, as long as ``change_tokens`` more tokens.
    """
    if times.change_s >= 0:
        return times.change_s
    return verify_s(times, last_tokens + change_tokens) - verify_s(times, last_tokens)


@helper
def decoding_s(times: Times, decoding: int, rows: int, context: int) -> float:
    """Return the seconds of a pass's decoding tokens, rows and cached tokens, which take
    ``verifying`` times as long if it verifies any.
    """
    other_s = times.factor[VERIFY] * (rows * times.row_s + context * times.context_s)
    return verify_s(times, decoding) + other_s


@helper
def price_passes(
    times: Times, first: int, decoding: int, last_tokens: int, change_tokens: int, seconds: Floats
) -> None:
    """Compute the seconds of passes of ``first`` tokens and up, into ``seconds[m]``, as plan and
    trim charge them; rows and context apart, and what verifying adds to the first. A pass of
    ``first`` tokens has ``decoding`` ones that are no prompt's.

    On an engine that prefers to keep its width, a pass of another number of tokens than the
    ``last_tokens`` of the one before takes ``change_s`` longer (``change_tokens`` 0: no longer).
    That is spread over the passes that keep the new width: charged to one, it would hold
    the batch at any width it ever had. A narrower pass is padded to that width if this is quicker.
    """
    target_s, slope_s, factor = times.target_s, times.target_slope_s, times.factor[VERIFY]
    last = len(target_s) - 1
    same_s = verify_s(times, last_tokens)
    charged_s = change_s(times, last_tokens, change_tokens) / WIDTH_STEPS
    for m in range(len(seconds)):
        over = max(first + m - last, 0)
        seconds[m] = factor * (target_s[first + m - over] + slope_s * over)
        if change_tokens:
            seconds[m] += charged_s
            if first + m <= last_tokens:
                seconds[m] = min(seconds[m], same_s)
        if times.verifying > 1:
            more_s = verify_s(times, decoding + m) - verify_s(times, decoding)
            seconds[m] += (times.verifying - 1) * more_s


@helper
def change_left_s(times: Times, tokens: int, last_tokens: int, change_tokens: int) -> float:
    """Return the seconds that a pass of n tokens really takes beyond what ``price_passes`` charges
    to it: the rest of a change of width.
    """
    if change_tokens == 0 or tokens == last_tokens:
        return 0.0
    same_s, whole_s = verify_s(times, last_tokens), change_s(times, last_tokens, change_tokens)
    if tokens < last_tokens and same_s <= verify_s(times, tokens) + whole_s / WIDTH_STEPS:
        return 0.0  # it is padded
    return whole_s * (1 - 1 / WIDTH_STEPS)


@helper
def forward_s(times: Times, d: int, tokens: int) -> float:
    """Return the seconds of a draft's forward of n tokens, rows and context apart."""
    if tokens == 0:
        return 0.0
    last = times.draft_s.shape[1] - 1
    seconds = times.draft_s[d, min(tokens, last)]
    seconds += times.draft_slope_s[d] * max(tokens - last, 0)
    return times.factor[FIRST_DRAFT + d] * seconds


class TimedStep(NamedTuple):
    """The rows of a step that ran, and what they were planned for."""

    row: Ints
    """[m] the row of the view, -1: it has just ended its prompt, and its tokens are prefill."""
    draft: Ints  # [m]
    length: Ints  # [m]
    verified: Ints  # [m]
    context: Ints
    """[n] by row of the view, like ``catchup``."""
    catchup: Ints  # [n, D]
    prefill_tokens: int
    padded_tokens: int
    """Nodes of every row if any has one, as on an engine that pads; 0: as many as it has."""
    pass_tokens: int
    """As ``policy.plan.Outcome``."""
    last_tokens: int
    """Tokens of the pass before, like ``policy.plan.View.pass_tokens``."""
    change_tokens: int
    """As ``policy.plan.View``."""


STEP = record(TimedStep, *[INTS[1]] * 5, INTS[2], *[INTS[0]] * 5)


@entry(TIMES, STEP, FLOATS[1])
def predict(times: Times, step: TimedStep, parts: Floats) -> tuple[int, float, float]:
    """Compute what a step should have taken, ``parts[2 + D]``, without a change of width; return
    the tokens of the target's pass, the seconds of its curve at them, and ``decoding_s``; 0: it
    verifies none.
    """
    t, s = times, step
    drafts = len(t.draft_row_s)
    rows, context, nodes, node_context, deepest = 0, 0, 0, 0, 0
    padded = s.padded_tokens > 0 and s.verified.sum() > 0
    for i in range(len(s.row)):
        r = s.row[i]
        if r < 0:
            continue
        verified = s.padded_tokens if padded else s.verified[i]
        rows += 1
        nodes += verified
        context += s.context[r]
        node_context += verified * s.context[r]
        deepest = max(deepest, s.length[i])
    parts[:] = 0.0
    parts[OVERHEAD] = t.overhead_s + (t.speculation_s if deepest else 0.0)
    count = np.zeros((drafts, max(deepest, 1)), np.int64)
    for i in range(len(s.row)):
        r, d, k = s.row[i], s.draft[i], s.length[i]
        if r < 0 or k == 0 or d < 0:
            continue
        for j in range(k):
            count[d, j] += max(s.catchup[r, d], 1) if j == 0 else 1
        alone_s = t.draft_row_s[d] + t.draft_context_s[d] * s.context[r]
        parts[FIRST_DRAFT + d] += t.factor[FIRST_DRAFT + d] * k * alone_s
    for d in range(drafts):
        for j in range(deepest):
            parts[FIRST_DRAFT + d] += forward_s(t, d, count[d, j])
    tokens = max(nodes + rows + s.prefill_tokens, s.pass_tokens)
    base_s = verify_s(t, tokens)
    other_s = rows * t.row_s + context * t.context_s + node_context * t.node_context_s
    parts[VERIFY] = base_s + t.factor[VERIFY] * other_s
    verified_s = decoding_s(t, nodes + rows, rows, context) if nodes else 0.0
    parts[VERIFY] += (t.verifying - 1) * verified_s
    return tokens, base_s, verified_s


@helper
def _bounded(factor: float) -> float:
    return min(max(factor, 1 / MAX_CORRECTION), MAX_CORRECTION)


@helper
def _learn_factors(
    factor: Floats,  # [2 + D]
    predicted: Floats,  # [2 + D]
    measured: Floats,  # [2 + D]
) -> None:
    """Move factors, in place: a slow geometric average of clipped surprises."""
    for p in range(len(factor)):
        if p == OVERHEAD:
            continue
        if predicted[p] > 0 and measured[p] > 0:
            surprise = measured[p] / (predicted[p] * factor[p])
            surprise = min(max(surprise, 1 / _MAX_SURPRISE), _MAX_SURPRISE)
            factor[p] = _bounded(factor[p] * surprise**_RATE)
        elif p >= FIRST_DRAFT and predicted[p] == 0 and factor[p] > _IDLE_FACTOR:
            factor[p] = max(factor[p] * _IDLE_KEEP, _IDLE_FACTOR)


@helper
def _learn_change(
    change: Floats,  # [2] seconds of a change of width, and the steps that showed it
    before_s: float,
    expected_s: float,
    measured_s: float,
) -> None:
    """Learn from a pass of another width, in place, what that took beyond the ``expected_s`` of a
    pass that keeps its width; it was thought to take ``before_s``.
    """
    surprise_s = measured_s - expected_s - before_s
    most_s = _MAX_CHANGE_SURPRISE * expected_s
    rate = max(_RATE, 1 / (_TABLE_STEPS + change[1]))
    change[0] = max(before_s + rate * min(max(surprise_s, -most_s), most_s), 0.0)
    change[1] += 1


@helper
def _shape_at(shape: Floats, tokens: int) -> float:
    """Return how far the target's curve is off at n tokens, by ``shape[OCTAVES]``."""
    place = min(math.log2(tokens), LAST_PLACE)
    low = int(place)
    return shape[low] + (place - low) * (shape[low + 1] - shape[low])


@helper
def _learn_shape(
    factor: Floats,  # [2 + D]
    shape: Floats,  # [OCTAVES]
    steps: Floats,  # [OCTAVES]
    tokens: int,
    base_s: float,
    predicted: Floats,  # [2 + D]
    measured_s: float,
) -> None:
    """Let the two octaves about the target's tokens share what surprises there, in place;
    ``predicted`` gets the shape.
    """
    place = min(math.log2(tokens), LAST_PLACE)
    low = int(place)
    share = place - low
    predicted[VERIFY] += base_s * (math.exp(_shape_at(shape, tokens)) - 1)
    surprise = math.log(measured_s / (predicted[VERIFY] * factor[VERIFY]))
    surprise = min(max(surprise, -_MAX_SHAPE_SURPRISE), _MAX_SHAPE_SURPRISE)
    for octave in range(len(steps)):
        steps[octave] *= _FADING
    for octave in range(low, low + 2):
        part = share if octave > low else 1 - share
        rate = part * max(_RATE, 1 / (_TABLE_STEPS + steps[octave]))
        shape[octave] = min(max(shape[octave] + rate * surprise, -MAX_SHAPE), MAX_SHAPE)
        steps[octave] += part


@helper
def _settle_shape(
    factor: Floats,  # [2 + D]
    shape: Floats,  # [OCTAVES]
    steps: Floats,  # [OCTAVES]
) -> bool:
    """Make what octaves have in common the target's factor, and let those that were not seen take
    after their neighbours, in place; return False where none was seen.

    Few octaves say little about the others: a first server sees prompts alone, whose passes may be
    slow where those of a few tokens are as the table says.
    """
    weight, common = 0.0, 0.0
    for octave in range(OCTAVES):
        if steps[octave] >= _ENOUGH:
            certainty = steps[octave] / (steps[octave] + _TABLE_STEPS)
            weight += certainty
            common += certainty * shape[octave]
    if weight == 0:
        return False
    common /= max(weight, _LEAST_OCTAVES)
    factor[VERIFY] = _bounded(factor[VERIFY] * math.exp(common))
    before = -1
    for octave in range(OCTAVES):
        if steps[octave] < _ENOUGH:
            continue
        shape[octave] -= common
        for between in range(before + 1, octave):
            if before < 0:
                shape[between] = shape[octave] * _NEIGHBOUR ** (octave - between)
                continue
            share = (between - before) / (octave - before)
            shape[between] = shape[before] + share * (shape[octave] - shape[before])
        before = octave
    for octave in range(before + 1, OCTAVES):
        shape[octave] = shape[before] * _NEIGHBOUR ** (octave - before)
    for octave in range(OCTAVES):
        shape[octave] = min(max(shape[octave], -MAX_SHAPE), MAX_SHAPE)
    return True


@entry(*[FLOATS[1]] * 3, INTS[0], INTS[0], FLOATS[0], *[FLOATS[1]] * 2, FLOATS[0])
def learn_times(
    factor: Floats,  # [2 + D]
    shape: Floats,  # [OCTAVES]
    steps: Floats,  # [OCTAVES]
    age: int,
    tokens: int,
    base_s: float,
    predicted: Floats,  # [2 + D]
    measured: Floats,  # [2 + D]
    step_s: float,
) -> int:
    """Learn from a step of ``step_s`` seconds, in place, and return the age of the shape that is
    applied: 0: it changes now, -1: to the table's own.

    ``predicted`` is by the tables alone, ``measured`` 0 for a part that is not known. If none is,
    all share the surprise of the whole, which shows no shape.
    """
    any_part = False
    for p in range(len(measured)):
        any_part = any_part or measured[p] > 0
    if not any_part:
        whole_s = (factor * predicted).sum()
        for p in range(len(measured)):
            measured[p] = factor[p] * predicted[p] * (step_s / whole_s if whole_s > 0 else 0.0)
        _learn_factors(factor, predicted, measured)
        return age
    if not (tokens > 0 and base_s > 0 and measured[VERIFY] > 0):
        _learn_factors(factor, predicted, measured)
        return age
    _learn_shape(factor, shape, steps, tokens, base_s, predicted, measured[VERIFY])
    _learn_factors(factor, predicted, measured)
    if age + 1 < APPLY_STEPS:
        return age + 1
    return 0 if _settle_shape(factor, shape, steps) else -1


@helper
def _learn_overhead(
    overhead_s: Floats,  # [2] of plain steps and of others
    speculates: bool,
    measured_s: float,
) -> None:
    """Move the overhead of steps of a kind, in place: a slow average, without pauses."""
    kind = 1 if speculates else 0
    if measured_s <= 0:
        return
    if overhead_s[kind] == 0:
        overhead_s[kind] = measured_s
    measured_s = min(measured_s, _MAX_SURPRISE * overhead_s[kind])
    overhead_s[kind] += _RATE * (measured_s - overhead_s[kind])


@helper
def _learn_verifying(
    verifying: Floats,  # [2] logarithm of Times.verifying, and the steps that showed it
    surprise: float,
) -> None:
    """Let a pass that verified tokens teach how much longer such passes take, in place. It shares
    its surprise with the octaves; plain passes tell the two apart.
    """
    surprise = min(max(surprise, -_MAX_SHAPE_SURPRISE), _MAX_SHAPE_SURPRISE)
    rate = max(_RATE, 1 / (_TABLE_STEPS + verifying[1]))
    verifying[0] = min(max(verifying[0] + rate * surprise, 0.0), MAX_VERIFYING)
    verifying[1] = _FADING * verifying[1] + 1


@entry(TIMES, STEP, FLOATS[1], FLOATS[0], *[FLOATS[1]] * 6, INTS[0])
def learn_step(
    times: Times,
    step: TimedStep,
    measured: Floats,  # [2 + D]
    step_s: float,
    factor: Floats,  # [2 + D]
    shape: Floats,  # [OCTAVES]
    steps: Floats,  # [OCTAVES]
    overhead_s: Floats,  # [2] of plain steps and of others
    change: Floats,  # [2] as in _learn_change
    verifying: Floats,  # [2] as in _learn_verifying
    age: int,
) -> int:
    """Learn from the times of a step, in place; see ``learn_times``.

    A pass whose width changed says nothing about what its tokens take, unless a change takes little
    of it.
    """
    predicted = np.empty(len(factor))
    tokens, base_s, verified_s = predict(times, step, predicted)
    if verified_s > 0:
        more = math.exp(verifying[0]) - 1
        predicted[VERIFY] += more * verified_s
        if step.prefill_tokens == 0:
            base_s *= 1 + more
    if step.change_tokens and tokens != step.last_tokens:
        whole_s = change[0]
        if change[1] == 0:
            whole_s = factor[VERIFY] * change_s(times, step.last_tokens, step.change_tokens)
        if step.last_tokens and not step.prefill_tokens and measured[VERIFY] > 0:
            shaped_s = base_s * (math.exp(_shape_at(shape, tokens)) - 1)
            expected_s = factor[VERIFY] * (predicted[VERIFY] + shaped_s)
            _learn_change(change, whole_s, expected_s, measured[VERIFY])
        if whole_s > _SMALL_CHANGE * base_s:
            measured[VERIFY] = 0.0
    if step.prefill_tokens == 0:  # taking requests in is no cost of a plan
        _learn_overhead(overhead_s, step.length.max() > 0, measured[OVERHEAD])
        if verified_s > 0 and measured[VERIFY] > 0:
            shaped_s = predicted[VERIFY] + base_s * (math.exp(_shape_at(shape, tokens)) - 1)
            _learn_verifying(verifying, math.log(measured[VERIFY] / (factor[VERIFY] * shaped_s)))
    return learn_times(factor, shape, steps, age, tokens, base_s, predicted, measured, step_s)


@entry(FLOATS[1], FLOATS[1], FLOATS[1], FLOATS[1])
def shape_curve(
    base_s: Floats,  # [t]
    place: Floats,  # [t] the octave of t tokens
    shape: Floats,  # [OCTAVES]
    shaped_s: Floats,  # [t]
) -> float:
    """Correct a curve by a shape, linearly between octaves, into ``shaped_s``; it never falls.
    Return the factor at its end.
    """
    ladder, highest, factor = np.exp(shape), 0.0, 1.0
    for tokens in range(len(base_s)):
        low = int(place[tokens])
        factor = ladder[low] + (place[tokens] - low) * (ladder[low + 1] - ladder[low])
        highest = max(highest, base_s[tokens] * factor)
        shaped_s[tokens] = highest
    return factor
