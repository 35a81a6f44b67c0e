"""What the benchmark of a CSA layer came to: policies beside everything on the GPU, and the whole model at the longest one."""

from __future__ import annotations

from .results import rows_of
from .tables import markdown, ratio

ALL_ON_GPU, FETCH, COMPUTE, SPLIT = "all on the GPU", "fetch", "compute", "split"
HCA, WINDOW, PREDICTED = "HCA layer", "window layer", "predicted share"
# DeepSeek-V4-Flash's layers by kind: ratios 0, 0, twenty times 4, 128, and 4.
CSA_LAYERS, HCA_LAYERS, WINDOW_LAYERS = 21, 20, 2
_PACKED = ", packed"


def csa_layer(parts: dict[str, list[dict]]) -> str:
    rows = rows_of(parts["csa_layer"])
    layers = [row for row in rows if "hit_rate" in row]
    text = [_table(layers, rows), _estimate(layers, rows)]
    return "\n\n".join(block for block in text if block)


def _format(row: dict) -> str:
    return _PACKED if row["what"].endswith(_PACKED) else ""


def _base_of(layers: list[dict], row: dict) -> dict | None:
    """Everything on the GPU, in the same case."""
    for other in layers:
        same = (other["case"], other["tokens"]) == (row["case"], row["tokens"])
        if same and other["what"] == ALL_ON_GPU + _format(row):
            return other
    return None


def _table(layers: list[dict], rows: list[dict]) -> str:
    stages = list(dict.fromkeys(name for row in layers for name in row["stage_us"]))
    table = []
    for row in layers:
        base = _base_of(layers, row)
        table.append(
            (
                row["tokens"], row["case"], row["what"], row["share"], row["step_us"],
                ratio(row["step_us"], base["step_us"]) if base else None,
                *(row["stage_us"].get(name) for name in stages), row["cpu_us"] or None,
                row["hit_rate"], row["missed"], row["computed"], row["to_device_bytes"] / 1024,
                row["to_host_bytes"] / 1024, f"{row['error']:.1e}",
            )
        )  # fmt: skip
    columns = (
        "tokens", "case", "policy", "CPU share", "us a step", "of all on the GPU", *(f"{name}, us" for name in stages),
        "CPU team, us", "hit rate", "missed", "of these computed", "KiB to the device", "KiB to the host",
        "output differs by",
    )  # fmt: skip
    predicted = [row for row in rows if row["what"] == PREDICTED]
    told = [f"{row['tokens']} tokens, {row['case']}: {row['predicted']}" for row in predicted]
    text = markdown(columns, table)
    return f"{text}\n\nPredicted share: {'; '.join(told)}." if told else text


def _estimate(layers: list[dict], rows: list[dict]) -> str:
    """All layers of the longest context, one request, the first walk; empty where one kind of layer was not measured."""
    others = {row["what"]: row for row in rows if row["what"].startswith((HCA, WINDOW))}
    tokens = max((row["tokens"] for row in others.values()), default=0)
    alone = [row for row in layers if row["tokens"] == tokens and row["batch"] == 1]
    if not alone:
        return ""
    table = []
    for row in (row for row in alone if row["case"] == alone[0]["case"]):
        base, own = _base_of(layers, row), _format(row)
        if HCA + own not in others or WINDOW + own not in others:
            continue
        hca, window = others[HCA + own], others[WINDOW + own]
        besides_ms = (HCA_LAYERS * hca["step_us"].median + WINDOW_LAYERS * window["step_us"].median) / 1e3
        csa_ms = row["step_us"].map(lambda us: us * CSA_LAYERS / 1e3)
        total_ms = csa_ms.map(lambda ms, more=besides_ms: ms + more)
        base_ms = (
            base["step_us"].map(lambda us, more=besides_ms: us * CSA_LAYERS / 1e3 + more) if base else None
        )
        held = CSA_LAYERS * row["device_bytes"] + HCA_LAYERS * hca["device_bytes"]
        held += WINDOW_LAYERS * window["device_bytes"]
        table.append(
            (row["what"], row["share"], csa_ms, besides_ms, total_ms, ratio(total_ms, base_ms) if base_ms else None,
             held / 2**30)
        )  # fmt: skip
    columns = (
        "policy", "CPU share", f"{CSA_LAYERS} CSA layers, ms", f"{HCA_LAYERS} HCA and {WINDOW_LAYERS} window layers, ms",
        "attention of a token, ms", "of all on the GPU", "GPU memory, GiB",
    )  # fmt: skip
    return (
        f"DeepSeek-V4-Flash's layers at {tokens} tokens, one request, {alone[0]['case']}:\n\n{markdown(columns, table)}\n\n"
        "Selection is among it; projections, compressors and experts are not, which are the same for all policies."
    )
