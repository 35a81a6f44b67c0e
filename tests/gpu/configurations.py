"""The servers that are compared: stock SGLang's, and ours at several shares and with planted faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import AutoConfig

from tests.gpu.recording import Recording, record
from tests.gpu.workload import Workload, WorkloadSize, make_workload
from tests.harness import Runner
from tests.inplacekv.exactness.support import watch

OURS = "ours"
SHARES = (0.0, 0.4, 1.0)
FAULT_SHARE = 0.4  # both host regions are in use
FAULTS = (("lost", "C"), ("repeated", "T"))
_FIELDS = {"C": "compute_pages", "T": "transfer_pages"}
_HOST_SLACK = 1.25  # chunks that the other role holds


@dataclass(frozen=True)
class Profile:
    """What all configurations of one comparison have in common. `dummy_std=None` loads the checkpoint's weights."""

    model: Path
    size: WorkloadSize = field(default_factory=WorkloadSize)
    layers: int | None = None  # None: as the model's configuration says
    dtype: str = "bfloat16"
    page_size: int = 256  # ours; stock's is 1
    chunk_tokens: int = 8192
    device_tokens: int = 1024  # D homes: most tokens have host homes
    # Share of the requests that are run with a fault, the shortest: a page more or less is most of a short context, and
    # little of a long one.
    faulty_requests: float = 0.25
    dummy_std: float | None = 0.02
    seed: int = 0
    env: dict[str, str] = field(default_factory=dict)

    def workload(self) -> Workload:
        return make_workload(self._config().vocab_size, self.size, self.seed)

    def _config(self):
        return AutoConfig.from_pretrained(self.model)

    def kv_bytes_per_token(self) -> int:
        config = self._config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers = self.layers or config.num_hidden_layers
        return 2 * layers * config.num_key_value_heads * head_dim * getattr(torch, self.dtype).itemsize

    def _runner(self, **settings) -> Runner:
        if self.layers is not None:
            settings["json_model_override_args"] = f'{{"num_hidden_layers": {self.layers}}}'
        return Runner(
            self.model,
            dtype=self.dtype,
            chunked_prefill_size=self.chunk_tokens,
            max_running_requests=self.size.requests,
            # One request in a prefill batch: else what fits into one depends on the page size.
            prefill_max_requests=1,
            dummy_std=self.dummy_std,
            dummy_seed=self.seed,
            **settings,
        )

    def stock(self, backend: str) -> Runner:
        capacity = self.workload().tokens_needed(self.page_size)
        return self._runner(backend=backend, page_size=1, max_total_tokens=capacity)

    def ours(self) -> Runner:
        """All share one started server: `regions.scope.target_share` says where new pages go."""
        host_bytes = int(
            self.workload().tokens_needed(self.page_size) * self.kv_bytes_per_token() * _HOST_SLACK
        )
        env = {
            "SGLANG_INPLACEKV_HOST_MEMORY": str(host_bytes),
            "SGLANG_INPLACEKV_GPU_MEMORY": f"{self.device_tokens}tok",
            "SGLANG_INPLACEKV_CPU_SHARE": str(SHARES[0]),
        } | self.env
        return self._runner(backend="inplacekv", page_size=self.page_size, max_total_tokens=None, env=env)


def share_name(share: float) -> str:
    return f"{OURS}-{share:g}"


def fault_name(fault: str, region: str) -> str:
    return f"{share_name(FAULT_SHARE)}-{region}-{fault}"


FAULT_NAMES = tuple(fault_name(*fault) for fault in FAULTS)
SHARE_NAMES = tuple(map(share_name, SHARES))


def recordings(profile: Profile, config: str) -> Iterator[tuple[str, Recording]]:
    """Start `config`, a stock backend's name or OURS, and yield what it predicts, by name."""
    workload = profile.workload()
    if config != OURS:
        with profile.stock(config) as runner:
            yield config, record(runner, workload)
        return
    with profile.ours() as runner:
        for share in SHARES:
            yield share_name(share), _at_share(runner, workload, share)
        for fault, region in FAULTS:
            with misread_page(runner, fault, region):
                faulty = _at_share(runner, workload.shortest(profile.faulty_requests), FAULT_SHARE)
            yield fault_name(fault, region), faulty


def _at_share(runner: Runner, workload: Workload, share: float) -> Recording:
    runner.kv_pool.regions.scope.target_share = share
    traffic = watch(runner)
    recording = record(runner, workload)
    recording.decode_reads = dict(traffic.decode)
    return recording


@contextmanager
def misread_page(runner: Runner, fault: str, region: str) -> Iterator[None]:
    """In every decode step each request loses its first page in `region`, or has it twice. The KV itself stays right."""
    planner, name, planted = runner.kv_pool.planner, _FIELDS[region], 0
    build = planner.build

    def faulty(*args, **kwargs):
        nonlocal planted
        plan = build(*args, **kwargs)
        for reads in plan.reads if plan.is_decode else ():
            pages = getattr(reads, name)
            if len(pages) > 1:
                setattr(reads, name, pages[1:] if fault == "lost" else np.concatenate((pages[:1], pages)))
                planted += 1
        return plan

    with mock.patch.object(planner, "build", faulty):
        yield
    if not planted:
        raise RuntimeError(f"no request had two pages in {region}: nothing was {fault}")
