"""Admission of requests to DeepSeek-V4, which knows tokens by their ids alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_inplacekv.gate import AdmissionGate

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder


class TokenIdGate(AdmissionGate):
    """Answers a request that gives embeddings with an error. SGLang lets such requests in where the prefix cache is off."""

    def add_one_req(self, add: Callable, adder: PrefillAdder, req: Req, *args, **kwargs) -> AddReqResult:
        if req.input_embeds is not None:
            req.set_finish_with_abort(
                "DeepSeek-V4 routes tokens by their ids: input_embeds are not supported"
            )
            req.input_embeds = None
            req.init_next_round_input(adder.tree_cache)  # one token is left of the prompt
        return super().add_one_req(add, adder, req, *args, **kwargs)
