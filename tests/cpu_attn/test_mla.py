"""paged_mla_decode against the formula.

As for paged_decode, every dtype widens to fp32 exactly and nothing is rounded that fp32 would not
round: bf16 pairs and tiles multiply exactly, and tiles take a weight in three exact parts. So one
tolerance serves all dtypes and kernels.
"""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cpu_attn import (
    Executor,
    PagedLatent,
    PageTable,
    multiply_probe_gflops,
    paged_decode,
    paged_mla_decode,
    supported_isas,
)
from cpu_attn.library import _default
from tests.cpu_attn.conftest import selected
from tests.cpu_attn.reference import Case, int32, make_case, make_latent_case

TOLERANCE = 3e-6
WAIT_S = 60.0
LENGTHS = {
    1: [0, 1, 40],
    16: [0, 1, 15, 16, 17, 31, 33, 300],
    256: [0, 1, 127, 128, 129, 255, 256, 257, 700],
}


@functools.cache
def ragged(page_size: int, heads: int, widths: tuple[int, int], dtype: torch.dtype) -> tuple[Case, tuple]:
    lora_rank, rope_dim = widths
    case = make_latent_case(
        LENGTHS[page_size],
        page_size=page_size,
        heads=heads,
        lora_rank=lora_rank,
        rope_dim=rope_dim,
        dtype=dtype,
    )
    return case, case.expected()


def decode(case: Case, **how) -> tuple[Tensor, Tensor]:
    return paged_mla_decode(case.q, case.kv, case.table, case.scale, **how)


def assert_close(actual: tuple, expected: tuple) -> None:
    for got, want in zip(actual, expected):
        torch.testing.assert_close(got.double(), want, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [1, 2, 16, 128])
def test_deepseek_matches_formula(each_mla_isa: str, heads: int, dtype: torch.dtype) -> None:
    for page_size in LENGTHS:
        case, expected = ragged(page_size, heads, (512, 64), dtype)
        for threads in (1, 3) if heads < 128 else (2,):
            assert_close(decode(case, threads=threads), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("widths", [(32, 0), (64, 16), (64, 32), (96, 32), (128, 32), (256, 48), (512, 128)])
def test_other_widths(each_mla_isa: str, widths: tuple[int, int], dtype: torch.dtype) -> None:
    for page_size in LENGTHS:
        case, expected = ragged(page_size, 4, widths, dtype)
        assert_close(decode(case, threads=2), expected)


@pytest.mark.parametrize("heads", [3, 7, 15, 17, 22, 40])
def test_other_heads(each_mla_isa: str, heads: int) -> None:
    case, expected = ragged(16, heads, (64, 32), torch.bfloat16)
    assert_close(decode(case), expected)


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_query_dtype_may_differ(each_mla_isa: str, q_dtype: torch.dtype) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        case = make_latent_case([0, 70], dtype=dtype, q_dtype=q_dtype)
        assert_close(decode(case), case.expected())


def test_empty_requests_are_neutral(each_mla_isa: str) -> None:
    case = make_latent_case([0, 20, 0])
    out, lse = decode(case)
    assert not out[0].any() and not out[2].any()
    assert (lse[0] == -math.inf).all() and (lse[2] == -math.inf).all()
    none = PageTable(int32([]), int32([]), int32([0]), int32([]))
    out, lse = paged_mla_decode(case.q[:0], case.kv, none, 1.0)
    assert out.shape == (0, 16, 64)
    assert lse.shape == (0, 16)


def test_one_request_keeps_all_threads_busy(each_mla_isa: str) -> None:
    """Cuts within a request: more threads than heads, and states merged from all of them."""
    case = make_latent_case([3000], page_size=64, heads=2)
    for threads in (1, 2, 5):
        assert_close(decode(case, threads=threads), case.expected())


def test_long_sequence_keeps_accuracy(each_mla_isa: str) -> None:
    case = make_latent_case([40_000], page_size=256, heads=1, lora_rank=32, rope_dim=32)
    out, _ = decode(case, threads=1)
    expected, _ = case.expected()
    # Outputs are averages of 40,000 values, about 1/200: relative to the whole vector.
    assert (out - expected).norm() < 2e-6 * expected.norm()


def test_bit_identical_repeats(each_mla_isa: str) -> None:
    case = make_latent_case([0, 5, 700, 64, 1300])
    for threads in (1, 2, 3, 5):
        first = decode(case, threads=threads)
        for _ in range(5):
            again = decode(case, threads=threads)
            assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_weights_are_accurate(each_mla_isa: str) -> None:
    """Two tokens with scores 0 and -x: the second weighs 2^-x / (1 + 2^-x)."""
    x = torch.linspace(0, 20, 321)  # sixteenths, exact in bf16
    rows = torch.zeros(len(x), 2, 80, dtype=torch.bfloat16)
    rows[:, 1, 64] = -x
    rows[:, 1, :64] = 1
    steps = torch.arange(len(x) + 1, dtype=torch.int32)
    table = PageTable(torch.zeros_like(steps[1:]), steps[:-1], steps, torch.full_like(steps[1:], 2))
    exact = rows[:, 1, 64].double()
    q = torch.zeros(len(x), 1, 80, dtype=torch.bfloat16)
    q[..., 64] = 1
    out, lse = paged_mla_decode(q, PagedLatent([rows], 64), table, math.log(2))
    weight = torch.exp2(exact)
    # Rounding x * log2(e) * ln(2) alone moves the weight by up to 20 * 1.2e-7 * ln(2).
    torch.testing.assert_close(
        out[:, 0].double(), (weight / (1 + weight))[:, None].expand(-1, 64), rtol=2e-6, atol=0
    )
    torch.testing.assert_close(lse[:, 0].double(), torch.log2(1 + weight), rtol=0, atol=3e-7)


@pytest.mark.parametrize("factor", [1e3, 1e-3, -1.0, 0.0])
def test_scales(each_mla_isa: str, factor: float) -> None:
    case = make_latent_case([300])
    case.scale *= factor
    expected, expected_lse = case.expected()
    # A score of magnitude s carries an error of about s * 6e-8, and so does the weight.
    out, lse = decode(case)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE * max(1.0, factor))
    torch.testing.assert_close(lse.double(), expected_lse, rtol=TOLERANCE, atol=TOLERANCE)


