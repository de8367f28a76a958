"""The request and response schema of `POST /phase1/reasoning`.

Unknown fields and values of a wrong type are rejected.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from rlm.grading import AnswerType
from rlm.reasoner import Confidence, Sample, Thinking, Usage, Verification, VoteCounts

PROMPT_CHARS = 8000
MAX_SAMPLES = 16

Stop = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def is_empty(text: str) -> bool:
    """Return whether a text contains no visible characters."""
    return not any(char.isprintable() and not char.isspace() for char in text)


def _says_something(text: str) -> str:
    if is_empty(text):
        raise ValueError("is empty")
    return text


ExpectedText = Annotated[str, StringConstraints(min_length=1, max_length=200)]
ExpectedInt = Annotated[int, Field(ge=-(2**63), lt=2**63)]
ExpectedFloat = Annotated[float, Field(ge=-1e15, le=1e15)]


def _as_text(expected: str | float | None) -> str | None:
    """Convert a number to text for the grader, without an exponent."""
    return f"{Decimal(str(expected)):f}" if isinstance(expected, int | float) else expected


class JSONSchema(Strict):
    """A JSON schema in OpenAI's form. Only `schema` is used; `strict` is always on."""

    json_schema: dict[str, Any] = Field(alias="schema")
    name: Annotated[str, Field(max_length=256)] | None = None
    description: Annotated[str, Field(max_length=PROMPT_CHARS)] | None = None
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JSONObjectFormat(Strict):
    type: Literal["json_object"]


class JSONSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JSONSchema


ResponseFormat = Annotated[
    TextFormat | JSONObjectFormat | JSONSchemaFormat, Field(discriminator="type")
]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1000)]


class StructuredOutputsFields(Strict):
    """A constraint in vLLM's form, with exactly one of the fields set."""

    json_schema: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Choices | None = None


class ReasoningRequest(Strict):
    """A question and options. Only `prompt` is required."""

    prompt: str = Field(
        min_length=1,
        max_length=PROMPT_CHARS,
        description="the question",
        examples=["What is 2 + 3?"],
    )
    n: int = Field(
        1,
        ge=1,
        le=MAX_SAMPLES,
        description="number of answers; if above 1, the reply is their majority answer",
    )
    max_new_tokens: int | None = Field(
        None, ge=1, le=1_000_000, description="maximum new tokens (none: the server's limit)"
    )
    thinking_budget: int | None = Field(
        None, ge=0, le=1_000_000, description="maximum reasoning tokens (none: as many as fit)"
    )
    temperature: float | None = Field(
        None, ge=0, le=2, description="0 selects the most likely token (none: 0, or 0.7 if n > 1)"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="probability mass of nucleus sampling")
    seed: int = Field(0, ge=0, lt=2**63, description="equal seeds give equal answers")
    stop: list[Stop] = Field([], max_length=4, description="stop strings, which end the answer")
    adapter: str | None = Field(
        None, min_length=1, max_length=128, description="a name from /phase1/info; base: no adapter"
    )
    stream: bool = Field(False, description="answer in server-sent events")
    return_samples: bool = Field(False, description="return all samples, not only the winner")
    answer_type: AnswerType | None = Field(
        None, description="type of the answer (none: the type from the adapter's training)"
    )
    response_format: ResponseFormat | None = Field(
        None, description="form of the answer, as in OpenAI's API: text, JSON, JSON schema"
    )
    structured_outputs: StructuredOutputsFields | None = Field(
        None, description="form of the answer, as in vLLM: json, json_object, regex or choice"
    )
    expected_answer: ExpectedText | ExpectedInt | ExpectedFloat | None = Field(
        None, description="reference answer (text or number), with which the answer is compared"
    )

    _prompt = field_validator("prompt")(_says_something)
    _expected = field_validator("expected_answer")(_as_text)


class Step(Strict):
    step: int
    content: str


class Timings(Strict):
    first_token_ms: float
    total_ms: float
    tokens_per_second: float


class ModelReport(Strict):
    base: str
    adapter: str
    adapter_sha256: str | None


class ReasoningResponse(Strict):
    id: str
    object: Literal["phase1.reasoning"] = "phase1.reasoning"
    created: int
    request_id: str
    response: str = Field(description="the whole text, with the reasoning")
    reasoning: str | None
    answer: str
    final_answer: str | None
    answer_type: AnswerType = Field(description="answer type used for votes and verification")
    trace: list[Step] = Field(description="the reasoning in steps, then the answer")
    details: dict[str, Any] = Field(description="stage, format, token counts, verdict")
    finish_reason: Literal["stop", "length"]
    thinking: Thinking
    vote: VoteCounts | None
    confidence: Confidence | None
    verifier: Verification | None
    samples: list[Sample] | None
    usage: Usage
    timings: Timings
    seed: int
    model: ModelReport
    experiences: list[str] = Field(description="ids of the lessons (--experiences) in the prompt")
    warnings: list[str]
