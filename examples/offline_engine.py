"""The same cache without a server: sglang.Engine in a Python program.

    python examples/offline_engine.py

Engine takes no foreign keyword, so the budgets are environment variables, named as the server's flags are.
"""

from __future__ import annotations

import os
import sys
import time

import sglang
import torch

from sglang_inplacekv.models import long_text, prepare_smollm2

# Tiny budgets for a tiny model, so that something spills. setdefault: your own environment wins.
os.environ.setdefault("SGLANG_INPLACEKV_GPU_MEMORY", "512tok")
os.environ.setdefault("SGLANG_INPLACEKV_HOST_MEMORY", "500MB")
os.environ.setdefault("SGLANG_INPLACEKV_CPU_SHARE", "0.5")

# What a host without a GPU needs.
HOST = {} if torch.cuda.is_available() else {"device": "cpu", "dtype": "float32"}
SAMPLING = {"temperature": 0, "max_new_tokens": 24}


def prompt(question: str, chars: int) -> str:
    document = long_text(chars, topic="objects")[:chars]
    return f"<|im_start|>user\n{document}\n\n{question}<|im_end|>\n<|im_start|>assistant\n"


def check(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"error: {what}")


def show(title: str, output: dict) -> None:
    meta = output["meta_info"]
    print(
        f"\n== {title}: {meta['prompt_tokens']} prompt tokens, {meta['cached_tokens']} from the prefix cache\n"
        f"   {output['text'].strip()!r}"
    )
    check(bool(output["text"].strip()), f"{title} got no answer")


def main() -> None:
    started = time.monotonic()
    print("== starting the engine (half a minute)", flush=True)
    engine = sglang.Engine(
        model_path=str(prepare_smollm2()),
        attention_backend="inplacekv",
        page_size=64,
        chunked_prefill_size=1024,
        max_running_requests=4,
        context_length=8192,
        log_level="error",
        **HOST,
    )
    try:
        capacity = engine.get_server_info()["max_total_num_tokens"]
        print(
            f"== {capacity} tokens fit, {os.environ['SGLANG_INPLACEKV_GPU_MEMORY']} of them in the GPU budget"
        )

        long = prompt("What does the text say about object identity?", 5000)
        first = engine.generate(long, SAMPLING)
        show("a long prompt", first)
        check(first["meta_info"]["prompt_tokens"] > 512, "the prompt fits the GPU budget: nothing was tested")

        again, other = engine.generate([long, prompt("Which values are false?", 2500)], SAMPLING)
        show("the same again, in a batch", again)
        show("another one beside it", other)
        check(again["text"] == first["text"], "the same prompt got another answer")
        check(again["meta_info"]["cached_tokens"] > 0, "the second time nothing came from the prefix cache")

        print("\n== streamed\n   ", end="")
        text = ""
        for piece in engine.generate(long, SAMPLING, stream=True):
            print(piece["text"][len(text) :].replace("\n", " "), end="|", flush=True)
            text = piece["text"]
        print()
        check(text == first["text"], "the streamed answer differs")
    finally:
        engine.shutdown()
    print(f"\n== done in {time.monotonic() - started:.0f} s")


# The engine spawns processes that import this file: without the guard each of them would start an engine.
if __name__ == "__main__":
    main()
