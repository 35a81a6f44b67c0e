"""What clients send and get: every public endpoint, whole and streamed, reduced to text and logprobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import requests

from examples.serving import Server

TIMEOUT_S = 240
NEW_TOKENS = 16
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Answer:
    text: str
    logprobs: list[float]  # of the new tokens
    prompt_logprobs: list[float]
    prompt_tokens: int
    cached_tokens: int


def generate(server: Server, prompt: str, *, prompt_logprobs: bool = False, **sampling) -> Answer:
    """`prompt_logprobs` makes SGLang compute the whole prompt again, prefix hits notwithstanding."""
    reply = server.post("/generate", generate_request(prompt, prompt_logprobs, **sampling), TIMEOUT_S)
    meta = reply["meta_info"]
    # The first token has nothing before it.
    prompt_part = [entry[0] for entry in meta.get("input_token_logprobs", ())][1:]
    new = [entry[0] for entry in meta["output_token_logprobs"]]
    return Answer(reply["text"], new, prompt_part, meta["prompt_tokens"], meta["cached_tokens"])


def generate_request(prompt: str, prompt_logprobs: bool = False, **sampling) -> dict:
    return {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, **sampling},
        "return_logprob": True,
        "logprob_start_len": 0 if prompt_logprobs else -1,
    }


def completion_request(prompt: str) -> dict:
    return {"model": "any", "prompt": prompt, "temperature": 0, "max_tokens": NEW_TOKENS, "logprobs": 1}


def chat_request(prompt: str) -> dict:
    messages = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": prompt}]
    return {
        "model": "any",
        "messages": messages,
        "temperature": 0,
        "max_tokens": NEW_TOKENS,
        "logprobs": True,
    }


def completion(server: Server, prompt: str) -> Answer:
    reply = server.post("/v1/completions", completion_request(prompt), TIMEOUT_S)
    choice = reply["choices"][0]
    return _openai(choice["text"], choice["logprobs"]["token_logprobs"], reply["usage"])


def chat(server: Server, prompt: str) -> Answer:
    reply = server.post("/v1/chat/completions", chat_request(prompt), TIMEOUT_S)
    choice = reply["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return _openai(choice["message"]["content"], logprobs, reply["usage"])


def _openai(text: str, logprobs: list[float], usage: dict) -> Answer:
    details = usage.get("prompt_tokens_details") or {}
    return Answer(text, logprobs, [], usage["prompt_tokens"], details.get("cached_tokens", 0))


def events(server: Server, path: str, payload: dict) -> Iterator[dict]:
    """Server-sent events of a streamed reply, until [DONE]; closing the iterator closes the connection."""
    payload = {**payload, "stream": True}
    with requests.post(server.url + path, json=payload, stream=True, timeout=TIMEOUT_S) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line == b"data: [DONE]":
                return
            if line:
                assert line.startswith(b"data: "), line
                yield json.loads(line.removeprefix(b"data: "))
    raise AssertionError("the stream ended without [DONE]")


def streamed_text(server: Server, path: str, payload: dict) -> tuple[str, int]:
    """The text put together from its pieces, and how many pieces carried some."""
    pieces = []
    for event in events(server, path, payload):
        if path == "/generate":  # SGLang's own endpoint sends all the text so far
            piece = event["text"][len("".join(pieces)) :]
        elif not event["choices"]:
            continue
        elif path == "/v1/completions":
            piece = event["choices"][0]["text"]
        else:
            piece = event["choices"][0]["delta"].get("content") or ""
        if piece:
            pieces.append(piece)
    return "".join(pieces), len(pieces)


def assert_equal(ours: Answer, stock: Answer) -> None:
    assert ours.text == stock.text
    assert ours.prompt_tokens == stock.prompt_tokens
    for mine, theirs in ((ours.logprobs, stock.logprobs), (ours.prompt_logprobs, stock.prompt_logprobs)):
        assert len(mine) == len(theirs)
        worst = max((abs(a - b) for a, b in zip(mine, theirs)), default=0.0)
        assert worst <= TOLERANCE, f"a logprob differs by {worst:g}"