def test_rising_maximum(each_mla_isa: str) -> None:
    """Every block beats the maximum so far, so every block rescales what was summed before."""
    case = make_latent_case([640], page_size=32)
    for entry, page in enumerate(case.k[0].split(32)):
        page[:, :, 64] = case.q[0, 0, 64].sign() * entry * 4
    rows = torch.cat([page.flatten() for page in case.k[0].split(32)]).view(20, 32, 80)
    steps = torch.arange(20, dtype=torch.int32)
    table = PageTable(torch.zeros_like(steps), steps, int32([0, 20]), int32([640]))
    case.kv, case.table, case.v = PagedLatent([rows], 64), table, [case.k[0][..., :64]]
    assert_close(decode(case, threads=1), case.expected())


@pytest.mark.parametrize("element", [0, 70])
def test_nan_in_a_listed_token_shows(each_mla_isa: str, element: int) -> None:
    rows = torch.zeros(1, 64, 80, dtype=torch.bfloat16)
    rows[0, 20, element] = math.nan
    table = PageTable(int32([0]), int32([0]), int32([0, 1]), int32([40]))
    q = torch.ones(1, 16, 80, dtype=torch.bfloat16)
    out, lse = paged_mla_decode(q, PagedLatent([rows], 64), table, 1.0)
    assert out.isnan().all()
    assert lse.isnan().all()


def test_strided_query_and_outputs(each_mla_isa: str) -> None:
    case = make_latent_case([30, 50], heads=4)
    wide = torch.empty(2, 4, 200, dtype=torch.bfloat16)
    wide[..., 50:130] = case.q
    out, lse = torch.full((2, 4, 100), 7.0), torch.full((4, 2), 7.0)
    result = paged_mla_decode(
        wide[..., 50:130], case.kv, case.table, case.scale, out=out[..., 3:67], lse=lse.t()
    )
    assert_close(result, case.expected())
    assert (out[..., :3] == 7).all() and (out[..., 67:] == 7).all()


def test_same_bits_from_the_executor(executor: Executor, each_mla_isa: str) -> None:
    case = make_latent_case([0, 5, 700])
    job = executor.submit_paged_mla_decode(case.q, case.kv, case.table, case.scale)
    direct = decode(case, threads=2)
    assert all(torch.equal(a, b) for a, b in zip(job.wait(WAIT_S), direct))
    assert all(torch.equal(a, b) for a, b in zip(decode(case, executor=executor), direct))
    with pytest.raises(ValueError, match="threads cannot be given"):
        decode(case, executor=executor, threads=2)


def test_both_kinds_take_turns(executor: Executor, each_mla_isa: str) -> None:
    latent, heads = make_latent_case([200]), make_case([200])
    for _ in range(3):
        first = executor.submit_paged_mla_decode(latent.q, latent.kv, latent.table, latent.scale)
        second = executor.submit_paged_decode(heads.q, heads.kv, heads.table, heads.scale)
        assert_close(first.wait(WAIT_S), latent.expected())
        assert_close(second.wait(WAIT_S), heads.expected())


