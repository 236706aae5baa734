"""The one table of the models' tensors, from which the codec, every ``config.pbtxt`` and
``docs/reference/tensors.md`` are made.

Names, types and dims are those of NVIDIA's ``inflight_batcher_llm`` models, so that their clients
need no change. A tensor that is not served is declared too: it accepts neutral values; anything
else is refused by an error that names the tensor and the reason.
``tests/contract/test_recorded_contract.py`` holds the table against NVIDIA's own files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

NUMPY_TYPES: dict[str, type[Any]] = {
    "STRING": np.object_,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
}
"""Triton's data types that the table uses, and what they arrive as."""


class Reason(Enum):
    """Why a tensor is refused."""

    LORA = "LoRA adapters are not served"
    MULTIMODAL = "images, video and prompt tables are not served"
    ENCODER = "models with an encoder are not served"
    BEAMS = "beam search is not served"
    DISAGGREGATED = "prefill and decoding happen in one engine process"


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a number: at least ``low`` (or ``over`` it), at most ``high``, and finite."""

    low: float
    high: float = math.inf
    over: bool = False
    note: str = ""
    bans: bool = False  # minus infinity is allowed, too

    def wrong(self, value: float) -> str:
        """Return what a value should be and is not; '' where it is."""
        enough = value > self.low if self.over else value >= self.low
        if enough and value <= self.high and math.isfinite(value):
            return ""
        if self.bans and value == -math.inf:
            return ""
        if self.over:
            must = f"over {self.low:g} and at most {self.high:g}"
        elif self.high < math.inf:
            must = f"between {self.low:g} and {self.high:g}{self.note}"
        else:
            finite = "a finite number of " if isinstance(value, float) else ""
            must = f"{finite}at least {self.low:g}"
        return (
            f"must be {must}, got {value:g}"
            if isinstance(value, float)
            else (f"must be {must}, got {value}")
        )


LARGEST_CHANGE = 1e6
"""Bound of weights and penalties: far beyond any effect, far below what an fp32 logit overflows
at.
"""
_CHANGE = Range(-LARGEST_CHANGE, LARGEST_CHANGE)
_BIAS = Range(-LARGEST_CHANGE, LARGEST_CHANGE, note=", or -inf: a ban", bans=True)
_SHARE = Range(0, 1)


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor without its batch dimension."""

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    """-1 is any length."""
    does: str = ""
    """Its effect, in a few words."""
    required: bool = False
    refused: Reason | None = None
    """Why a value other than those in ``neutral`` is refused; of an output, why it never comes."""
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing, as an empty tensor does."""
    key: str = ""
    """The request's attribute where that has another name."""
    extra: bool = False
    """Not NVIDIA's."""
    effect: bool = True
    """Off for inputs whose type is checked and nothing else."""
    range: Range | None = None
    """That of each of its numbers."""

    @property
    def attribute(self) -> str:
        """The name of what it means."""
        return self.key or self.name


@dataclass(frozen=True, slots=True)
class TritonModel:
    """One served name. ``settings``: its batch size follows ``serving.json``, and so does its
    transaction policy unless it is not to be ``decoupled``.
    """

    name: str
    inputs: tuple[Field, ...]
    outputs: tuple[Field, ...]
    settings: bool = True
    decoupled: bool = True


def _f(name: str, dtype: str, dims: tuple[int, ...], does: str, **more: Any) -> Field:
    return Field(name, dtype, dims, does, **more)


def _hint(name: str, dtype: str, dims: tuple[int, ...], does: str) -> Field:
    return Field(name, dtype, dims, f"checked, without effect: {does}", effect=False)


def _no(
    reason: Reason, name: str, dtype: str, dims: tuple[int, ...] = (1,), *neutral: Any
) -> Field:
    return Field(name, dtype, dims, refused=reason, neutral=neutral)


_ONE, _ANY, _ROWS = (1,), (-1,), (-1, -1)

# fmt: off
# A table: a tensor in as few lines as it takes, rather than one argument a line.

