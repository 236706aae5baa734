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

    LORA = "Spindle has no LoRA adapters"
    MULTIMODAL = "Spindle takes no images, video or prompt tables"
    ENCODER = "Spindle runs no models with an encoder"
    BEAMS = "Spindle has no beam search"
    DISAGGREGATED = "prefill and decoding run in one engine process"


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
    return Field(name, dtype, dims, f"is checked and then ignored: {does}", effect=False)


def _no(
    reason: Reason, name: str, dtype: str, dims: tuple[int, ...] = (1,), *neutral: Any
) -> Field:
    return Field(name, dtype, dims, refused=reason, neutral=neutral)


_ONE, _ANY, _ROWS = (1,), (-1,), (-1, -1)

# fmt: off
# A table: a tensor in as few lines as it takes, rather than one argument a line.

_MIN_P = _f(
    "min_p", "FP32", _ONE, extra=True, range=_SHARE,
    does="excludes tokens less likely than this share of the likeliest, before top_k and top_p; "
    "0: off",
)
_ADD_SPECIAL_TOKENS = _f(
    "add_special_tokens", "BOOL", _ONE, extra=True,
    does="adds the tokenizer's special tokens, such as a begin token, to the text; default: "
    "`add_special_tokens` in serving.json",
)
_SHARED_INPUTS = (
    _f("end_id", "INT32", _ONE,
       "ends the text at this token; -1: at none; default: the model's own end token"),
    _f("pad_id", "INT32", _ONE, "is checked and then ignored: nothing is padded"),
    _f("temperature", "FP32", _ONE,
       "divides the logits; 0 (below 1e-5), top_k 1, or none of temperature, top_k, top_p and "
       "min_p: greedy", range=Range(0)),
    _f("repetition_penalty", "FP32", _ONE,
       "divides the logits of tokens that have occurred (multiplies negative ones); over 0; 1: off",
       range=Range(float(np.float32(1 / LARGEST_CHANGE)), LARGEST_CHANGE)),
    _f("min_tokens", "INT32", _ONE,
       "bans end tokens before this many tokens; stop words and the length limit still end the "
       "text", range=Range(0)),
    _f("presence_penalty", "FP32", _ONE,
       "is subtracted once from the logits of tokens that have occurred; 0: off", range=_CHANGE),
    _f("frequency_penalty", "FP32", _ONE,
       "is subtracted from these logits once for each occurrence; 0: off", range=_CHANGE),
    _f("prompt_ignore_length", "INT32", _ONE,
       "excludes this many first tokens of the prompt from presence_penalty and "
       "frequency_penalty; a number beyond the prompt excludes all of it", extra=True,
       range=Range(0)),
    _f("seed", "UINT64", _ONE, "repeats a text, as far as the guarantees say; default: random"),
    _f("return_log_probs", "BOOL", _ONE, "returns cum_log_probs and output_log_probs"),
    _f("return_num_input_tokens", "BOOL", _ONE, "returns num_input_tokens"),
    _f("return_num_output_tokens", "BOOL", _ONE, "returns num_output_tokens"),
    _f("return_perf_metrics", "BOOL", _ONE, "returns acceptance, times and KV blocks"),
    _f("exclude_input_in_output", "BOOL", _ONE,
       "omits the prompt from a reply that is not streamed; default: false"),
    _f("num_return_sequences", "INT32", _ONE,
       "sets the number of independent texts (decoupled mode); text i has the seed + i",
       range=Range(1, 256)),
    _f("return_context_logits", "BOOL", _ONE,
       "returns context_logits; such a request shares no KV"),
    _f("return_generation_logits", "BOOL", _ONE, "returns generation_logits"),
    _f("guided_decoding_guide_type", "STRING", _ONE,
       "names the kind of grammar: `json`, `json_schema`, `regex` or `ebnf_grammar` (GBNF or "
       "Lark); '': none", key="guide_type"),
    _f("guided_decoding_guide", "STRING", _ONE,
       "contains the grammar that the output must follow; `json` needs none", key="guide"),
    _no(Reason.BEAMS, "beam_width", "INT32", _ONE, 1),
    _no(Reason.LORA, "lora_task_id", "UINT64"),
    _no(Reason.LORA, "lora_weights", "FP16", _ROWS),
    _no(Reason.LORA, "lora_config", "INT32", (-1, 3)),
    _no(Reason.MULTIMODAL, "prompt_embedding_table", "FP16", _ROWS),
    _no(Reason.MULTIMODAL, "prompt_vocab_size", "INT32", _ONE, 0),
)

