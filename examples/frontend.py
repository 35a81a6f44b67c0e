"""A frontend-language program over a long document: one prefix, many questions, all of the language's verbs.

    python examples/frontend.py                              # starts a server of its own, and ends it
    python examples/frontend.py --url http://127.0.0.1:30000 # uses yours, for example of examples/serve.sh

Most of the document's KV lives outside the "GPU" budget of that server. The program cannot tell, and need not.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from contextlib import ExitStack

import sglang as sgl
from serving import Server

from sglang_inplacekv.models import long_text, prepare_smollm2

SERVER_FLAGS = [
    *("--attention-backend", "inplacekv", "--page-size", "64", "--inplacekv-gpu-memory", "512tok"),
    *("--inplacekv-host-memory", "500MB", "--max-running-requests", "4", "--context-length", "8192"),
]
QUESTIONS = ["What does `is` compare?", "What is garbage collection?", "What is a container?"]
SUBJECTS = ["cooking recipes", "objects, values and types", "weather forecasts"]
DIFFICULTY = r"[1-5] out of 5"


@sgl.function
def study(s, document: str):
    """Ask several questions about one document at once, then judge it."""
    s += sgl.user_begin() + document + "\n\n"
    forks = s.fork(len(QUESTIONS))  # each fork continues the same prefix: it is computed once
    for fork, question in zip(forks, QUESTIONS, strict=True):
        fork += question + sgl.user_end()
        fork += sgl.assistant(sgl.gen("answer", max_tokens=20, temperature=0))
    forks.join()
    s += "What is the text about, and how difficult is it?" + sgl.user_end()
    s += sgl.assistant_begin() + "The text is about " + sgl.select("subject", choices=SUBJECTS)
    s += (
        ". Its difficulty is "
        + sgl.gen("difficulty", regex=DIFFICULTY, temperature=0)
        + "."
        + sgl.assistant_end()
    )
    s["answers"] = [fork["answer"] for fork in forks]


@sgl.function
def ask(s, document: str, question: str):
    s += sgl.user(document + "\n\n" + question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=20, temperature=0))


def check(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"error: {what}")


def run(document: str) -> None:
    print(f"\n== fork, select, regex: a document of {len(document)} characters")
    state = study.run(document=document)
    for question, answer in zip(QUESTIONS, state["answers"], strict=True):
        print(f"   {question}  ->  {answer.strip()!r}")
        check(bool(answer.strip()), f"no answer to {question!r}")
    print(f"   about: {state['subject']}; difficulty: {state['difficulty']}")
    check(state["subject"] in SUBJECTS, f"select returned {state['subject']!r}")
    check(
        re.fullmatch(DIFFICULTY, state["difficulty"]) is not None, f"regex let {state['difficulty']!r} pass"
    )

    print("\n== run_batch: the same questions as separate programs")
    batch = ask.run_batch(
        [{"document": document, "question": question} for question in QUESTIONS], num_threads=len(QUESTIONS)
    )
    for question, single in zip(QUESTIONS, batch, strict=True):
        print(f"   {question}  ->  {single['answer'].strip()!r}")
        check(bool(single["answer"].strip()), f"no answer to {question!r} in the batch")

    print("\n== stream")
    streamed = ask.run(document=document, question=QUESTIONS[0], stream=True)
    pieces = []
    print("   ", end="")
    for piece in streamed.text_iter("answer"):
        pieces.append(piece)
        print(piece.replace("\n", " "), end="|", flush=True)
    print()
    check(len(pieces) > 1, f"the answer came in {len(pieces)} pieces")
    check("".join(pieces) == batch[0]["answer"], "the streamed answer differs from the one of run_batch")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="a running server; without it one is started on SmolLM2-135M")
    parser.add_argument(
        "--chars", type=int, default=5000, help="length of the document (default %(default)s)"
    )
    args = parser.parse_args()
    started = time.monotonic()
    with ExitStack() as stack:
        url = args.url
        if url is None:
            print("== starting a server (half a minute to a minute)", flush=True)
            url = stack.enter_context(Server(prepare_smollm2(), *SERVER_FLAGS)).url
        # SmolLM2 is a ChatML model. Without a name, SGLang guesses from the model's path.
        sgl.set_default_backend(sgl.RuntimeEndpoint(url, chat_template_name="chatml"))
        run(long_text(args.chars, topic="objects")[: args.chars])
    print(f"\n== done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
