"""The servers that are compared, stock SGLang's and ours, and what they predict, with planted faults too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

import numpy as np

from tests.gpu.configurations import Fault, Profile, share_name
from tests.gpu.recording import Recording, record
from tests.gpu.workload import Workload
from tests.harness import Runner
from tests.inplacekv.exactness.support import watch

_FIELDS = {"C": "compute_pages", "T": "transfer_pages"}
_HOST_SLACK = 1.25  # chunks that the other role holds


def stock(backend: str, profiles: Iterable[Profile]) -> Runner:
    """Has room for the workload of each of `profiles`, which differ in their workloads and our settings alone."""
    profiles = list(profiles)
    return _runner(
        profiles[0],
        backend=backend,
        page_size=1,
        max_total_tokens=max(profile.tokens_needed() for profile in profiles),
        max_running_requests=max(profile.size.requests for profile in profiles),
    )


def ours(profile: Profile) -> Runner:
    """One server for all shares: `regions.scope.target_share` says where new pages go."""
    host_bytes = int(profile.tokens_needed() * profile.kv_bytes_per_token() * _HOST_SLACK)
    env = {
        "SGLANG_INPLACEKV_HOST_MEMORY": str(host_bytes),
        "SGLANG_INPLACEKV_GPU_MEMORY": f"{profile.device_tokens}tok",
        "SGLANG_INPLACEKV_CPU_SHARE": str(profile.shares[0]),
        "SGLANG_INPLACEKV_ADMISSION": "spill",
    } | profile.env
    return _runner(
        profile,
        backend="inplacekv",
        page_size=profile.page_size,
        max_total_tokens=None,
        max_running_requests=profile.size.requests,
        env=env,
    )


def _runner(profile: Profile, **settings) -> Runner:
    if profile.layers is not None:
        settings["json_model_override_args"] = f'{{"num_hidden_layers": {profile.layers}}}'
    return Runner(
        profile.model,
        dtype=profile.dtype,
        chunked_prefill_size=profile.chunk_tokens,
        # One request in a prefill batch: else what fits into one depends on the page size.
        prefill_max_requests=1,
        dummy_std=profile.dummy_std,
        dummy_seed=profile.seed,
        **settings,
    )


def recordings(parts: Mapping[str, Profile], config: str) -> Iterator[tuple[str, str, Recording]]:
    """Start `config`, one of `parts` or a stock backend, and yield what it predicts: (part, name, recording)."""
    if config not in parts:
        with stock(config, parts.values()) as runner:
            for part, profile in parts.items():
                yield part, config, record(runner, profile.workload())
        return
    profile, workload = parts[config], parts[config].workload()
    with ours(profile) as runner:
        for share in profile.shares:
            yield config, share_name(share), at_share(runner, workload, share)
        for fault in profile.faults:
            with misread_page(runner, fault):
                faulty = at_share(runner, workload, fault.share)
            yield config, fault.name, faulty


def record_here(parts: Mapping[str, Profile], configs: Sequence[str]) -> dict[str, dict[str, Recording]]:
    """All of `recordings`, by part and name, in this process."""
    recorded: dict[str, dict[str, Recording]] = {part: {} for part in parts}
    for config in configs:
        for part, name, recording in recordings(parts, config):
            recorded[part][name] = recording
    return recorded


def at_share(runner: Runner, workload: Workload, share: float) -> Recording:
    runner.kv_pool.regions.scope.target_share = share
    traffic = watch(runner)
    recording = record(runner, workload)
    recording.decode_reads = dict(traffic.decode)
    return recording


@contextmanager
def misread_page(runner: Runner, fault: Fault) -> Iterator[None]:
    """In every decode step each request loses its first page in the region, or has it twice. The KV itself stays right.

    RuntimeError at the end unless each had two pages there each time. A page that is still in its window does not count.
    """
    planner, name = runner.kv_pool.planner, _FIELDS[fault.region]
    planted: list[bool] = []
    build = planner.build

    def faulty(*args, **kwargs):
        plan = build(*args, **kwargs)
        for reads in plan.reads if plan.is_decode else ():
            pages = getattr(reads, name)
            planted.append(len(pages) > 1)
            if planted[-1]:
                misread = pages[1:] if fault.kind == "lost" else np.concatenate((pages[:1], pages))
                setattr(reads, name, misread)
        return plan

    with mock.patch.object(planner, "build", faulty):
        yield
    if not planted or not all(planted):
        raise RuntimeError(
            f"{fault.name}: only {sum(planted)} of {len(planted)} decoded tokens had two pages in {fault.region}"
        )
