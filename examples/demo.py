"""Serve real text twice on this machine, by stock SGLang and through the four-region cache, and compare.

    make demo

The second server keeps at most 512 tokens of KV in its "GPU" budget; the rest lives in host memory, part of it computed on in
place (C), part of it streamed (T). Answers and logprobs must agree with the stock server's.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from serving import Server

from sglang_inplacekv.models import long_text, prepare_smollm2

NEW_TOKENS = 32
TOLERANCE = 1e-4
COMMON_FLAGS = ["--max-running-requests", "4", "--chunked-prefill-size", "1024", "--context-length", "8192"]
STOCK_FLAGS = ["--attention-backend", "torch_native", "--max-total-tokens", "16384", *COMMON_FLAGS]
INPLACE_FLAGS = [
    *("--attention-backend", "inplacekv", "--page-size", "64", "--inplacekv-gpu-memory", "512tok"),
    *("--inplacekv-host-memory", "700MB", "--inplacekv-cpu-share", "0.5", "--enable-metrics", *COMMON_FLAGS),
]
REGIONS = ("D", "C", "T", "window")


@dataclass
class Question:
    name: str
    topic: str
    chars: int
    text: str

    @property
    def prompt(self) -> str:
        document = long_text(self.chars, topic=self.topic)[: self.chars]
        return f"<|im_start|>user\n{document}\n\n{self.text}<|im_end|>\n<|im_start|>assistant\n"


QUESTIONS = [
    Question("long document", "objects", 12000, "Summarize the text above in one sentence."),
    Question(
        "same document, other question", "objects", 12000, "What does the text say about object identity?"
    ),
    Question("shorter document", "assignment", 4000, "What is this text about?"),
    Question("short prompt", "truth", 400, "Which values are considered false?"),
]


def say(text: str) -> None:
    print(text, flush=True)


def ask(server: Server, question: Question) -> dict:
    """One /generate call; the answer with the logprob of each new token."""
    reply = server.post(
        "/generate",
        {
            "text": question.prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS},
            "return_logprob": True,
        },
    )
    meta = reply["meta_info"]
    return {
        "text": reply["text"],
        "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
        "tokens": [entry[1] for entry in meta["output_token_logprobs"]],
        "prompt_tokens": meta["prompt_tokens"],
        "cached_tokens": meta["cached_tokens"],
    }


def ask_all(server: Server) -> list[dict]:
    """The first question alone, so that the second finds its prefix; then the others at once."""
    started = time.monotonic()

    def timed(question: Question) -> dict:
        answer = ask(server, question)
        say(
            f"    [{time.monotonic() - started:5.1f} s] {question.name}: {answer['prompt_tokens']} prompt tokens "
            f"({answer['cached_tokens']} from the prefix cache), {len(answer['tokens'])} new"
        )
        return answer

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        return [timed(QUESTIONS[0]), *pool.map(timed, QUESTIONS[1:])]


class RegionWatch:
    """Samples the server's /metrics and prints a row whenever the tokens per region have changed."""

    def __init__(self, server: Server) -> None:
        self._server, self._stop = server, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak = dict.fromkeys(REGIONS, 0)

    def _run(self) -> None:
        started, last = time.monotonic(), None
        say("    seconds |  D (GPU)  C (computed)  T (streamed)  open windows | share target  effective")
        while not self._stop.wait(0.5):
            values = parse_metrics(self._server.get("/metrics"))
            held = [int(values.get(f'inplacekv_tokens{{region="{region}"}}', 0)) for region in REGIONS]
            self.peak = {
                region: max(self.peak[region], tokens) for region, tokens in zip(REGIONS, held, strict=True)
            }
            row = (*held, values.get("inplacekv_share_target", 0), values.get("inplacekv_share_effective", 0))
            if row != last:
                say(
                    "    {:7.1f} | {:8d} {:13d} {:13d} {:13d} | {:12.2f} {:10.2f}".format(
                        time.monotonic() - started, *row
                    )
                )
                last = row

    def __enter__(self) -> RegionWatch:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()


def parse_metrics(text: str) -> dict[str, float]:
    """`sglang:inplacekv_*` samples of a Prometheus page, keyed without prefix and pid label."""
    values = {}
    for name, labels, value in re.findall(r"^sglang:(inplacekv_\w+)(\{[^}]*\})? (\S+)$", text, re.MULTILINE):
        region = re.search(r'region="\w+"', labels)
        values[name + (f"{{{region.group(0)}}}" if region else "")] = float(value)
    return values


def serve(title: str, model: str, flags: list[str], watch: bool) -> tuple[list[dict], dict[str, int]]:
    say(f"\n== {title}: python -m sglang.launch_server --model-path {model} {' '.join(flags)}")

    def waiting(seconds: float) -> None:
        if int(seconds) % 15 == 0:
            say(f"    starting, {seconds:.0f} s")

    with Server(model, *flags, on_wait=waiting) as server:
        say("    healthy")
        if not watch:
            return ask_all(server), {}
        with RegionWatch(server) as regions:
            answers = ask_all(server)
        return answers, regions.peak


def compare(stock: list[dict], inplace: list[dict]) -> bool:
    """Print both answers to each question; True if all tokens agree and all logprobs within TOLERANCE."""
    agree = True
    for question, ours, theirs in zip(QUESTIONS, inplace, stock, strict=True):
        same = ours["tokens"] == theirs["tokens"]
        gap = max(
            (abs(a - b) for a, b in zip(ours["logprobs"], theirs["logprobs"], strict=False)), default=0.0
        )
        agree &= same and gap <= TOLERANCE
        say(f"\n-- {question.name} ({ours['prompt_tokens']} prompt tokens): {question.text}")
        say(f"   stock     : {theirs['text'].strip()!r}")
        say(f"   inplacekv : {ours['text'].strip()!r}")
        say(
            f"   tokens {'equal' if same else 'DIFFER'}, largest logprob difference {gap:.1e} (limit {TOLERANCE:g})"
        )
    return agree


def main() -> int:
    started = time.monotonic()
    say("== model: SmolLM2-135M-Instruct")
    model = prepare_smollm2()
    stock, _ = serve("stock SGLang", str(model), STOCK_FLAGS, watch=False)
    inplace, peak = serve("four-region cache", str(model), INPLACE_FLAGS, watch=True)
    say("\n== answers, side by side")
    agree = compare(stock, inplace)
    say(
        "\n== largest number of tokens held: "
        + ", ".join(f"{region} {tokens}" for region, tokens in peak.items())
    )
    missing = [region for region, tokens in peak.items() if not tokens]
    if missing:
        say(f"== region {', '.join(missing)} was never seen in use")
    verdict = "the outputs AGREE" if agree else "the outputs DO NOT AGREE"
    say(f"== {verdict} with stock SGLang ({time.monotonic() - started:.0f} s)")
    return 0 if agree and not missing else 1


if __name__ == "__main__":
    sys.exit(main())