_TEXT_INPUTS = (
    _f("text_input", "STRING", _ONE,
       "contains raw text; the client applies the chat template", required=True),
    _f("max_tokens", "INT32", _ONE,
       "limits the output; from 1 up to the context's size", required=True, range=Range(1)),
    _f("fit_max_tokens", "BOOL", _ONE,
       "lowers max_tokens to the room that the prompt leaves in the context instead of refusing it",
       extra=True),
    _f("stream", "BOOL", _ONE, "sends deltas (decoupled mode only)"),
    _f("stop_words", "STRING", _ANY,
       "ends the text before the first of these, wherever tokens begin and end; if one contains "
       "the name of a special token, that token matches, too"),
    _f("bad_words", "STRING", _ANY,
       "bans these token sequences (a word and the same word after a space are two)"),
    _f("top_k", "INT32", _ONE,
       "samples from this many of the likeliest tokens; 0: off", range=Range(0)),
    _f("top_p", "FP32", _ONE,
       "samples from the likeliest tokens up to this share; 0 or 1: off",
       range=Range(0, 1, note=" (0 = off)")),
    _MIN_P,
    _ADD_SPECIAL_TOKENS,
    _f("skip_special_tokens", "BOOL", _ONE,
       "false writes special tokens as text by their names, except the one that ends the text",
       extra=True),
    _f("stop_token_ids", "INT32", _ANY,
       "adds tokens that end the text and are not part of it, whatever end_id is", extra=True),
    _f("embedding_bias_words", "STRING", _ANY,
       "adds a word's weight to the logit of each of its tokens"),
    _f("embedding_bias_weights", "FP32", _ANY,
       "gives one weight for each word; -inf bans", range=_BIAS),
    _f("logit_bias_ids", "INT32", _ANY, "names tokens whose logits change", extra=True),
    _f("logit_bias_values", "FP32", _ANY,
       "is added to these logits, one value for each id; -inf bans", extra=True, range=_BIAS),
    _f("prompt_token_ids", "INT32", _ANY,
       "gives the prompt as tokens, with text_input ''", extra=True),
    _f("resumed_tokens", "INT32", _ONE,
       "says how many tokens at the end of prompt_token_ids were generated before, by any server; "
       "the output continues as if it had not been interrupted, and max_tokens counts only new "
       "tokens", extra=True, range=Range(0)),
    _f("return_prompt_log_probs", "BOOL", _ONE,
       "returns prompt_tokens and prompt_log_probs, with return_top_log_probs also the likeliest "
       "tokens; such a request shares no KV", extra=True),
    _f("return_top_log_probs", "INT32", _ONE,
       "returns output_tokens, and with 1 to 20 that many top_tokens and top_log_probs at each "
       "position", key="top_log_probs", extra=True, range=Range(0, 20)),
    _hint("length_penalty", "FP32", _ONE, "it ranks beams"),
    _no(Reason.ENCODER, "decoder_text_input", "STRING", _ONE, ""),
    _no(Reason.MULTIMODAL, "prompt_table_extra_id", "UINT64"),
    _f("cache_salt", "STRING", _ONE,
       "separates tenants: only requests with the same salt share KV, answers that drafts "
       "remember, and the policy's knowledge of texts", extra=True),
    _f("remember", "BOOL", _ONE,
       "false keeps drafts from remembering the answer; by default drafts with the engine "
       "`suffix` remember it for requests with the same salt", extra=True),
)

_BLS_INPUTS = (
    _f("num_draft_tokens", "INT32", _ONE,
       "limits the speculation length; 0: no speculation; default: the policy decides",
       range=Range(0)),
    _hint("use_draft_logits", "BOOL", _ONE,
          "a token is accepted if the target draws it, whatever the draft's logits"),
    _no(Reason.MULTIMODAL, "image_input", "FP16", (-1, 3, -1, -1)),
    _no(Reason.MULTIMODAL, "image_bytes_input", "UINT8", (-1, -1, -1, -1)),
    _no(Reason.MULTIMODAL, "image_url_input", "STRING", _ONE, ""),
    _no(Reason.MULTIMODAL, "video_bytes_input", "UINT8", (-1, -1, -1, -1)),
)

