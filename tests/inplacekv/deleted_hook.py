"""Start a scheduler in processes where the plugin lost one hook each, and print what each start said.

    python -m tests.inplacekv.deleted_hook MODEL

One process imports SGLang, which takes most of the time; each case is a fork of it, before any plugin is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys

from sglang_inplacekv import compat, hooks
from tests.harness import Runner

BUDGETS = {"SGLANG_INPLACEKV_GPU_MEMORY": "64tok", "SGLANG_INPLACEKV_HOST_MEMORY": "4MB"}


def outcome(model: str) -> str:
    try:
        with Runner(
            model,
            backend="inplacekv",
            load_format="dummy",
            max_running_requests=2,
            env=BUDGETS,
        ) as runner:
            return f"started with {type(runner.kv_pool).__name__}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def delete(target: str) -> None:
    hooks.HOOKS = tuple(hook for hook in hooks.HOOKS if hook.target != target)


def misspell(target: str) -> None:
    """As after a change in SGLang: the hook is declared, its target no longer exists."""
    hooks.HOOKS = tuple(
        dataclasses.replace(hook, target=target + "_gone") if hook.target == target else hook
        for hook in hooks.HOOKS
    )


def pretend_version(found: str) -> None:
    compat.version = lambda name: found


def load_only(plugin: str) -> None:
    os.environ["SGLANG_PLUGINS"] = plugin


def main(model: str) -> None:
    targets = [hook.target for hook in hooks.HOOKS]
    cases = [(delete, target) for target in targets]
    cases += [
        (misspell, targets[0]),
        (pretend_version, "0.5.22"),
        (load_only, "another"),
        (load_only, "inplacekv"),
    ]
    for change, subject in cases:
        child = os.fork()  # not multiprocessing: its children count as SGLang's scheduler process
        if child == 0:
            try:
                change(subject)
                print(json.dumps((change.__name__, subject, outcome(model))), flush=True)
            finally:
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1])