_MIN_P = _f(
    "min_p", "FP32", _ONE, extra=True, range=_SHARE,
    does="no token less likely than this share of the likeliest, before top_k and top_p; 0: off",
)
_ADD_SPECIAL_TOKENS = _f(
    "add_special_tokens", "BOOL", _ONE, extra=True,
    does="whether the text gets the tokenizer's special tokens, such as a begin token; absent: "
    "`add_special_tokens` in serving.json",
)
_SHARED_INPUTS = (
    _f("end_id", "INT32", _ONE, "token that ends the text; -1: none; absent: the model's own"),
    _f("pad_id", "INT32", _ONE, "checked, without effect: nothing is padded"),
    _f("temperature", "FP32", _ONE,
       "none of it, top_k, top_p and min_p given, temperature 0 (below 1e-5) or top_k 1: greedy",
       range=Range(0)),
    _f("repetition_penalty", "FP32", _ONE,
       "over 0; logits of tokens that have occurred are divided by it (negative ones multiplied); "
       "1: off", range=Range(float(np.float32(1 / LARGEST_CHANGE)), LARGEST_CHANGE)),
    _f("min_tokens", "INT32", _ONE,
       "no end token before this many tokens; stop words and the length limit still end the text",
       range=Range(0)),
    _f("presence_penalty", "FP32", _ONE,
       "taken once from the logits of tokens that have occurred; 0: off", range=_CHANGE),
    _f("frequency_penalty", "FP32", _ONE, "taken from them once for each occurrence; 0: off",
       range=_CHANGE),
    _f("prompt_ignore_length", "INT32", _ONE,
       "that many first tokens of the prompt do not count for presence_penalty and "
       "frequency_penalty; beyond the prompt: none of it counts", extra=True, range=Range(0)),
    _f("seed", "UINT64", _ONE,
       "the same seed gives the same text, as far as the guarantees say; absent: a random one"),
    _f("return_log_probs", "BOOL", _ONE, "ask for cum_log_probs and output_log_probs"),
    _f("return_num_input_tokens", "BOOL", _ONE, "ask for num_input_tokens"),
    _f("return_num_output_tokens", "BOOL", _ONE, "ask for num_output_tokens"),
    _f("return_perf_metrics", "BOOL", _ONE, "ask for acceptance, times and KV blocks"),
    _f("exclude_input_in_output", "BOOL", _ONE,
       "absent or false: a reply that is not streamed repeats the prompt"),
    _f("num_return_sequences", "INT32", _ONE,
       "the number of independent texts (decoupled mode); text i has the seed + i",
       range=Range(1, 256)),
    _f("return_context_logits", "BOOL", _ONE,
       "ask for context_logits; such a request shares no KV"),
    _f("return_generation_logits", "BOOL", _ONE, "ask for generation_logits"),
    _f("guided_decoding_guide_type", "STRING", _ONE,
       "`json`, `json_schema`, `regex` or `ebnf_grammar` (GBNF or Lark); '': none",
       key="guide_type"),
    _f("guided_decoding_guide", "STRING", _ONE,
       "the grammar that the output must follow; of `json` none is needed", key="guide"),
    _no(Reason.BEAMS, "beam_width", "INT32", _ONE, 1),
    _no(Reason.LORA, "lora_task_id", "UINT64"),
    _no(Reason.LORA, "lora_weights", "FP16", _ROWS),
    _no(Reason.LORA, "lora_config", "INT32", (-1, 3)),
    _no(Reason.MULTIMODAL, "prompt_embedding_table", "FP16", _ROWS),
    _no(Reason.MULTIMODAL, "prompt_vocab_size", "INT32", _ONE, 0),
)

