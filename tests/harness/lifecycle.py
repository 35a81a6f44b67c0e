"""One live SGLang configuration per process: publish it, and undo everything afterwards."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import sglang.srt.managers.scheduler as scheduler_module
import torch
from sglang.srt.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
)
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
from sglang.srt.server_args import PortArgs, ServerArgs

from sglang_inplacekv import cpu_host

from .in_process import InProcessScheduler
from .mla_reference import BACKEND, mla_reference

_live: list[str] = []


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables, and restore them all: resolving ServerArgs writes some of its own."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    """On a busy machine, OpenMP's spinning barriers make a tiny model up to 50 times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def forced_retraction(every: int | None) -> Iterator[None]:
    """SGLANG_TEST_RETRACT is read when the scheduler is imported, too early for a test."""
    if every is None:
        yield
        return
    with mock.patch.multiple(scheduler_module, TEST_RETRACT=True, TEST_RETRACT_INTERVAL=every):
        yield


@contextmanager
def live_scheduler(args: dict) -> Iterator[InProcessScheduler]:
    if _live:
        raise RuntimeError(f"SGLang holds one configuration per process; live: {_live[0]}")
    _live.append(str(args))
    try:
        load_plugins()
        if cpu_host.is_cpu_host():
            cpu_host.apply()
        # After the plugins, whose hooks would otherwise be undone with it.
        reference = mla_reference() if args["attention_backend"] == BACKEND else nullcontext()
        with reference, tempfile.TemporaryDirectory() as folder, _file_rendezvous(folder):
            server_args = ServerArgs(**args)
            publish(
                server_args,
                role="scheduler",
                ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0),
            )
            yield InProcessScheduler(server_args, _no_ports())
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()
        reset_context()
        _live.clear()
        _collect()


def _collect() -> None:
    gc.collect()
    # The imported modules alone take half a second to walk; the first call puts them aside.
    if not gc.get_freeze_count():
        gc.freeze()
    if torch.cuda.is_initialized():
        # The next server sizes its pools by what the driver says is free.
        torch.cuda.empty_cache()


def _file_rendezvous(folder: str):
    """A port could be taken by another process between the probe and the bind."""
    return environment({"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{folder}/rendezvous"})


def _no_ports() -> PortArgs:
    return PortArgs(
        tokenizer_ipc_name="",
        scheduler_input_ipc_name="",
        detokenizer_ipc_name="",
        nccl_port=0,
        rpc_ipc_name="",
        metrics_ipc_name="",
        tokenizer_worker_ipc_name=None,
        decoupled_spec_ipc_config=None,
    )
