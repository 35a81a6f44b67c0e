"""`inplacekv plan`: what contexts would cost here. `inplacekv doctor`: what this host has, what it lacks, what to set.
`inplacekv trace`: a picture of what a server did.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

import cpu_attn
from sglang_inplacekv.config import ConfigError, parse_bytes
from sglang_inplacekv.cores import make_team
from sglang_inplacekv.doctor import examine
from sglang_inplacekv.planning import ModelKV, Prediction, predict, read_model, with_rest
from sglang_inplacekv.probes import LinkError, host_rates
from sglang_inplacekv.roofline import Line, break_even_tokens
from sglang_inplacekv.trace import is_trace, read_trace
from sglang_inplacekv.trace_plot import summary, trace_svg
from sglang_inplacekv.v4.planning import plan_lines, read_layout

_PAGE_SIZES, _COUNTS, _RATES = (2, 65536), (1, 10**9), (1e-3, 1e6)
_INTERRUPTED = 130  # as a shell reports it

# What a command prints, whole, and its exit code.
Answer = tuple[list[str], int]


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. 0, 1 if the doctor finds something missing, 2 on bad input or where nothing can be printed."""
    try:
        arguments = _parser().parse_args(argv)
        lines, code = arguments.run(arguments)
        _print(lines)
        return code
    except (ConfigError, OSError) as error:
        _complain(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED


def _complain(text: str) -> None:
    if sys.stderr is not None:  # else print would take standard output
        print(text, file=sys.stderr)


def _print(lines: Sequence[str]) -> None:
    """To standard output, if there is one. ConfigError where it cannot be written; that its reader has gone is no error."""
    out = sys.stdout
    if out is None:
        return
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")  # names of files may hold what it cannot encode
    try:
        for line in lines:
            print(line, file=out)
        out.flush()
    except OSError as error:
        # Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        if not isinstance(error, BrokenPipeError):
            raise ConfigError(f"standard output cannot be written: {error.strerror}") from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.prog} --help tells what is possible")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="inplacekv", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="plan|doctor|trace")
    plan = commands.add_parser(
        "plan", help="memory, share and decode time of contexts of a model", allow_abbrev=False
    )
    plan.set_defaults(run=_plan)
    plan.add_argument("--model", type=Path, required=True, help="folder with a config.json")
    plan.add_argument("--context", default="8192,32768,131072", help="tokens (default %(default)s)")
    plan.add_argument("--batch", default="1,4,16,32", help="requests (default %(default)s)")
    plan.add_argument("--page-size", default="256")
    plan.add_argument("--gpu-memory", default="0B", metavar="SIZE", help="of D homes alone, as 4GB")
    plan.add_argument("--cpu-gbps", help="KV that CPU attention reads a second beside copies; else measured")
    plan.add_argument(
        "--link-gbps", help="to the GPU, beside CPU attention; else measured, if there is a GPU"
    )
    plan.add_argument("--step-ms", help="a step with all KV in GPU memory (default 0)")
    doctor = commands.add_parser("doctor", help="what this host has and what it lacks", allow_abbrev=False)
    doctor.set_defaults(run=_doctor)
    for measuring in (plan, doctor):
        measuring.add_argument(
            "--redo-probes", action="store_true", help="measure again what an earlier run has kept"
        )
    trace = commands.add_parser(
        "trace", help="plot what a server with --inplacekv-trace FILE did", allow_abbrev=False
    )
    trace.set_defaults(run=_trace)
    trace.add_argument("file", type=Path, metavar="FILE")
    trace.add_argument("--out", type=Path, default=Path("trace.svg"), help="default %(default)s")
    return parser