_SHARED_OUTPUTS = (
    _f("cum_log_probs", "FP32", _ANY, "sum of the log-probabilities so far"),
    _f("output_log_probs", "FP32", _ROWS,
       "log-probabilities of the response's tokens, including an end token, after penalties and "
       "temperature, before top_k and top_p"),
    _f("num_input_tokens", "INT32", _ONE, "tokens of the prompt; with the last response"),
    _f("num_output_tokens", "INT32", _ONE,
       "tokens of the output, including an end token; with the last response"),
    _f("acceptance_rate", "FP32", _ONE,
       "accepted share of the request's proposed tokens; 0 if none was proposed"),
    _f("total_accepted_draft_tokens", "INT32", _ONE, "accepted tokens over the whole request"),
    _f("total_draft_tokens", "INT32", _ONE, "proposed tokens over the whole request"),
    _f("draft_names", "STRING", _ANY,
       "drafts that proposed tokens for the request; omitted if none did", extra=True),
    _f("draft_tokens", "INT32", _ANY, "tokens that each of these drafts proposed", extra=True),
    _f("accepted_draft_tokens", "INT32", _ANY, "accepted ones among these", extra=True),
    _f("acceptance_histogram", "INT32", _ANY,
       "entry j: number of steps that accepted exactly j proposed tokens", extra=True),
    _f("per_step_drafted", "INT32", _ANY,
       "tokens proposed in each step that verified a proposal, in order; omitted if none did",
       extra=True),
    _f("per_step_accepted", "INT32", _ANY, "accepted ones among these", extra=True),
    _f("finish_reason", "STRING", _ONE,
       "`length`, `end_id` or `stop_words`, with the last response", extra=True),
    _f("seed", "UINT64", _ONE,
       "seed of a sampled text, from the request or random; with the last response", extra=True),
    _f("batch_index", "INT32", _ONE, "the response's element in a Triton batch over 1"),
    _f("sequence_index", "INT32", _ONE, "the response's text among several num_return_sequences"),
    _f("kv_cache_alloc_new_blocks", "INT32", _ONE,
       "KV blocks of 32 tokens allocated for the request"),
    _f("kv_cache_reused_blocks", "INT32", _ONE, "blocks whose KV was already there"),
    _f("kv_cache_alloc_total_blocks", "INT32", _ONE, "their sum"),
    _f("arrival_time_ns", "INT64", _ONE,
       "when the request arrived; all times are from the engine's steady clock"),
    _f("first_scheduled_time_ns", "INT64", _ONE, "when it joined the in-flight batch"),
    _f("first_token_time_ns", "INT64", _ONE, "when its first token was committed"),
    _f("last_token_time_ns", "INT64", _ONE, "when its last token was committed"),
    _f("context_logits", "FP32", _ROWS,
       "the model's own logits after every token of the prompt; with the first response"),
    _f("generation_logits", "FP32", (-1, -1, -1),
       "the model's own logits for the response's tokens, before all options"),
)

