"""How much is measured: the full suite, a quick one, and one that a CPU finishes in seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparse_attn import V4Config


@dataclass(frozen=True)
class Shape:
    """`batch` requests of `context` prompt tokens each."""

    batch: int
    context: int

    def __str__(self) -> str:
        size = f"{self.context // 1024}K" if self.context % 1024 == 0 else str(self.context)
        return f"{self.batch} x {size}"


@dataclass(frozen=True)
class ShareScale:
    """Of the benchmarks of the share, which need no model."""

    layers: int
    shapes: tuple[Shape, ...]
    models: tuple[str, ...]  # released kinds
    settle_steps: int  # for the controller to arrive, at least, and
    settle_s: float  # for so long: short steps are cheap, and trials take many
    grid: tuple[float, ...]
    near: tuple[float, ...]  # further shares, from where the controller arrived
    rounds: int
    round_steps: int  # at least, and
    round_s: float  # for so long
    plan_layers: int | None  # None: as many as the model has
    plan_shapes: tuple[Shape, ...]
    plan_steps: int  # to warm up and settle, and as many again to time
    resident: Shape  # fits D
    served_shapes: tuple[Shape, ...]  # do not
    growing_tokens: tuple[int, int]
    growing_pages: int  # from one step to the next
    growing_shares: tuple[float, ...]
    growing_rounds: int
    hog: Shape
    hog_steps: int  # before it, and beside it
    hog_grow_steps: int


@dataclass(frozen=True)
class CsaScale:
    """Of the benchmark of one CSA layer, which needs no model."""

    geometry: V4Config
    tokens: tuple[int, ...]  # contexts, the last one the whole model's too
    batches: tuple[int, ...]
    walks: tuple[float, ...]  # how much of a query is left in the next one
    shares: tuple[float, ...]  # of missed entries, between all fetched and all computed
    hot_rows: int  # of a request
    warm_up_steps: int  # until the hot set has settled
    steps: int  # of a run
    runs: int
    circle: int  # steps after which the walk begins anew


@dataclass(frozen=True)
class Scale:
    """Shapes are in the order in which they are served: each batch finds the prefixes of the one before in the cache."""

    fits: tuple[Shape, ...]
    window_steps: int
    windows: int
    warmup_steps: int
    prefill_tokens: tuple[int, ...]
    prefill_repeats: dict[int, int]  # by prompt tokens
    prefill_shares: tuple[float, ...]
    sweep: tuple[Shape, ...]
    sweep_shares: tuple[float, ...]  # the most telling first, should time run out
    sweep_steps: int
    sweep_warmup_steps: int
    long_tokens: int
    long_new_tokens: int
    million: Shape
    million_new_tokens: int
    million_share: float
    queueing: Shape
    queueing_new_tokens: int
    stream_layers: int  # of the measurements without a model
    stream_tokens: int
    repeats: int
    copy_bytes: int
    read_bytes: int  # well above the last-level cache
    timeline: Shape
    share: ShareScale
    csa: CsaScale


_MODELS = ("qwen3_30b_a3b", "mixtral_8x7b", "deepseek_v2_lite")
_SHARE = ShareScale(
    layers=12,
    shapes=(Shape(1, 2048), Shape(1, 8192), Shape(1, 32768), Shape(1, 131072), Shape(32, 2048)),
    models=_MODELS,
    settle_steps=40,
    settle_s=1.0,
    grid=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    near=(-0.06, -0.04, -0.02, 0.0, 0.02, 0.04, 0.06),
    rounds=9,
    round_steps=3,
    round_s=0.1,
    plan_layers=None,
    plan_shapes=(Shape(1, 32768), Shape(1, 131072), Shape(8, 16384)),
    plan_steps=20,
    resident=Shape(1, 2048),
    served_shapes=(Shape(1, 32768), Shape(1, 122880)),
    growing_tokens=(2048, 65536),
    growing_pages=1,
    growing_shares=(0.2, 0.3, 0.4, 0.45, 0.5, 0.6),
    growing_rounds=3,
    hog=Shape(4, 32768),
    hog_steps=60,
    hog_grow_steps=64,
)
_CSA = CsaScale(
    geometry=V4Config("csa"),
    tokens=(65536, 262144, 1048576),
    batches=(1, 8),
    walks=(0.97, 0.9),
    shares=(0.5,),
    hot_rows=2048,
    warm_up_steps=64,
    steps=64,
    runs=7,
    circle=256,
)

FULL = Scale(
    fits=(Shape(32, 8192), Shape(16, 8192), Shape(4, 8192), Shape(1, 8192), Shape(1, 32768)),
    window_steps=20,
    windows=5,
    warmup_steps=10,
    prefill_tokens=(8192, 65536),
    prefill_repeats={8192: 15, 65536: 5},
    prefill_shares=(0.0, 0.5, 1.0),
    sweep=(Shape(32, 8192), Shape(16, 16384), Shape(4, 32768), Shape(1, 32768)),
    sweep_shares=(0.5, 0.0, 1.0, 0.6, 0.4, 0.3, 0.7, 0.8),
    sweep_steps=20,
    sweep_warmup_steps=3,
    long_tokens=65536,
    long_new_tokens=32,
    million=Shape(32, 32000),
    million_new_tokens=64,
    million_share=0.6,
    queueing=Shape(64, 8192),
    queueing_new_tokens=64,
    stream_layers=24,
    stream_tokens=131072,
    repeats=7,
    copy_bytes=2**30,
    read_bytes=2**31,
    timeline=Shape(4, 16384),
    share=_SHARE,
    csa=_CSA,
)

QUICK = replace(
    FULL,
    fits=(Shape(16, 8192), Shape(1, 8192)),
    prefill_tokens=(8192,),
    sweep=(Shape(32, 8192), Shape(4, 32768)),
    sweep_shares=(0.6, 0.0, 1.0),
    million=Shape(8, 32000),
    queueing=Shape(16, 8192),
    repeats=5,
    share=replace(
        _SHARE,
        shapes=(Shape(1, 2048), Shape(1, 32768), Shape(1, 131072)),
        grid=(0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0),
        near=(-0.04, -0.02, 0.0, 0.02, 0.04),
        rounds=15,  # fewer shares, each known better
        settle_s=0.5,
        round_s=0.06,
        plan_shapes=(Shape(1, 32768), Shape(1, 131072)),
        growing_pages=2,
        growing_shares=(0.3, 0.4, 0.5, 0.6),
        growing_rounds=2,
        hog_steps=48,
        hog_grow_steps=32,
    ),
    csa=replace(_CSA, tokens=(65536, 1048576), batches=(1,), runs=5),
)

SMOKE = Scale(
    fits=(Shape(2, 96), Shape(1, 96), Shape(1, 160)),
    window_steps=3,
    windows=2,
    warmup_steps=2,
    prefill_tokens=(64, 160),
    prefill_repeats={64: 3, 160: 2},
    prefill_shares=(0.0, 0.5),
    sweep=(Shape(2, 96), Shape(1, 160)),
    sweep_shares=(0.5, 0.0),
    sweep_steps=3,
    sweep_warmup_steps=1,
    long_tokens=320,
    long_new_tokens=8,
    million=Shape(3, 128),
    million_new_tokens=8,
    million_share=0.5,
    queueing=Shape(4, 96),
    queueing_new_tokens=8,
    stream_layers=2,
    stream_tokens=1024,
    repeats=2,
    copy_bytes=2**20,
    read_bytes=2**20,
    timeline=Shape(2, 96),
    share=ShareScale(
        layers=2,
        shapes=(Shape(1, 2048), Shape(2, 1024)),
        models=("qwen3_30b_a3b", "deepseek_v2_lite"),
        settle_steps=8,
        grid=(0.0, 0.5, 1.0),
        near=(-0.1, 0.0),
        settle_s=0.0,
        rounds=1,
        round_steps=2,
        round_s=0.0,
        plan_layers=2,
        plan_shapes=(Shape(1, 2048), Shape(2, 1024)),
        plan_steps=4,
        resident=Shape(1, 96),
        served_shapes=(Shape(1, 320),),
        growing_tokens=(512, 2048),
        growing_pages=2,
        growing_shares=(0.0, 0.5),
        growing_rounds=1,
        hog=Shape(2, 2048),
        hog_steps=8,
        hog_grow_steps=4,
    ),
    csa=CsaScale(
        geometry=V4Config("csa", heads=4, head_dim=32, window=8, index_heads=16, index_dim=16, index_topk=16),
        tokens=(1024, 2048),
        batches=(1, 2),
        walks=(0.9,),
        shares=(0.5,),
        hot_rows=48,
        warm_up_steps=3,
        steps=4,
        runs=2,
        circle=12,
    ),
)
