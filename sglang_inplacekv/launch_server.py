"""`python -m sglang_inplacekv.launch_server`: sglang.launch_server, after checking that the plugin is live."""

from __future__ import annotations

import runpy


def main() -> None:
    from sglang.srt.plugins import load_plugins

    from sglang_inplacekv import hooks

    load_plugins()
    hooks.verify()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