_TEXT_INPUTS = (
    _f("text_input", "STRING", _ONE, "raw text; the chat template is the client's business",
       required=True),
    _f("max_tokens", "INT32", _ONE, "1 up to what the context holds", required=True,
       range=Range(1)),
    _f("fit_max_tokens", "BOOL", _ONE,
       "true: a max_tokens over what the prompt leaves of the context is lowered to that, not "
       "refused", extra=True),
    _f("stream", "BOOL", _ONE, "send deltas (decoupled mode only)"),
    _f("stop_words", "STRING", _ANY,
       "end before the first of them, wherever token borders fall; the name of a special token in "
       "one of them is that token, too"),
    _f("bad_words", "STRING", _ANY,
       "never write one of these token sequences (a word and the same word after a space are "
       "two)"),
    _f("top_k", "INT32", _ONE, "0: off", range=Range(0)),
    _f("top_p", "FP32", _ONE, "0 or 1: off", range=Range(0, 1, note=" (0 = off)")),
    _MIN_P,
    _ADD_SPECIAL_TOKENS,
    _f("skip_special_tokens", "BOOL", _ONE,
       "false: special tokens are text by their names, but for the one that ends the text",
       extra=True),
    _f("stop_token_ids", "INT32", _ANY,
       "more tokens that end the text and are no part of it, whatever end_id is", extra=True),
    _f("embedding_bias_words", "STRING", _ANY,
       "every token of a word gets its weight added to its logit"),
    _f("embedding_bias_weights", "FP32", _ANY, "as many as words; -inf is a ban", range=_BIAS),
    _f("logit_bias_ids", "INT32", _ANY, "tokens whose logits get an addend", extra=True),
    _f("logit_bias_values", "FP32", _ANY, "the addends, as many as ids; -inf is a ban", extra=True,
       range=_BIAS),
    _f("prompt_token_ids", "INT32", _ANY, "the prompt as tokens; text_input is '' then",
       extra=True),
    _f("resumed_tokens", "INT32", _ONE,
       "that many tokens at the end of prompt_token_ids are text that was generated before, by "
       "any server; what follows is as if it had not been broken off, and max_tokens counts that "
       "alone", extra=True, range=Range(0)),
    _f("return_prompt_log_probs", "BOOL", _ONE,
       "ask for prompt_tokens and prompt_log_probs, and with return_top_log_probs for the "
       "likeliest; such a request shares no KV", extra=True),
    _f("return_top_log_probs", "INT32", _ONE,
       "ask for output_tokens and, 1 to 20, that many top_tokens and top_log_probs at each place",
       key="top_log_probs", extra=True, range=Range(0, 20)),
    _hint("length_penalty", "FP32", _ONE, "it ranks beams"),
    _no(Reason.ENCODER, "decoder_text_input", "STRING", _ONE, ""),
    _no(Reason.MULTIMODAL, "prompt_table_extra_id", "UINT64"),
    _f("cache_salt", "STRING", _ONE,
       "only requests of the same salt share KV, what drafts remember and what the policy learns "
       "of texts, which keeps tenants apart", extra=True),
    _f("remember", "BOOL", _ONE,
       "false: no draft remembers the answer for later requests; absent: drafts of the engine "
       "`suffix` do, for those of the same salt", extra=True),
)

_BLS_INPUTS = (
    _f("num_draft_tokens", "INT32", _ONE,
       "ceiling on the speculation length; 0: no speculation; absent: the policy decides",
       range=Range(0)),
    _hint("use_draft_logits", "BOOL", _ONE,
          "what the target draws is accepted, whatever the draft's logits"),
    _no(Reason.MULTIMODAL, "image_input", "FP16", (-1, 3, -1, -1)),
    _no(Reason.MULTIMODAL, "image_bytes_input", "UINT8", (-1, -1, -1, -1)),
    _no(Reason.MULTIMODAL, "image_url_input", "STRING", _ONE, ""),
    _no(Reason.MULTIMODAL, "video_bytes_input", "UINT8", (-1, -1, -1, -1)),
)

