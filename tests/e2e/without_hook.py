"""`python -m sglang.launch_server` where the plugin lost one hook: WITHOUT_HOOK names its target.

Deleted at module level, because SGLang's spawned processes import the main module again, under another name.
"""

from __future__ import annotations

import os
import sys

from sglang_inplacekv import hooks

hooks.HOOKS = tuple(hook for hook in hooks.HOOKS if hook.target != os.environ["WITHOUT_HOOK"])

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
