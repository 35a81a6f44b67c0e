"""`python -m sglang_inplacekv.launch_server`: sglang.launch_server, after checking that the plugin is live."""

from __future__ import annotations

import runpy
import sys

from sglang_inplacekv import compat
from sglang_inplacekv.config import ConfigError


def main() -> None:
    try:
        compat.check_sglang_version()
    except RuntimeError as error:
        sys.exit(f"error: {error}")

    from sglang.srt.plugins import load_plugins

    from sglang_inplacekv import hooks

    load_plugins()
    try:
        hooks.verify()
    except ConfigError as error:
        sys.exit(f"error: {error}")
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