_SHARED_OUTPUTS = (
    _f("cum_log_probs", "FP32", _ANY, "sum of the log-probabilities so far"),
    _f("output_log_probs", "FP32", _ROWS,
       "of the response's tokens, an end token included; computed after penalties and temperature, "
       "before top_k and top_p"),
    _f("num_input_tokens", "INT32", _ONE, "with the last response"),
    _f("num_output_tokens", "INT32", _ONE, "with the last response, an end token included"),
    _f("acceptance_rate", "FP32", _ONE,
       "of all proposed tokens of the request; 0 where none was proposed"),
    _f("total_accepted_draft_tokens", "INT32", _ONE, "over the whole request"),
    _f("total_draft_tokens", "INT32", _ONE, "over the whole request"),
    _f("draft_names", "STRING", _ANY,
       "the drafts that proposed tokens for the request; absent where none did", extra=True),
    _f("draft_tokens", "INT32", _ANY, "proposed by each of them", extra=True),
    _f("accepted_draft_tokens", "INT32", _ANY, "of these, accepted", extra=True),
    _f("acceptance_histogram", "INT32", _ANY,
       "at place j: the steps that accepted exactly j proposed tokens", extra=True),
    _f("per_step_drafted", "INT32", _ANY,
       "tokens proposed in each step that verified a proposal, in order; absent where none did",
       extra=True),
    _f("per_step_accepted", "INT32", _ANY, "of these, accepted", extra=True),
    _f("finish_reason", "STRING", _ONE,
       "`length`, `end_id` or `stop_words`, with the last response", extra=True),
    _f("seed", "UINT64", _ONE,
       "what a sampled text was drawn with: its own or the random one; with the last response",
       extra=True),
    _f("batch_index", "INT32", _ONE, "which element of a Triton batch over 1 the response is of"),
    _f("sequence_index", "INT32", _ONE, "which of several num_return_sequences the response is of"),
    _f("kv_cache_alloc_new_blocks", "INT32", _ONE,
       "KV blocks of 32 tokens allocated for the request"),
    _f("kv_cache_reused_blocks", "INT32", _ONE, "blocks whose KV was there"),
    _f("kv_cache_alloc_total_blocks", "INT32", _ONE, "their sum"),
    _f("arrival_time_ns", "INT64", _ONE, "on the engine's steady clock, as all times"),
    _f("first_scheduled_time_ns", "INT64", _ONE, "joined the in-flight batch"),
    _f("first_token_time_ns", "INT64", _ONE, "first token committed"),
    _f("last_token_time_ns", "INT64", _ONE, "last token committed"),
    _f("context_logits", "FP32", _ROWS,
       "the model's own, after every token of the prompt; with the first response"),
    _f("generation_logits", "FP32", (-1, -1, -1),
       "the model's own, before all options, from which the tokens of the response were drawn"),
)

_TOKEN_INPUTS = (
    _f("input_ids", "INT32", _ANY, "the prompt; required, though optional as a tensor"),
    _f("input_lengths", "INT32", _ONE, "how many of them count", required=True),
    _f("request_output_len", "INT32", _ONE, "1 up to what the context holds", required=True,
       key="max_tokens", range=Range(1)),
    _f("streaming", "BOOL", _ONE, "send deltas (decoupled mode only)", key="stream"),
    _f("stop", "BOOL", _ONE, "end the request in flight that has this request's id"),
    _f("stop_words_list", "INT32", (2, -1),
       "words as ids, and where each of them ends; padded with -1", key="stop_word_ids"),
    _f("bad_words_list", "INT32", (2, -1), "in the same way", key="bad_word_ids"),
    _f("embedding_bias", "FP32", _ANY, "an addend for the logit of every token; -inf bans it",
       key="bias", range=_BIAS),
    _f("runtime_top_k", "INT32", _ONE, "0: off", key="top_k", range=Range(0)),
    _f("runtime_top_p", "FP32", _ONE, "0 or 1: off", key="top_p",
       range=Range(0, 1, note=" (0 = off)")),
    _MIN_P,
    _f("runtime_top_p_min", "FP32", _ONE, "top_p decays no further; 0 to 1", key="top_p_min",
       range=_SHARE),
    _f("runtime_top_p_decay", "FP32", _ONE,
       "over 0, at most 1; top_p is multiplied by it with every token of the output",
       key="top_p_decay", range=Range(0, 1, over=True)),
    _f("runtime_top_p_reset_ids", "INT32", _ONE,
       "token after which top_p is itself again; -1: none", key="top_p_reset_id"),
    _hint("len_penalty", "FP32", _ONE, "it ranks beams"),
    _hint("early_stopping", "BOOL", _ONE, "it ends beams"),
    _hint("beam_search_diversity_rate", "FP32", _ONE, "it ranks beams"),
    _hint("draft_input_ids", "INT32", _ANY, "the service drafts itself; the tokens are the same"),
    _hint("draft_logits", "FP32", _ROWS, "as draft_input_ids"),
    _hint("draft_acceptance_threshold", "FP32", _ONE,
          "no draft token is accepted that the target would not write"),
    _hint("lookahead_window_size", "INT32", _ONE, "the policy decides how to speculate"),
    _hint("lookahead_ngram_size", "INT32", _ONE, "as lookahead_window_size"),
    _hint("lookahead_verification_set_size", "INT32", _ONE, "as lookahead_window_size"),
    _hint("retention_token_range_starts", "INT32", _ANY, "KV is kept by last use"),
    _hint("retention_token_range_ends", "INT32", _ANY, "as retention_token_range_starts"),
    _hint("retention_token_range_priorities", "INT32", _ANY, "as retention_token_range_starts"),
    _hint("retention_token_range_durations_ms", "INT32", _ANY, "as retention_token_range_starts"),
    _hint("retention_decode_priority", "INT32", _ONE, "as retention_token_range_starts"),
    _hint("retention_decode_duration_ms", "INT32", _ONE, "as retention_token_range_starts"),
    _no(Reason.DISAGGREGATED, "context_phase_params", "UINT8", _ANY),
    _no(Reason.ENCODER, "encoder_input_features", "FP16", _ROWS),
    _no(Reason.ENCODER, "encoder_output_lengths", "INT32", _ONE, 0),
    _hint("decoder_input_ids", "INT32", _ANY,
          "preprocessing makes one where there is no decoder text; see decoder_input_lengths"),
    _no(Reason.ENCODER, "decoder_input_lengths", "INT32", _ONE, 0, 1),
    _no(Reason.ENCODER, "cross_attention_mask", "BOOL", _ROWS),
    _no(Reason.ENCODER, "skip_cross_attn_blocks", "BOOL", _ONE, False),
    _no(Reason.MULTIMODAL, "prompt_table_extra_ids", "UINT64", _ANY),
    _no(Reason.MULTIMODAL, "mrope_rotary_cos_sin", "FP32", _ANY),
    _no(Reason.MULTIMODAL, "mrope_position_deltas", "INT64", _ONE, 0),
    _f("num_draft_tokens", "INT32", _ONE, "as of tensorrt_llm_bls", range=Range(0)),
    _f("resumed_tokens", "INT32", _ONE, "as of tensorrt_llm_bls, of input_ids", extra=True,
       range=Range(0)),
    _f("cache_salt", "STRING", _ONE, "as of tensorrt_llm_bls", extra=True),
    _f("remember", "BOOL", _ONE, "as of tensorrt_llm_bls", extra=True),
)

