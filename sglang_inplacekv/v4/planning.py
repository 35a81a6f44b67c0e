"""`inplacekv plan` of a DeepSeek-V4: the memory that its contexts take. No SGLang in here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cpu_attn
from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.models.deepseek_v4 import V4Geometry
from sglang_inplacekv.models.deepseek_v4.geometry import CSA_RATIO, STOCK_ARCHITECTURE
from sglang_inplacekv.planning import dtype_of, load_config, refused
from sglang_inplacekv.v4.layout import V4Layout, check_page_tokens

_END = 100  # signs of either end of a long message


def read_layout(folder: Path, page_tokens: int) -> V4Layout | None:
    """From the config.json of a checkpoint; None if it is of another architecture. ConfigError as planning.read_model."""
    config = load_config(folder / "config.json")
    names = config.get("architectures")
    if not isinstance(names, list) or STOCK_ARCHITECTURE not in names:
        return None
    geometry = _geometry(config)
    check_page_tokens(page_tokens)
    return V4Layout(geometry, dtype_of(config, config), page_tokens)


def _geometry(config: Mapping[str, Any]) -> V4Geometry:
    """ConfigError, too, for models that v4.settings.check and server_defaults refuse whatever the flags."""
    try:
        geometry = V4Geometry.from_config(config)
    except ValueError as error:
        raise ConfigError(f"--model: its config.json has {_bounded(str(error))}") from None
    if not geometry.layers_of(CSA_RATIO):
        raise refused(f"no CSA layer, of ratio {CSA_RATIO}", "one or more")
    if not cpu_attn.supports_latent(geometry.head_dim, 0):
        raise refused(f"head_dim {geometry.head_dim}", cpu_attn.LATENT_WIDTHS)
    return geometry


def _bounded(text: str) -> str:
    """On one line: the geometry's messages quote a config as it is. Both ends stay, since the latter says what is possible."""
    line = "".join(sign if sign.isprintable() else " " for sign in text)
    return line if len(line) <= 2 * _END else f"{line[:_END]} ... {line[-_END:]}"


def plan_lines(
    layout: V4Layout, batches: Sequence[int], contexts: Sequence[int], device_bytes: int
) -> Iterator[str]:
    """device_bytes: of D homes alone, as for every model."""
    geometry, page_bytes = layout.geometry, layout.shape.page_bytes
    window_layers = geometry.layers - len(layout.csa_layers) - len(layout.hca_layers)
    entries, kept = (nbytes / layout.page_tokens / 1024 for nbytes in (page_bytes, layout.kept_page_bytes))
    yield (
        f"{len(layout.csa_layers)} CSA, {len(layout.hca_layers)} HCA and {window_layers} window layers, "
        f"{str(layout.dtype).removeprefix('torch.')}, pages of {layout.page_tokens} tokens"
    )
    yield f"a token: {entries:.2f} KiB of CSA entries, in D or host memory"
    yield f"         {kept:.2f} KiB of index keys and HCA entries, kept on the GPU"
    yield f"a request: {layout.request_bytes / 1e6:.2f} MB of windows and journals, on the GPU"
    yield f"a tail record of the prefix cache: {layout.record_bytes / 1e6:.2f} MB of host memory"
    yield f"{'batch x context':>20} {'host GB':>9} {'D GB':>9} {'kept GB':>9} {'requests GB':>12}"
    for batch in batches:
        for context in contexts:
            pages = batch * -(-context // layout.page_tokens)
            resident = min(pages, device_bytes // page_bytes)
            amounts = (
                (pages - resident) * page_bytes,
                resident * page_bytes,
                pages * layout.kept_page_bytes,
                batch * layout.request_bytes,
            )
            host, device, kept, requests = (nbytes / 1e9 for nbytes in amounts)
            yield f"{f'{batch} x {context}':>20} {host:9.2f} {device:9.2f} {kept:9.2f} {requests:12.3f}"
    yield (
        f"A query attends {geometry.index_topk} of a CSA layer's entries, of which there is one in {CSA_RATIO} tokens. What a "
        "step takes depends on which, and is not foretold."
    )
