"""`python -m sglang.launch_server` where the plugin lost one hook: WITHOUT_HOOK names its target.

At module level, because SGLang's spawned processes import the main module again, under another name.
"""

from __future__ import annotations

import os
import runpy

from sglang_inplacekv import hooks

hooks.HOOKS = tuple(hook for hook in hooks.HOOKS if hook.target != os.environ["WITHOUT_HOOK"])

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