_TOKEN_INPUTS = (
    _f("input_ids", "INT32", _ANY, "contains the prompt; required, though optional as a tensor"),
    _f("input_lengths", "INT32", _ONE, "gives the number of valid tokens", required=True),
    _f("request_output_len", "INT32", _ONE,
       "limits the output; from 1 up to the context's size", required=True, key="max_tokens",
       range=Range(1)),
    _f("streaming", "BOOL", _ONE, "sends deltas (decoupled mode only)", key="stream"),
    _f("stop", "BOOL", _ONE, "cancels the request in flight that has this request's id"),
    _f("stop_words_list", "INT32", (2, -1),
       "lists words as ids, and where each of them ends; padded with -1", key="stop_word_ids"),
    _f("bad_words_list", "INT32", (2, -1),
       "lists banned words in the same way", key="bad_word_ids"),
    _f("embedding_bias", "FP32", _ANY,
       "is added to the logits, one value for every token; -inf bans", key="bias", range=_BIAS),
    _f("runtime_top_k", "INT32", _ONE,
       "samples from this many of the likeliest tokens; 0: off", key="top_k", range=Range(0)),
    _f("runtime_top_p", "FP32", _ONE,
       "samples from the likeliest tokens up to this share; 0 or 1: off", key="top_p",
       range=Range(0, 1, note=" (0 = off)")),
    _MIN_P,
    _f("runtime_top_p_min", "FP32", _ONE,
       "stops the decay of top_p at this value; 0 to 1", key="top_p_min", range=_SHARE),
    _f("runtime_top_p_decay", "FP32", _ONE,
       "multiplies top_p with every token of the output; over 0, at most 1", key="top_p_decay",
       range=Range(0, 1, over=True)),
    _f("runtime_top_p_reset_ids", "INT32", _ONE,
       "resets top_p after this token; -1: never", key="top_p_reset_id"),
    _hint("len_penalty", "FP32", _ONE, "it ranks beams"),
    _hint("early_stopping", "BOOL", _ONE, "it ends beams"),
    _hint("beam_search_diversity_rate", "FP32", _ONE, "it ranks beams"),
    _hint("draft_input_ids", "INT32", _ANY, "Spindle drafts itself, and the output is the same"),
    _hint("draft_logits", "FP32", _ROWS, "see draft_input_ids"),
    _hint("draft_acceptance_threshold", "FP32", _ONE,
          "a draft token is accepted only if the target would write it"),
    _hint("lookahead_window_size", "INT32", _ONE, "the policy decides how to speculate"),
    _hint("lookahead_ngram_size", "INT32", _ONE, "see lookahead_window_size"),
    _hint("lookahead_verification_set_size", "INT32", _ONE, "see lookahead_window_size"),
    _hint("retention_token_range_starts", "INT32", _ANY,
          "the least recently used KV is evicted first"),
    _hint("retention_token_range_ends", "INT32", _ANY, "see retention_token_range_starts"),
    _hint("retention_token_range_priorities", "INT32", _ANY, "see retention_token_range_starts"),
    _hint("retention_token_range_durations_ms", "INT32", _ANY, "see retention_token_range_starts"),
    _hint("retention_decode_priority", "INT32", _ONE, "see retention_token_range_starts"),
    _hint("retention_decode_duration_ms", "INT32", _ONE, "see retention_token_range_starts"),
    _no(Reason.DISAGGREGATED, "context_phase_params", "UINT8", _ANY),
    _no(Reason.ENCODER, "encoder_input_features", "FP16", _ROWS),
    _no(Reason.ENCODER, "encoder_output_lengths", "INT32", _ONE, 0),
    _hint("decoder_input_ids", "INT32", _ANY,
          "preprocessing makes one if there is no decoder text; see decoder_input_lengths"),
    _no(Reason.ENCODER, "decoder_input_lengths", "INT32", _ONE, 0, 1),
    _no(Reason.ENCODER, "cross_attention_mask", "BOOL", _ROWS),
    _no(Reason.ENCODER, "skip_cross_attn_blocks", "BOOL", _ONE, False),
    _no(Reason.MULTIMODAL, "prompt_table_extra_ids", "UINT64", _ANY),
    _no(Reason.MULTIMODAL, "mrope_rotary_cos_sin", "FP32", _ANY),
    _no(Reason.MULTIMODAL, "mrope_position_deltas", "INT64", _ONE, 0),
    _f("num_draft_tokens", "INT32", _ONE, "works as with tensorrt_llm_bls", range=Range(0)),
    _f("resumed_tokens", "INT32", _ONE,
       "works as with tensorrt_llm_bls, for input_ids", extra=True, range=Range(0)),
    _f("cache_salt", "STRING", _ONE, "works as with tensorrt_llm_bls", extra=True),
    _f("remember", "BOOL", _ONE, "works as with tensorrt_llm_bls", extra=True),
)

_TOKEN_OUTPUTS = (
    _f("output_ids", "INT32", _ROWS,
       "the tokens, or the new ones if streamed, including the end id or stop word that ended the "
       "text"),
    _f("sequence_length", "INT32", _ANY, "their number"),
    _no(Reason.DISAGGREGATED, "context_phase_params", "UINT8", _ANY),
)

