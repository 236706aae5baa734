"""Domain types of one generation request: what was asked, how it may end, and the error that names what was wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class ErrorCode(str, Enum):
    """Why a request was refused or failed; the Triton adapter maps these one to one to TritonError codes."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"
    UNIMPLEMENTED = "UNIMPLEMENTED"


class RequestError(Exception):
    """A request that cannot be served: a code and one sentence for the client, naming the field and the value."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class FinishReason(str, Enum):
    """How a successful generation ended."""

    LENGTH = "length"
    END_ID = "end_id"
    STOP_WORDS = "stop_words"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn: temperature 0 or top_k 1 is greedy; top_k 0 and top_p 1.0 are off; ``seed`` keys the randomness."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether every token is the arg-max."""
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request as it crosses the wire, already type-checked by the codec; absent options are None.

    ``num_draft_tokens`` is a ceiling on the speculation length (0 = no speculation, None = the policy decides).
    """

    text_input: str
    max_tokens: int
    stream: bool = False
    stop_words: tuple[str, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    end_id: int | None = None
    pad_id: int | None = None
    exclude_input_in_output: bool = False
    num_draft_tokens: int | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return a JSON-able dict with the absent options left out."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_wire(cls, body: dict[str, Any]) -> GenerationRequest:
        """Rebuild a request from ``to_wire``'s dict; unknown keys are a TypeError (both ends are the same version)."""
        return cls(**{**body, "stop_words": tuple(body.get("stop_words", ()))})