def _number(option: str, text: str, least: float, most: float, kind: type = float):
    try:
        value = kind(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        word = "whole number" if kind is int else "number"
        raise ConfigError(
            f"{option}: asked {text[:40]!r}, possible is a {word} from {least:.10g} to {most:.10g}"
        )
    return value


def _numbers(option: str, text: str) -> list[int]:
    return [_number(option, part, *_COUNTS, int) for part in text.split(",")]


def _plan(arguments: argparse.Namespace) -> Answer:
    batches = _numbers("--batch", arguments.batch)
    contexts = _numbers("--context", arguments.context)
    rest_s = _number("--step-ms", "0" if arguments.step_ms is None else arguments.step_ms, 0, 1e6) / 1e3
    device_bytes = parse_bytes("--gpu-memory", arguments.gpu_memory)
    page_size = _number("--page-size", arguments.page_size, *_PAGE_SIZES, int)
    v4 = read_layout(arguments.model, page_size)
    if v4 is not None:
        _refuse_rates(arguments)
        return list(plan_lines(v4, batches, contexts, device_bytes)), 0
    model = read_model(arguments.model, page_size)
    cpu, transfer, note = _lines(model, arguments)
    pays_from = break_even_tokens(with_rest(cpu, rest_s, model), transfer)
    lines = [
        f"{model.shape.token_bytes / 1024:.1f} KiB of KV a token ({str(model.shape.dtype).removeprefix('torch.')}), "
        f"{model.shape.layers} layers; CPU attention {model.layer_token_bytes / cpu.token_s / 1e9:.1f} GB/s and "
        f"{cpu.fixed_s * 1e6:.0f} us a layer, link {model.layer_token_bytes / transfer.token_s / 1e9:.1f} GB/s; the CPU "
        f"pays from {pays_from:.0f} host tokens a step",
        f"{'batch x context':>20} {'host GB':>9} {'share':>6} {'step ms':>9} {'tokens/s':>9}  over transfer, CPU",
    ]
    for batch in batches:
        for context in contexts:
            lines.append(_row(predict(model, cpu, transfer, batch, context, device_bytes, rest_s)))
    return [*lines, note], 0


def _refuse_rates(arguments: argparse.Namespace) -> None:
    """A DeepSeek-V4's plan is of memory alone."""
    given = {
        "--cpu-gbps": arguments.cpu_gbps,
        "--link-gbps": arguments.link_gbps,
        "--step-ms": arguments.step_ms,
        "--redo-probes": arguments.redo_probes or None,
    }
    for option, value in given.items():
        if value is not None:
            raise ConfigError(f"{option}: possible with a DeepSeek-V4 is none: its plan is of memory alone")


def _row(found: Prediction) -> str:
    shape = f"{found.batch} x {found.context}"
    gains = [
        f"{other / found.step_s:.2f}" if found.step_s else "-" for other in (found.transfer_s, found.cpu_s)
    ]
    rate = f"{found.tokens_per_s:.1f}" if found.step_s else "-"
    return (
        f"{shape:>20} {found.host_bytes / 1e9:9.2f} {found.share:6.2f} {found.step_s * 1e3:9.2f} {rate:>9}"
        f"  {', '.join(gains)}"
    )


def _lines(model: ModelKV, arguments: argparse.Namespace) -> tuple[Line, Line, str]:
    """Of CPU and transfer, for a layer: as given, and measured where they are not; and which is which."""
    given = {
        option: None if text is None else _number(option, text, *_RATES) * 1e9
        for option, text in (("--cpu-gbps", arguments.cpu_gbps), ("--link-gbps", arguments.link_gbps))
    }
    cpu_rate, link_rate = given.values()
    has_gpu = torch.cuda.is_available()
    if None not in (cpu_rate, link_rate) and arguments.redo_probes:
        raise ConfigError("--redo-probes: possible is none beside both rates, since nothing is measured then")
    note = _note(cpu_rate is not None, link_rate is not None, has_gpu)
    if link_rate is None and not has_gpu:
        raise ConfigError(
            "--link-gbps: unset, and this host has no GPU to measure: possible is a rate such as 50"
        )
    device = "cuda" if has_gpu else "cpu"
    try:
        if cpu_rate is not None and link_rate is not None:
            with make_team(None, device) as team:
                fixed_s = cpu_attn.hand_over_seconds(team)
        else:
            rates = host_rates(model, device, redo=arguments.redo_probes)
            if rates.kept:
                note += " Kept from an earlier run; --redo-probes measures anew."
            # A rate that is given says all there is about attention.
            fixed_s = rates.cpu_line.fixed_s if cpu_rate is None else rates.team.hand_over_s
            cpu_rate = cpu_rate or model.layer_token_bytes / rates.cpu_line.token_s
            link_rate = link_rate or model.layer_token_bytes / rates.link_line(model).token_s
    except LinkError as error:
        raise ConfigError(f"the link to the GPU cannot be measured: {error}") from error
    except RuntimeError as error:  # no library, or one of another version
        raise ConfigError(f"CPU attention does not run here: {error}") from error
    cpu, transfer = (model.layer_token_bytes / rate for rate in (cpu_rate, link_rate))
    return Line(fixed_s, cpu), Line(0.0, transfer), note


def _note(cpu_given: bool, link_given: bool, has_gpu: bool) -> str:
    if cpu_given and link_given:
        return "Rates as given, of both sides at once."
    if not cpu_given and not link_given:
        return "Rates as measured here, of both sides at once."
    if cpu_given:
        return "The CPU's rate as given, the link's as measured here beside CPU attention."
    if has_gpu:
        return "The link's rate as given, the CPU's as measured here beside copies to the GPU."
    return (
        "The link's rate as given, the CPU's as measured here with nothing beside it: where they share memory bandwidth a step "
        "takes longer."
    )


def _doctor(arguments: argparse.Namespace) -> Answer:
    findings, lines = examine(redo=arguments.redo_probes), []
    for finding in findings:
        lines.append(f"{'ok  ' if finding.advice is None else 'LOOK'} {finding.what}: {finding.found}")
        if finding.advice is not None:
            lines.append(f"     {finding.advice}")
    return lines, int(any(finding.advice is not None for finding in findings))


def _trace(arguments: argparse.Namespace) -> Answer:
    steps, note = read_trace(arguments.file)
    if note is not None:
        _complain(f"note: {note}")
    out: Path = arguments.out
    try:
        if out.is_file() and is_trace(out):
            what = "the trace itself" if out.samefile(arguments.file) else "a trace"
            raise ConfigError(f"--out: asked {str(out)!r}, which is {what}")
        out.write_text(trace_svg(steps), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}") from error
    return [summary(steps), f"plotted in {out}"], 0


if __name__ == "__main__":
    raise SystemExit(main())
