"""Requests as the scheduler receives them, and what it answers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass
class Result:
    """`prompt_logprobs[i]` belongs to prompt token `i + 1`; None when not asked for."""

    output_ids: list[int]
    output_logprobs: list[float]
    prompt_logprobs: list[float] | None
    finish_reason: dict
    cached_tokens: int


@dataclass(eq=False)
class Handle:
    """A request under way. `output_ids` and `output_logprobs` grow with every step."""

    rid: str
    prompt: list[int]
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] | None = None
    finish_reason: dict | None = None
    cached_tokens: int = 0
    retractions: int = 0
    req: Req | None = None  # set when the scheduler has taken the request in

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def result(self) -> Result:
        if not self.done:
            raise RuntimeError(f"request {self.rid} has not finished")
        return Result(
            self.output_ids,
            self.output_logprobs,
            self.prompt_logprobs,
            self.finish_reason,
            self.cached_tokens,
        )


def tokenized(
    rid: str,
    prompt: list[int],
    *,
    vocab_size: int,
    want_prompt_logprobs: bool,
    **sampling,
) -> TokenizedGenerateReqInput:
    params = SamplingParams(**sampling)
    params.normalize(None)
    params.verify(vocab_size)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=True,
        # 0 makes SGLang compute the whole prompt again, prefix hits notwithstanding.
        logprob_start_len=0 if want_prompt_logprobs else -1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=True,
    )
