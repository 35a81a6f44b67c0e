"""Make a checkpoint from the command line: ``python -m sglang_inplacekv.models KIND [OUT]``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from . import RELEASED_KINDS, TINY_KINDS, checkpoint_path, make_tiny, prepare_smollm2, write_config

SMOLLM2 = "smollm2"


def main(argv: list[str] | None = None) -> int:
    """Make one checkpoint, or the configuration alone of a released model, and print its path."""
    parser = argparse.ArgumentParser(prog="python -m sglang_inplacekv.models", description=main.__doc__)
    kinds = [*TINY_KINDS, SMOLLM2, *RELEASED_KINDS]
    parser.add_argument("kind", choices=kinds, metavar="KIND", help="one of: %(choices)s")
    out_help = "directory (default: in the model cache)"
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT", help=out_help)
    layers_help = f"fewer layers than released ({', '.join(RELEASED_KINDS)})"
    parser.add_argument("--layers", type=int, metavar="N", help=layers_help)
    args = parser.parse_args(argv)
    if args.layers is not None and args.kind not in RELEASED_KINDS:
        parser.error(f"--layers: possible with {', '.join(RELEASED_KINDS)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        print(_made(args))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _made(args: argparse.Namespace) -> Path:
    if args.kind == SMOLLM2:
        return prepare_smollm2(args.out)
    if args.kind in RELEASED_KINDS:
        suffix = "" if args.layers is None else f"-{args.layers}-layers"
        return write_config(args.kind, args.out or checkpoint_path(args.kind + suffix), layers=args.layers)
    return make_tiny(args.kind, args.out or checkpoint_path(f"tiny-{args.kind}"))


if __name__ == "__main__":
    raise SystemExit(main())