_TOKEN_OUTPUTS = (
    _f("output_ids", "INT32", _ROWS,
       "the tokens, or what is new of a streamed request; the end id or stop word that ended it "
       "included"),
    _f("sequence_length", "INT32", _ANY, "how many they are"),
    _no(Reason.DISAGGREGATED, "context_phase_params", "UINT8", _ANY),
)

TEXT_INPUTS: tuple[Field, ...] = (*_TEXT_INPUTS, *_SHARED_INPUTS, *_BLS_INPUTS)
"""Both text models take the same; ``ensemble`` more than NVIDIA's."""
TEXT_OUTPUTS: tuple[Field, ...] = (
    _f("text_output", "STRING", _ANY, "the text, or what is new of a streamed one"),
    *_SHARED_OUTPUTS,
    _f("output_tokens", "STRING", _ANY,
       "the bytes of the tokens that the response accounts for; of a special one its name",
       extra=True),
    _f("top_tokens", "STRING", _ROWS,
       "at each of them the bytes, or names, of the likeliest tokens, best first", extra=True),
    _f("top_log_probs", "FP32", _ROWS,
       "and their log-probabilities, computed as output_log_probs are; -9999 for a banned one",
       extra=True),
    _f("prompt_tokens", "STRING", _ANY, "the bytes of the prompt's tokens, with the first response",
       extra=True),
    _f("prompt_log_probs", "FP32", _ANY,
       "the log-probabilities of all of them but the first, as the model gives them", extra=True),
    _f("prompt_top_tokens", "STRING", _ROWS, "the likeliest tokens at each of these places",
       extra=True),
    _f("prompt_top_log_probs", "FP32", _ROWS, "and their log-probabilities", extra=True),
)

TOKEN_INPUTS: tuple[Field, ...] = (*_TOKEN_INPUTS, *_SHARED_INPUTS)
TOKEN_OUTPUTS: tuple[Field, ...] = (*_TOKEN_OUTPUTS, *_SHARED_OUTPUTS)