TEXT_INPUTS: tuple[Field, ...] = (*_TEXT_INPUTS, *_SHARED_INPUTS, *_BLS_INPUTS)
"""Both text models take the same; ``ensemble`` more than NVIDIA's."""
TEXT_OUTPUTS: tuple[Field, ...] = (
    _f("text_output", "STRING", _ANY, "the text, or the new part if streamed"),
    *_SHARED_OUTPUTS,
    _f("output_tokens", "STRING", _ANY,
       "bytes of the tokens that the response covers; special tokens by name", extra=True),
    _f("top_tokens", "STRING", _ROWS,
       "bytes or names of the likeliest tokens at each of these positions, best first", extra=True),
    _f("top_log_probs", "FP32", _ROWS,
       "their log-probabilities, computed like output_log_probs; -9999 for a banned token",
       extra=True),
    _f("prompt_tokens", "STRING", _ANY,
       "bytes of the prompt's tokens; with the first response", extra=True),
    _f("prompt_log_probs", "FP32", _ANY,
       "log-probabilities of all of these except the first, from the model's own distribution",
       extra=True),
    _f("prompt_top_tokens", "STRING", _ROWS,
       "likeliest tokens at each of these positions", extra=True),
    _f("prompt_top_log_probs", "FP32", _ROWS, "their log-probabilities", extra=True),
)

TOKEN_INPUTS: tuple[Field, ...] = (*_TOKEN_INPUTS, *_SHARED_INPUTS)
TOKEN_OUTPUTS: tuple[Field, ...] = (*_TOKEN_OUTPUTS, *_SHARED_OUTPUTS)

PREPROCESSING_INPUTS: tuple[Field, ...] = (
    _f("QUERY", "STRING", _ONE, "contains the text", required=True),
    _f("REQUEST_OUTPUT_LEN", "INT32", _ONE, "is passed through", required=True),
    _f("BAD_WORDS_DICT", "STRING", _ANY, "lists words"),
    _f("STOP_WORDS_DICT", "STRING", _ANY, "lists words"),
    _f("EMBEDDING_BIAS_WORDS", "STRING", _ANY, "lists words"),
    _f("EMBEDDING_BIAS_WEIGHTS", "FP32", _ANY, "gives one weight for each word"),
    _f("END_ID", "INT32", _ONE, "sets the end token; default: the model's own"),
    _f("PAD_ID", "INT32", _ONE, "sets the pad token; default: the end id"),
    _ADD_SPECIAL_TOKENS,
    _no(Reason.ENCODER, "DECODER_QUERY", "STRING", _ONE, ""),
    _no(Reason.MULTIMODAL, "IMAGE_BYTES", "UINT8", (-1, -1, -1, -1)),
    _no(Reason.MULTIMODAL, "IMAGE_URL", "STRING", _ONE, ""),
    _no(Reason.MULTIMODAL, "VIDEO_BYTES", "UINT8", (-1, -1, -1, -1)),
    _no(Reason.MULTIMODAL, "PROMPT_TABLE_EXTRA_ID", "UINT64"),
)
_PREPROCESSING_OUTPUTS = (
    _f("INPUT_ID", "INT32", _ANY, "tokens, padded with the pad id"),
    _f("REQUEST_INPUT_LEN", "INT32", _ONE, "number of valid tokens"),
    _f("DECODER_INPUT_ID", "INT32", _ANY, "the pad id"),
    _f("REQUEST_DECODER_INPUT_LEN", "INT32", _ONE, "1"),
    _f("BAD_WORDS_IDS", "INT32", (2, -1), "in the form that tensorrt_llm takes"),
    _f("STOP_WORDS_IDS", "INT32", (2, -1), "in the form that tensorrt_llm takes"),
    _f("EMBEDDING_BIAS", "FP32", _ANY, "in the form that tensorrt_llm takes; empty without words"),
    _f("REQUEST_OUTPUT_LEN", "INT32", _ANY, "as in the request"),
    _f("OUT_END_ID", "INT32", _ONE, "as in the request; default: the model's own"),
    _f("OUT_PAD_ID", "INT32", _ONE, "as in the request; default: the end id"),
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
    _f("TOKENS_BATCH", "INT32", _ROWS, "contains the tokens of each beam", required=True),
    _f("SEQUENCE_LENGTH", "INT32", _ANY, "gives the number of valid tokens", required=True),
)
_POSTPROCESSING_OUTPUTS = (
    _f("OUTPUT", "STRING", _ANY, "text of each beam, without special tokens"),
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
            _f("command", "STRING", _ONE, "is an administrative command", required=True),
            _f(
                "secret",
                "STRING",
                _ONE,
                "is the run's `SPINDLE_ADMIN_SECRET`, which all commands except `health` need",
            ),
        ),
        (Field("reply", "STRING"),),
        settings=False,
    ),
)
