"""One real server with a tiny GPU budget, so that KV is in all four regions, against a stock server.

Jitter, poison and SGLang's strict idle check are on: a missed wait, a stale read or a leaked page kills the server.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import pytest
import requests

from examples.serving import Server
from sglang_inplacekv.models import long_text, prepare_smollm2
from tests.e2e.clients import (
    NEW_TOKENS,
    Answer,
    assert_equal,
    chat,
    chat_request,
    completion,
    completion_request,
    events,
    generate,
    generate_request,
    streamed_text,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
CAPACITY = 3072
COMMON = [
    *("--max-running-requests", "4", "--context-length", "8192", "--chunked-prefill-size", "256"),
    "--sleep-on-idle",  # a scheduler that polls would take a core from the tests
]
STOCK = ["--attention-backend", "torch_native", "--max-total-tokens", "8192", *COMMON]
INPLACE = [
    *("--page-size", "16", "--inplacekv-gpu-memory", "96tok", "--inplacekv-host-memory", "200MB"),
    *("--inplacekv-cpu-share", "0.5", "--inplacekv-admission", "spill", "--max-total-tokens", str(CAPACITY)),
    *("--enable-cache-report", *COMMON),
]
# Spinning OpenMP barriers of several processes on few cores make each of them many times slower.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
ENVIRONMENT = ONE_THREAD | {
    "PYTHON": sys.executable,
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_INPLACEKV_JITTER_SEED": "7",
    "SGLANG_INPLACEKV_POISON": "1",
    "SGLANG_INPLACEKV_VERIFY": "1",
    "SGLANG_INPLACEKV_TILE_TOKENS": "128",
    "SGLANG_INPLACEKV_WAIT_TIMEOUT_S": "60",
}
REGIONS = ("D", "C", "T", "window")
METRICS = {
    *(f'tokens{{region="{region}"}}' for region in REGIONS),
    *("share_target", "share_effective", "cpu_token_seconds", "cpu_fixed_seconds", "transfer_token_seconds"),
    *("waiting_requests", "queued_requests", "spilled_requests"),
    *("region_fallback_pages", "stolen_pages", "flushed_pages", "device_evicted_tokens"),
}
COUNTERS = {
    *("cpu_attended_bytes_total", "transferred_bytes_total", "flushed_bytes_total"),
    *("cpu_attention_seconds_total", "hidden_transfer_seconds_total", "exposed_transfer_seconds_total"),
}
METRICS |= COUNTERS
PROMPTS = {
    "long": long_text(2600, topic="objects")[:2600] + "\n\nIn short,",
    "medium": long_text(1000, topic="assignment")[:1000],
    "short": "The capital of France is",
}
WHOLE = {"generate": generate, "completion": completion, "chat": chat}
STREAMED = {
    "generate": ("/generate", generate_request),
    "completion": ("/v1/completions", completion_request),
    "chat": ("/v1/chat/completions", chat_request),
}


def metrics(server: Server) -> dict[str, float]:
    """Samples under sglang:inplacekv_, by name and region."""
    found = {}
    for line in server.get("/metrics").splitlines():
        if sample := re.fullmatch(r"sglang:inplacekv_(\w+)(?:\{(.*)\})? (\S+)", line):
            region = re.search(r'region="\w+"', sample[2] or "")
            found[sample[1] + (f"{{{region[0]}}}" if region else "")] = float(sample[3])
    return found


def flushed(server: Server) -> bool:
    """Drop the prefix cache, which SGLang refuses while any request is running or waiting."""
    return requests.post(server.url + "/flush_cache", timeout=60).status_code == 200


def wait_until(condition, what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {timeout_s:g} s"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def model() -> Path:
    return prepare_smollm2()


@pytest.fixture(scope="module")
def stock(model: Path) -> dict[tuple[str, str], Answer]:
    """Every answer of the stock server: (endpoint, prompt) -> answer."""
    with Server(model, *STOCK, env=ONE_THREAD) as server:
        answers = {(way, name): WHOLE[way](server, PROMPTS[name]) for way in WHOLE for name in PROMPTS}
        answers["prompt", "long"] = generate(server, PROMPTS["long"], prompt_logprobs=True, max_new_tokens=1)
    return answers


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "trace.jsonl"


@pytest.fixture(scope="module")
def inplace(model: Path, stock, trace: Path) -> Iterator[Server]:
    """Started by the script that users copy, when the stock server is gone."""
    launcher = ["bash", str(ROOT / "examples/serve.sh")]
    flags = [*INPLACE, "--inplacekv-trace", str(trace)]
    with Server(model, *flags, env=ENVIRONMENT, launcher=launcher) as server:
        server.log_at_start, server.metrics_at_start = len(server.log), metrics(server)
        yield server


def test_gauges_are_there_before_the_first_request(inplace: Server) -> None:
    assert set(inplace.metrics_at_start) == METRICS
    assert inplace.metrics_at_start["share_target"] == 0.5
    # SGLang's health check sends one token through; that stays in D.
    quiet = METRICS - {"share_target", 'tokens{region="D"}'}
    assert not any(inplace.metrics_at_start[name] for name in quiet), inplace.metrics_at_start


def test_every_prompt_logprob_of_a_long_prompt(inplace: Server, stock) -> None:
    ours = generate(inplace, PROMPTS["long"], prompt_logprobs=True, max_new_tokens=1)
    assert len(ours.prompt_logprobs) > 560, "three chunks, most of them outside D"
    assert_equal(ours, stock["prompt", "long"])


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("way", WHOLE)
def test_whole_reply(inplace: Server, stock, way: str, name: str) -> None:
    assert_equal(WHOLE[way](inplace, PROMPTS[name]), stock[way, name])


@pytest.mark.parametrize("way", STREAMED)
def test_streamed_reply(inplace: Server, stock, way: str) -> None:
    path, request = STREAMED[way]
    text, pieces = streamed_text(inplace, path, request(PROMPTS["long"]))
    assert text == stock[way, "long"].text
    assert pieces > NEW_TOKENS / 2, "it came in one piece"


def test_prefix_hit(inplace: Server, stock) -> None:
    wait_until(lambda: flushed(inplace), "idle")
    cold, warm = (generate(inplace, PROMPTS["long"]) for _ in range(2))
    assert cold.cached_tokens == 0
    assert warm.cached_tokens >= warm.prompt_tokens - 16, "all full pages of the prompt"
    for answer in (cold, warm):
        assert_equal(answer, stock["generate", "long"])
    assert completion(inplace, PROMPTS["long"]).cached_tokens == warm.cached_tokens


def test_requests_join_and_leave(inplace: Server, stock) -> None:
    """Seven requests over four places: some wait, each one joins a running batch, all leave at different steps."""
    names = ["long", "short", "medium", "long", "medium", "short", "long"]

    def late(place: int) -> Answer:
        time.sleep(0.4 * place)
        return generate(inplace, PROMPTS[names[place]])

    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(late, range(len(names))))
    for name, answer in zip(names, answers):
        assert_equal(answer, stock["generate", name])


def test_all_regions_are_in_use(inplace: Server) -> None:
    """Seen while a long request decodes."""
    stream = events(inplace, "/generate", generate_request(PROMPTS["long"], max_new_tokens=40))
    for _ in range(4):
        next(stream)
    held = metrics(inplace)
    stream.close()
    assert all(held[f'tokens{{region="{region}"}}'] > 0 for region in REGIONS), held
    assert 0 < held["share_effective"] < 1 and held["flushed_pages"] > 0
    assert all(held[name] > 0 for name in COUNTERS), held


def test_client_that_goes_away(inplace: Server, stock) -> None:
    """Its request ends, nothing leaks (the idle check would kill the server), and the next one is served as before."""
    stream = events(
        inplace,
        "/v1/completions",
        completion_request(PROMPTS["medium"]) | {"max_tokens": 2000, "ignore_eos": True},
    )
    for _ in range(5):
        next(stream)
    assert not flushed(inplace), "the request is no longer running"
    stream.close()
    wait_until(lambda: flushed(inplace), "the aborted request has ended")
    assert_equal(generate(inplace, PROMPTS["short"]), stock["generate", "short"])
    held = metrics(inplace)
    assert held['tokens{region="C"}'] == held['tokens{region="T"}'] == 0, (
        "pages of the aborted request are held"
    )


def test_prompt_above_capacity_fails_alone(inplace: Server, stock) -> None:
    document = long_text(20_000, topic="objects")[:20_000]
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(generate, inplace, PROMPTS["medium"])
        replies = {
            path: requests.post(inplace.url + path, json=request(document), timeout=120)
            for path, request in STREAMED.values()
        }
    for path, reply in replies.items():
        assert reply.status_code == 400, (path, reply.text)
        assert re.search(r"\b\d{4} tokens\b.*exceeds.*\b30\d\d tokens\b", reply.text), (path, reply.text)
    assert_equal(other.result(), stock["generate", "medium"])


def test_frontend_program(inplace: Server) -> None:
    command = [sys.executable, str(ROOT / "examples/frontend.py"), "--url", inplace.url, "--chars", "1200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for section in ("fork, select, regex", "run_batch", "stream", "done in"):
        assert section in done.stdout


def test_trace_of_all_that(inplace: Server, trace: Path, tmp_path: Path) -> None:
    wait_until(lambda: flushed(inplace), "idle")
    command = ["inplacekv", "trace", str(trace), "--out", str(tmp_path / "trace.svg")]
    command[0] = str(Path(sys.executable).with_name(command[0]))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > NEW_TOKENS
    assert ElementTree.parse(tmp_path / "trace.svg").getroot().tag.endswith("svg")


def test_nothing_was_left_behind(inplace: Server) -> None:
    """The last test of this server: no gauge came later, no error was logged, and it still idles and answers."""
    assert set(metrics(inplace)) == METRICS
    wait_until(lambda: flushed(inplace), "idle")
    assert inplace.process.poll() is None
    served = inplace.log[inplace.log_at_start :]
    problems = [
        line for line in served.splitlines() if re.search(r"Traceback|leak|WaitTimeout|RuntimeError", line)
    ]
    assert not problems, problems
