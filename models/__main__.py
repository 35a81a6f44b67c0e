"""Make a checkpoint from the command line: ``python -m sglang_inplacekv.models KIND [OUT]``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from . import TINY_KINDS, checkpoint_path, make_tiny, prepare_smollm2

SMOLLM2 = "smollm2"


def main(argv: list[str] | None = None) -> int:
    """Make one checkpoint and print its path."""
    parser = argparse.ArgumentParser(prog="python -m sglang_inplacekv.models", description=main.__doc__)
    parser.add_argument("kind", choices=[*TINY_KINDS, SMOLLM2], metavar="KIND", help="one of: %(choices)s")
    out_help = "directory (default: in the model cache)"
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT", help=out_help)
    args = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.kind == SMOLLM2:
        path = prepare_smollm2(args.out)
    else:
        path = make_tiny(args.kind, args.out or checkpoint_path(f"tiny-{args.kind}"))
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
