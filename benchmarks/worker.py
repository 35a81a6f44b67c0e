"""One server configuration in a process of its own: `python -m benchmarks.worker`, called by benchmarks.gpu."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import torch

from .environment import environment
from .results import Budget, Part, write_json
from .scale import FULL, QUICK, Scale
from .servers import HOST_MEMORY_BYTES, HOST_RESERVE_BYTES, NONE, OURS, ServerSetting, by_name


@dataclass(frozen=True)
class Context:
    """What a benchmark's `run` gets. `server` is None where no model is needed."""

    setting: ServerSetting
    server: object
    scale: Scale
    part: Part
    out: Path


def main() -> None:
    arguments = parse()
    setting = by_name(arguments.server)
    budget = Budget(arguments.budget_s)
    scale = QUICK if arguments.quick else FULL
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    write_json(arguments.out / f"environment-{setting.name}.json", environment())
    began_s = time.monotonic()
    with opened(fitted(setting), arguments.out, arguments.layers, scale) as server:
        print(f"{setting.name}: ready after {time.monotonic() - began_s:.0f} s", flush=True)
        for name in arguments.benchmarks:
            path = arguments.out / "parts" / f"{name}.{setting.name}.json"
            part = Part(path, name, setting.name, setting.side, budget)
            run_benchmark(Context(setting, server, scale, part, arguments.out))
        sys.stdout.flush()
        sys.stderr.flush()
        # The system takes 100 GB of pinned memory back faster than an orderly end would.
        os._exit(0)


def run_benchmark(context: Context) -> None:
    """Errors outside of a benchmark's own attempts end this benchmark only."""
    module = import_module(f"benchmarks.cases.{context.part.benchmark}")
    context.part.attempt("benchmark", lambda: module.run(context))
    context.part.finished = True
    context.part.save()


@contextmanager
def opened(setting: ServerSetting, out: Path, layers: int | None, scale: Scale) -> Iterator[object]:
    """The setting's Server, warm; None where it has no model."""
    if setting.side == NONE:
        # As SGLang does on a GPU: torch's own threads would spin on the team's cores.
        torch.set_num_threads(1)
        yield None
        return
    from tests.harness import Runner

    from .model import model_folder
    from .server import Server

    shapes = (*scale.fits, *scale.sweep, scale.million, scale.timeline, *scale.share.served_shapes)
    longest_tokens = max(scale.long_tokens, *scale.prefill_tokens, *(shape.context for shape in shapes))
    with Runner(model_folder(out, layers, setting.kind), env=setting.env, **setting.arguments) as runner:
        server = Server(runner, longest_tokens)
        server.warm_up(max(scale.prefill_tokens[0], scale.fits[0].context))
        yield server


def fitted(setting: ServerSetting) -> ServerSetting:
    """With no more host memory than there is: the largest setting takes nearly all of it."""
    asked = setting.env.get("SGLANG_INPLACEKV_HOST_MEMORY")
    if setting.side != OURS or asked != f"{HOST_MEMORY_BYTES}B":
        return setting
    from sglang_inplacekv.arena import host_memory_available

    possible = host_memory_available() - HOST_RESERVE_BYTES
    if possible >= HOST_MEMORY_BYTES:
        return setting
    print(f"{setting.name}: host memory {possible} bytes instead of {HOST_MEMORY_BYTES}", flush=True)
    return replace(setting, env=setting.env | {"SGLANG_INPLACEKV_HOST_MEMORY": f"{possible}B"})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True)
    parser.add_argument("--benchmarks", required=True, type=lambda text: text.split(","))
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--budget-s", required=True, type=float)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