def test_job_names_what_it_is(executor: Executor) -> None:
    case = make_latent_case([20])
    bad = PageTable(int32([7, 0]), int32([0, 0]), int32([0, 2]), int32([20]))
    job = executor.submit_paged_mla_decode(case.q, case.kv, bad, 1.0)
    with pytest.raises(ValueError, match="region 7 of 3"):
        job.wait(WAIT_S)
    assert "paged_mla_decode of 1 requests" in job._what


@pytest.mark.parametrize(
    ("region", "page", "lengths", "message"),
    [
        ([0, 3], [0, 0], [20], "entry 1: region 3 of 3"),
        ([0, 0], [0, 99], [20], "entry 1: page 99 of the"),
        ([0, 0], [0, 0], [33], "33 tokens need 3 pages of 16, the table lists 2"),
        ([0, 0], [0, 0], [-1], "is outside"),
    ],
)
def test_bad_tables_write_nothing(region: list, page: list, lengths: list, message: str) -> None:
    case = make_latent_case([60])
    table = PageTable(int32(region), int32(page), int32([0, 2]), int32(lengths))
    out = torch.full((1, 16, 64), math.pi)
    with pytest.raises(ValueError, match=message):
        paged_mla_decode(case.q, case.kv, table, 1.0, out=out)
    assert (out == math.pi).all()


def test_rows_that_do_not_fit() -> None:
    rows = torch.zeros(2, 16, 1, 96)
    with pytest.raises(ValueError, match="at least one region"):
        PagedLatent([], 64)
    with pytest.raises(ValueError, match="region 1 is .* region 0 has pages"):
        PagedLatent([rows, rows[:, :8]], 64)
    with pytest.raises(ValueError, match="float16"):
        PagedLatent([rows, rows.half()], 64)
    with pytest.raises(ValueError, match="one head"):
        PagedLatent([rows.expand(2, 16, 2, 96)], 64)
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        PagedLatent([torch.zeros(2, 16, 192)[..., ::2]], 64)
    with pytest.raises(ValueError, match="CPU"):
        PagedLatent([rows.to("meta")], 64)
    with pytest.raises(ValueError, match="4 dimensions"):
        PagedLatent([rows[0, 0]], 64)
    for lora_rank in (0, 48, 80, 544, -32):
        with pytest.raises(ValueError, match=f"rows of lora_rank {lora_rank} .* are not supported"):
            PagedLatent([torch.zeros(2, 16, 640)], lora_rank)
    with pytest.raises(ValueError, match=r"rows of lora_rank 64 \+ 24 are not supported"):
        PagedLatent([rows[..., :88]], 64)
    with pytest.raises(ValueError, match=r"lora_rank 64 \+ -32 are not supported"):
        PagedLatent([rows[..., :32]], 64)
    with pytest.raises(ValueError, match=r"lora_rank 64 \+ 144 are not supported"):
        PagedLatent([torch.zeros(2, 16, 208)], 64)


def test_arguments_that_do_not_fit() -> None:
    latent, heads = make_latent_case([20]), make_case([20])
    with pytest.raises(ValueError, match="kv must be a PagedLatent, is a PagedKV"):
        paged_mla_decode(heads.q, heads.kv, heads.table, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kv must be a PagedKV, is a PagedLatent"):
        paged_decode(latent.q, latent.kv, latent.table, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="q has head_dim 64, the KV 80"):
        paged_mla_decode(latent.q[..., :64], latent.kv, latent.table, 1.0)
    with pytest.raises(ValueError, match=r"do not fit q \(1, 16, 80\) and values of 64"):
        paged_mla_decode(latent.q, latent.kv, latent.table, 1.0, out=torch.empty(1, 16, 80))


def test_paged_decode_of_avx512bf16_is_that_of_avx512() -> None:
    if "avx512bf16" not in supported_isas():
        pytest.skip(f"this host and build have no avx512bf16, only {', '.join(supported_isas())}")
    case = make_case([300])
    results = []
    for name in ("avx512bf16", "avx512"):
        for _ in selected(name):
            results.append(paged_decode(case.q, case.kv, case.table, case.scale, threads=2))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert_close(results[0], case.expected())


def test_emulated_tiles_are_never_the_default() -> None:
    assert "amx-emulated" not in supported_isas()


@pytest.mark.parametrize(("granted", "chosen"), [(True, "amx"), (False, "avx512bf16")])
def test_the_default_is_the_last_isa_that_the_system_grants(granted: bool, chosen: str) -> None:
    supported = ["scalar", "avx2", "avx512", "avx512bf16", "amx"]
    module = SimpleNamespace(
        supported_isa=lambda index: supported[index] if index < len(supported) else "",
        select_isa=lambda name: granted or name != "amx",
    )
    assert _default(module) == chosen


def test_multiply_probe(executor: Executor, each_mla_isa: str) -> None:
    assert multiply_probe_gflops(executor, repeats=2) > 0
