"""The plain values of a fake ``tensorrt_llm.bindings.executor``: names, order and defaults as in ``tensorrt_llm_executor_api.json``.

Only what this project uses is here. Like the real ones they check some of what they are given, and ``Executor`` the rest.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any


def _enum(name, *values):
    return Enum(name, values)


ModelType = _enum("ModelType", "DECODER_ONLY", "ENCODER_ONLY", "ENCODER_DECODER")
CapacitySchedulerPolicy = _enum("CapacitySchedulerPolicy", "MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH")
ContextChunkingPolicy = _enum("ContextChunkingPolicy", "EQUAL_PROGRESS", "FIRST_COME_FIRST_SERVED")
CommunicationType = _enum("CommunicationType", "MPI")
CommunicationMode = _enum("CommunicationMode", "LEADER", "ORCHESTRATOR")
BatchingType = _enum("BatchingType", "STATIC", "INFLIGHT")
FinishReason = _enum("FinishReason", "NOT_FINISHED", "END_ID", "STOP_WORDS", "LENGTH", "TIMED_OUT", "CANCELLED")


@dataclass
class SamplingConfig:
    beam_width: int = 1
    _: KW_ONLY
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    num_return_sequences: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None

    def __post_init__(self) -> None:
        assert self.temperature is None or self.temperature > 0, f"temperature {self.temperature}"
        assert self.top_k is None or self.top_k >= 0, f"top_k {self.top_k}"
        assert self.top_p is None or 0 < self.top_p <= 1, f"top_p {self.top_p}"
        assert self.repetition_penalty is None or self.repetition_penalty > 0, f"repetition_penalty {self.repetition_penalty}"
        assert self.seed is None or 0 <= self.seed < 2**64, f"seed {self.seed}"


@dataclass
class OutputConfig:
    return_log_probs: bool | None = None
    return_context_logits: bool | None = None
    return_generation_logits: bool | None = None
    exclude_input_from_output: bool | None = None
    return_encoder_output: bool | None = None
    return_perf_metrics: bool | None = None
    additional_model_outputs: list | None = None


@dataclass(frozen=True)
class ExternalDraftTokensConfig:
    tokens: list[int]
    logits: Any = None
    acceptance_threshold: float | None = None
    fast_logits: bool | None = None

    def __post_init__(self) -> None:
        assert self.tokens, "draft tokens must not be empty"
        assert self.logits is None or len(self.logits.shape) == 2, "draft logits must have two dimensions"
        assert self.logits is None or self.logits.shape[0] == len(self.tokens), "as many rows of draft logits as draft tokens"


@dataclass
class TokenRangeRetentionConfig:
    token_start: int
    token_end: int | None
    priority: int
    duration_ms: timedelta | None = None


@dataclass(frozen=True)
class KvCacheRetentionConfig:
    token_range_retention_configs: list[TokenRangeRetentionConfig]
    decode_retention_priority: int = 35
    decode_duration_ms: timedelta | None = None
    transfer_mode: Any = "KvCacheTransferMode.DRAM"
    directory: str | None = None

    TokenRangeRetentionConfig = TokenRangeRetentionConfig


@dataclass
class Request:
    input_token_ids: list[int]
    max_tokens: int
    _: KW_ONLY
    streaming: bool = False
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    end_id: int | None = None
    pad_id: int | None = None
    position_ids: list[int] | None = None
    bad_words: list[list[int]] | None = None
    stop_words: list[list[int]] | None = None
    embedding_bias: Any = None
    external_draft_tokens_config: ExternalDraftTokensConfig | None = None
    prompt_tuning_config: Any = None
    multimodal_input: Any = None
    multimodal_embedding: Any = None
    mrope_config: Any = None
    lora_config: Any = None
    lookahead_config: Any = None
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    logits_post_processor_name: str | None = None
    logits_post_processor: Any = None
    encoder_input_token_ids: list[int] | None = None
    client_id: int | None = None
    return_all_generated_tokens: bool = False
    priority: float = 0.5
    type: Any = "RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION"
    context_phase_params: Any = None
    encoder_input_features: Any = None
    encoder_output_length: int | None = None
    cross_attention_mask: Any = None
    num_return_sequences: int = 1
    eagle_config: Any = None
    skip_cross_attn_blocks: Any = None
    guided_decoding_params: Any = None
    language_adapter_uid: int | None = None
    allotted_time_ms: timedelta | None = None
    cache_salt_id: int | None = None
    disagg_request_id: int | None = None

    def __post_init__(self) -> None:
        assert self.input_token_ids, "input token ids must not be empty"
        assert set(map(type, self.input_token_ids)) == {int}, "token ids are ints"
        assert min(self.input_token_ids) >= 0, "token ids are not negative"
        assert self.max_tokens > 0, f"max_tokens {self.max_tokens}"
        assert 0.0 <= self.priority <= 1.0, f"priority {self.priority}"
        assert self.cache_salt_id is None or self.cache_salt_id > 0, f"cache_salt_id {self.cache_salt_id}"


@dataclass
class SchedulerConfig:
    capacity_scheduler_policy: Any = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: Any = None
    dynamic_batch_config: Any = None


@dataclass
class KvCacheConfig:
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = None
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    _: KW_ONLY
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    attention_dp_events_gather_period_ms: int = 5
    runtime_defaults: Any = None
    max_gpu_total_bytes: int = 0


@dataclass
class OrchestratorConfig:
    is_orchestrator: bool = True
    worker_executable_path: str = ""
    orch_leader_comm: Any = None
    spawn_processes: bool = True


@dataclass
class ParallelConfig:
    communication_type: Any = CommunicationType.MPI
    communication_mode: Any = CommunicationMode.LEADER
    device_ids: list[int] | None = None
    participant_ids: list[int] | None = None
    orchestrator_config: OrchestratorConfig | None = None
    num_nodes: int | None = None


@dataclass
class SpeculativeDecodingConfig:
    fast_logits: bool = False


@dataclass
class ExecutorConfig:
    max_beam_width: int = 1
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_chunked_context: bool = False
    normalize_log_probs: bool = True
    iter_stats_max_iterations: int = 1000
    request_stats_max_iterations: int = 0
    batching_type: Any = BatchingType.INFLIGHT
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    parallel_config: ParallelConfig | None = None
    peft_cache_config: Any = "PeftCacheConfig()"
    logits_post_processor_config: Any = None
    decoding_config: Any = None
    use_gpu_direct_storage: bool = False
    gpu_weights_percent: float = 1.0
    max_queue_size: int | None = None
    extended_runtime_perf_knob_config: Any = "ExtendedRuntimePerfKnobConfig()"
    debug_config: Any = None
    recv_poll_period_ms: int = 0
    max_seq_idle_microseconds: Any = "kDefaultMaxSeqIdleMicroseconds"
    spec_dec_config: SpeculativeDecodingConfig | None = None
    guided_decoding_config: Any = None
    additional_model_outputs: list | None = None
    cache_transceiver_config: Any = None
    gather_generation_logits: bool = False
    mm_embedding_offloading: bool = False
    enable_trt_overlap: bool = False
    fail_fast_on_attention_window_too_large: bool = False


@dataclass
class KvCacheMetrics:
    num_total_allocated_blocks: int = 0
    num_new_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_missed_blocks: int = 0
    kv_cache_hit_rate: float = 0.0


@dataclass
class SpeculativeDecodingMetrics:
    acceptance_rate: float = 0.0
    total_accepted_draft_tokens: int = 0
    total_draft_tokens: int = 0


@dataclass
class TimingMetrics:
    arrival_time: timedelta = timedelta(0)
    first_scheduled_time: timedelta = timedelta(0)
    first_token_time: timedelta = timedelta(0)
    last_token_time: timedelta = timedelta(0)


@dataclass
class RequestPerfMetrics:
    timing_metrics: TimingMetrics = field(default_factory=TimingMetrics)
    kv_cache_metrics: KvCacheMetrics = field(default_factory=KvCacheMetrics)
    speculative_decoding: SpeculativeDecodingMetrics = field(default_factory=SpeculativeDecodingMetrics)
    first_iter: int | None = None
    last_iter: int | None = None
    iter: int | None = None


@dataclass
class Result:
    is_final: bool = False
    output_token_ids: list[list[int]] = field(default_factory=list)
    cum_log_probs: list[float] | None = None
    log_probs: list[list[float]] | None = None
    context_logits: Any = None
    generation_logits: Any = None
    finish_reasons: list = field(default_factory=list)
    sequence_index: int = 0
    is_sequence_final: bool = False
    decoding_iter: int = 0
    avg_decoded_tokens_per_iter: float = 0.0
    request_perf_metrics: RequestPerfMetrics | None = None


class Response:
    """``result`` raises for a response with an error, and ``error_msg`` for one without."""

    def __init__(self, request_id: int, error_msg: str | None = None, result: Result | None = None, client_id: int | None = None) -> None:
        self.request_id, self.client_id = request_id, client_id
        self._error_msg, self._result = error_msg, result

    def has_error(self) -> bool:
        return self._error_msg is not None

    @property
    def error_msg(self) -> str:
        assert self._error_msg is not None, "no error in this response"
        return self._error_msg

    @property
    def result(self) -> Result:
        if self._result is None:
            raise RuntimeError(self._error_msg)
        return self._result


@dataclass
class KvCacheStats:
    max_num_blocks: int = 0
    free_num_blocks: int = 0
    used_num_blocks: int = 0
    tokens_per_block: int = 0
    alloc_total_blocks: int = 0
    alloc_new_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0
    cache_hit_rate: float = 0.0


@dataclass
class InflightBatchingStats:
    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_gen_requests: int = 0
    num_paused_requests: int = 0
    num_ctx_tokens: int = 0
    micro_batch_id: int = 0
    avg_num_decoded_tokens_per_iter: float = 0.0


@dataclass
class IterationStats:
    timestamp: str = ""
    iter: int = 0
    iter_latency_ms: float = 0.0
    new_active_requests_queue_latency_ms: float = 0.0
    num_new_active_requests: int = 0
    num_active_requests: int = 0
    num_queued_requests: int = 0
    num_completed_requests: int = 0
    max_num_active_requests: int = 0
    gpu_mem_usage: int = 0
    cpu_mem_usage: int = 0
    pinned_mem_usage: int = 0
    kv_cache_stats: KvCacheStats | None = None
    cross_kv_cache_stats: Any = None
    static_batching_stats: Any = None
    inflight_batching_stats: InflightBatchingStats | None = None
    specdec_stats: Any = None
