"""The link's rate, alone and beside attention, over a CUDA that copies when it is asked how far it is."""

from __future__ import annotations

import pytest
import torch

from sglang_inplacekv import host_rates, queued_copies
from sglang_inplacekv.host_rates import line_through, measure_attention
from sglang_inplacekv.layout import KVShape
from sglang_inplacekv.planning import ModelKV
from sglang_inplacekv.queued_copies import QueuedCopies
from tests.inplacekv import fake_cuda

MODEL = ModelKV(KVShape(48, 4, 128, torch.bfloat16, 16), 32)
COPY_BYTES = 2**20
GAP_S = 1e-3  # between two events that are recorded one after the other: fake clocks count milliseconds


class RunningEvent(fake_cuda.FakeEvent):
    """Whenever one is asked for that has not come, the stream goes on by one piece of a copy."""

    def query(self) -> bool:
        if super().query():
            return True
        stream, _ = self.recorded
        stream.run_until(stream.ran + 1)
        return False


class Fake:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(queued_copies, "_COPY_BYTES", COPY_BYTES)
        patch.setattr(queued_copies, "_PINNED_BYTES", 4 * COPY_BYTES)
        self.registrations = fake_cuda.FakeRegistrations(patch)
        self.library = fake_cuda.install(patch)
        patch.setattr(torch.cuda, "Stream", fake_cuda.FakeStream)
        self.targets: list[torch.Tensor] = []
        patch.setattr(torch, "empty_like", self.empty_like)

    def empty_like(self, like: torch.Tensor, device: str) -> torch.Tensor:
        assert device == "cuda"
        self.targets.append(torch.ones(like.shape, dtype=like.dtype))
        return self.targets[-1]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch)


@pytest.mark.parametrize("piece_bytes", [COPY_BYTES, 12_288, 3 * COPY_BYTES])
def test_the_link_alone(piece_bytes: int, fake: Fake) -> None:
    copies = QueuedCopies(piece_bytes)
    assert copies.nbytes == max(1, COPY_BYTES // piece_bytes) * piece_bytes
    assert copies.rate_alone() == pytest.approx(copies.nbytes / GAP_S)
    assert set(fake.library.copied) == {piece_bytes} and not fake.targets[0].any()
    assert sum(fake.library.copied) == queued_copies._COPIES_ALONE * copies.nbytes
    assert sum(fake.registrations.ranges.values()) == max(1, 4 * COPY_BYTES // copies.nbytes) * copies.nbytes
    copies.close()
    assert not fake.registrations.ranges


def test_memory_that_cannot_be_pinned(fake: Fake) -> None:
    fake.registrations.fail_after = 0
    with pytest.raises(RuntimeError, match=r"pinning .* bytes of system RAM .* CUDA error 2"):
        QueuedCopies(COPY_BYTES)


def test_a_queue_is_topped_up_and_a_pause_counts_for_nothing(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", RunningEvent)
    copies = QueuedCopies(COPY_BYTES)
    copies.top_up(4)
    assert fake.library.calls == 4
    assert [copies.waiting for _ in range(3)] == [4, 3, 2]
    copies.top_up(4)  # by when one more has ended
    assert fake.library.calls == 7
    while copies.waiting:
        pass
    pause = 1000
    for _ in range(pause):
        next(fake_cuda._numbers)
    copies.top_up(5)
    assert copies.take_rate() == pytest.approx(COPY_BYTES / GAP_S)
    assert copies.waiting == 0
    copies.close()


def test_attention_beside_copies(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", RunningEvent)
    monkeypatch.setattr(host_rates, "_MOST_BYTES", 2**26)
    monkeypatch.setattr(host_rates, "_LINE_S", 0.0)
    copies = QueuedCopies(COPY_BYTES)
    found = measure_attention(1, 2, MODEL, "cpu", copies)
    assert found.threads == 1 and found.token_s > 0 and found.fixed_s >= 0
    assert found.link_bytes_s == pytest.approx(COPY_BYTES / GAP_S)
    calls = 2 * host_rates._LEAST_CALLS  # before and after each of which a copy ends
    assert fake.library.calls >= host_rates._QUEUED + calls, "topped up while it went on"
    assert copies.waiting == 0
    copies.close()
    assert measure_attention(1, 2, MODEL, "cpu", None).link_bytes_s is None


class Scripted:
    """Attention by a line, and copies of which so many end in a call."""

    def __init__(self, fixed_s: float, token_s: float, ends: int) -> None:
        self.fixed_s, self.token_s, self.ends = fixed_s, token_s, ends
        self.waiting, self.asked, self.calls = 0, [], []

    def submit(self, tokens: int) -> Scripted:
        self.seconds, self.waiting = self.fixed_s + self.token_s * tokens, max(0, self.waiting - self.ends)
        if not self.waiting:
            self.seconds *= 0.5  # for a part of it nothing was beside it
        self.calls.append(tokens)
        return self

    def wait(self, timeout_s: float) -> None:
        pass

    def top_up(self, copies: int) -> None:
        self.asked.append(copies)
        self.waiting = copies


@pytest.mark.parametrize("ends", [1, 30])
def test_calls_that_outlast_the_copies_do_not_count(ends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rates, "_LINE_S", 0.0)
    host, sizes = Scripted(1e-4, 2e-8, ends), (32768, 4096)
    seconds = host_rates._seconds_beside(host, sizes, host)
    assert line_through(sizes, seconds) == (pytest.approx(1e-4), pytest.approx(2e-8))
    assert host.asked[:3] == ([8, 8, 8] if ends == 1 else [8, 16, 32])
    assert [host.calls.count(tokens) for tokens in sizes] == [4 if ends == 1 else 6, 4]


@pytest.mark.parametrize(
    ("large_s", "small_s", "line"),
    [
        (9e-4, 2e-4, (1e-4, 1e-7)),
        (8e-4, 1e-4, (0.0, 1e-7)),
        (8e-4, 0.5e-4, (0.0, 1e-7)),
        (8e-4, 8e-4, (0.0, 1e-7)),
        (8e-4, 9e-4, (0.0, 1e-7)),
    ],
)
def test_the_line_through_two_calls(large_s: float, small_s: float, line: tuple[float, float]) -> None:
    assert line_through((8000, 1000), (large_s, small_s)) == pytest.approx(line)


@pytest.mark.parametrize("page_size", [16, 65536])
def test_each_call_reads_the_memory_after_the_last(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a page is longer than a small call."""
    monkeypatch.setattr(host_rates, "_LINE_S", 0.0)
    monkeypatch.setattr(host_rates, "_CALL_BYTES", 2**20)
    monkeypatch.setattr(host_rates, "_LEAST_BYTES", 2**23)
    monkeypatch.setattr(host_rates, "_THREAD_BYTES", 1)
    pages: list[int] = []
    tokens: list[int] = []
    table = host_rates.cpu_attn.PageTable

    def listed(region, page, indptr, lengths):
        pages.extend(page.tolist())
        tokens.extend(lengths.tolist())
        return table(region, page, indptr, lengths)

    monkeypatch.setattr(host_rates.cpu_attn, "PageTable", listed)
    model = ModelKV(KVShape(1, 1, 64, torch.bfloat16, page_size), 8)
    assert measure_attention(1, 1, model, "cpu", None).token_s > 0
    memory_pages = max(1, 2**23 // (model.layer_token_bytes * page_size))
    assert pages == [i % memory_pages for i in range(len(pages))]
    large = max(page_size, 2**20 // model.layer_token_bytes)
    assert tokens == [large, large // 8] * 4
