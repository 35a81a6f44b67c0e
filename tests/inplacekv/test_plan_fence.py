from __future__ import annotations

from unittest import mock

import pytest
import torch

from sglang_inplacekv.executors.plan_fence import PlanFence


def test_waits_before_and_marks_after_even_if_a_plan_fails() -> None:
    with mock.patch.object(torch.cuda, "Event") as event:
        fence, calls = PlanFence(), event.return_value
        with fence:
            assert [call[0] for call in calls.method_calls] == ["synchronize"]
        with pytest.raises(ValueError, match="plan"), fence:
            raise ValueError("no plan")
    assert [call[0] for call in calls.method_calls] == ["synchronize", "record"] * 2
