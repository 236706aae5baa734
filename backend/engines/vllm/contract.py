"""The meaning of each request option where vLLM is the target, in one table: for those who refuse,
for the docs, and for tests.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Meaning(Enum):
    """How an option compares with the same one on Spindle's own engines."""

    SAME = "same"
    OTHER = "other"
    REFUSED = "refused"


class Row(NamedTuple):
    """An option, or some of one kind, by the names of ``backend.request.GenerationRequest``."""

    options: tuple[str, ...]
    meaning: Meaning
    note: str = ""
    """Why it is refused, how it differs, or when it is refused although it is the same."""


_PENALTY = (
    "refused where it would count the prompt: vLLM counts the output alone, which "
    "prompt_ignore_length asks for if it is as long as the prompt; refused beyond -2 to 2, and "
    "with resumed_tokens"
)

ROWS = (
    Row(("text_input", "input_ids", "prompt_token_ids", "add_special_tokens"), Meaning.SAME),
    Row(("max_tokens", "fit_max_tokens", "stream"), Meaning.SAME),
    Row(("exclude_input_in_output", "skip_special_tokens"), Meaning.SAME),
    Row(("pad_id", "timeout_s"), Meaning.SAME),
    Row(("end_id", "stop_token_ids"), Meaning.SAME),
    Row(("stop_words", "stop_word_ids"), Meaning.SAME),
    Row(("temperature",), Meaning.SAME, "refused over 2"),
    Row(("top_k", "top_p"), Meaning.SAME),
    Row(("min_p",), Meaning.SAME, "refused with a drafter"),
    Row(
        ("seed",),
        Meaning.OTHER,
        "the draws are vLLM's: a seed gives another text than on Spindle's engines, and gives the "
        "same text again only where vLLM's logits do not depend on what else is in the batch",
    ),
    Row(
        ("min_tokens",),
        Meaning.SAME,
        "refused with resumed_tokens, and where the model's own end token does not end the text",
    ),
    Row(("repetition_penalty",), Meaning.SAME),
    Row(("presence_penalty", "frequency_penalty"), Meaning.SAME, _PENALTY),
    Row(("prompt_ignore_length",), Meaning.SAME, "refused where it is shorter than the prompt"),
    Row(("bad_words", "bad_word_ids"), Meaning.SAME),
    Row(
        ("bias", "embedding_bias_words", "embedding_bias_weights"),
        Meaning.SAME,
        "refused with a drafter",
    ),
    Row(
        ("return_log_probs", "top_log_probs"),
        Meaning.SAME,
        "refused for a sampled request with top_k, top_p or min_p: vLLM computes them after those",
    ),
    Row(("return_context_logits", "return_generation_logits"), Meaning.REFUSED, "vLLM gives none"),
    Row(("return_prompt_log_probs",), Meaning.REFUSED, "vLLM's are not passed on"),
    Row(("top_p_decay", "top_p_min", "top_p_reset_id"), Meaning.REFUSED, "vLLM has no such option"),
    Row(
        ("guide_type", "guide"),
        Meaning.OTHER,
        "vLLM's own llguidance follows the grammar, with its rules for blanks; refused where the "
        "model's own end token does not end the text, and with resumed_tokens",
    ),
    Row(
        ("num_draft_tokens",),
        Meaning.SAME,
    ),
    Row(
        ("resumed_tokens",),
        Meaning.SAME,
        "refused with penalties, min_tokens and grammars, for which vLLM would take them as prompt",
    ),
    Row(("cache_salt",), Meaning.SAME),
    Row(("remember",), Meaning.OTHER, "without effect: no draft of vLLM's remembers answers"),
)

REFUSES = {
    name: row.note
    for row in ROWS
    if row.meaning is Meaning.REFUSED
    for name in row.options
    if name not in ("top_p_min", "top_p_reset_id")  # they do nothing without top_p_decay
}
"""Reasons by option, as ``backend.core.preparation.check_served`` reads them."""