PREPROCESSING_INPUTS: tuple[Field, ...] = (
    _f("QUERY", "STRING", _ONE, "text", required=True),
    _f("REQUEST_OUTPUT_LEN", "INT32", _ONE, "passed through", required=True),
    _f("BAD_WORDS_DICT", "STRING", _ANY, "words"),
    _f("STOP_WORDS_DICT", "STRING", _ANY, "words"),
    _f("EMBEDDING_BIAS_WORDS", "STRING", _ANY, "words"),
    _f("EMBEDDING_BIAS_WEIGHTS", "FP32", _ANY, "as many as words"),
    _f("END_ID", "INT32", _ONE, "absent: the model's own"),
    _f("PAD_ID", "INT32", _ONE, "absent: the end id"),
    _ADD_SPECIAL_TOKENS,
    _no(Reason.ENCODER, "DECODER_QUERY", "STRING", _ONE, ""),
    _no(Reason.MULTIMODAL, "IMAGE_BYTES", "UINT8", (-1, -1, -1, -1)),
    _no(Reason.MULTIMODAL, "IMAGE_URL", "STRING", _ONE, ""),
    _no(Reason.MULTIMODAL, "VIDEO_BYTES", "UINT8", (-1, -1, -1, -1)),
    _no(Reason.MULTIMODAL, "PROMPT_TABLE_EXTRA_ID", "UINT64"),
)
_PREPROCESSING_OUTPUTS = (
    _f("INPUT_ID", "INT32", _ANY, "tokens, padded with the pad id"),
    _f("REQUEST_INPUT_LEN", "INT32", _ONE, "how many of them count"),
    _f("DECODER_INPUT_ID", "INT32", _ANY, "the pad id"),
    _f("REQUEST_DECODER_INPUT_LEN", "INT32", _ONE, "1"),
    _f("BAD_WORDS_IDS", "INT32", (2, -1), "as tensorrt_llm takes them"),
    _f("STOP_WORDS_IDS", "INT32", (2, -1), "as tensorrt_llm takes them"),
    _f("EMBEDDING_BIAS", "FP32", _ANY, "as tensorrt_llm takes it; empty without words"),
    _f("REQUEST_OUTPUT_LEN", "INT32", _ANY, "as given"),
    _f("OUT_END_ID", "INT32", _ONE, "as given, else the model's own"),
    _f("OUT_PAD_ID", "INT32", _ONE, "as given, else the end id"),
    _f("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", _ANY, "empty"),
    _no(Reason.MULTIMODAL, "PIXEL_VALUES", "FP16", (-1, -1, -1, -1)),
    _no(Reason.MULTIMODAL, "ASPECT_RATIO_IDS", "INT64", _ANY),
    _no(Reason.MULTIMODAL, "ASPECT_RATIO_MASK", "INT64", _ROWS),
    _no(Reason.MULTIMODAL, "CROSS_ATTENTION_MASK", "INT64", (-1, -1, -1)),
    _no(Reason.MULTIMODAL, "IMAGE_SIZES", "INT64", (2,)),
    _no(Reason.MULTIMODAL, "IS_VIDEO_INPUT", "BOOL"),
    _no(Reason.MULTIMODAL, "ATTENTION_MASK", "INT64", _ANY),
    _no(Reason.MULTIMODAL, "IMAGE_GRID_THW", "INT64", (3,)),
    _no(Reason.MULTIMODAL, "VISION_INPUT_ID", "INT32", _ANY),
)
POSTPROCESSING_INPUTS: tuple[Field, ...] = (
    _f("TOKENS_BATCH", "INT32", _ROWS, "tokens of each beam", required=True),
    _f("SEQUENCE_LENGTH", "INT32", _ANY, "how many of them count", required=True),
)
_POSTPROCESSING_OUTPUTS = (
    _f("OUTPUT", "STRING", _ANY, "text of each beam, special tokens left out"),
)
# fmt: on

MODELS: tuple[TritonModel, ...] = (
    TritonModel("ensemble", TEXT_INPUTS, TEXT_OUTPUTS),
    TritonModel("tensorrt_llm_bls", TEXT_INPUTS, TEXT_OUTPUTS),
    TritonModel("tensorrt_llm", TOKEN_INPUTS, TOKEN_OUTPUTS),
    TritonModel("preprocessing", PREPROCESSING_INPUTS, _PREPROCESSING_OUTPUTS, decoupled=False),
    TritonModel("postprocessing", POSTPROCESSING_INPUTS, _POSTPROCESSING_OUTPUTS, decoupled=False),
    TritonModel(
        "spindle",
        (
            _f("command", "STRING", _ONE, "administration", required=True),
            _f(
                "secret",
                "STRING",
                _ONE,
                "the run's `SPINDLE_ADMIN_SECRET`, which all commands but `health` need",
            ),
        ),
        (Field("reply", "STRING"),),
        settings=False,
    ),
)
