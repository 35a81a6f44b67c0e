"""`inplacekv plan` and `inplacekv doctor`."""

from __future__ import annotations

import json
import resource
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_inplacekv import cli, cores, doctor, probes
from sglang_inplacekv.host_rates import AttentionRates, TeamRates
from sglang_inplacekv.models import checkpoint_path, make_tiny, write_config
from sglang_inplacekv.planning import STEP_START_S, ModelKV, predict, read_model
from sglang_inplacekv.roofline import Line
from sglang_inplacekv.topology import Node, Topology
from tests.models.v4_checkpoints import FLASH

RATES = ["--cpu-gbps", "84", "--link-gbps", "52"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[ModelKV | None]:
    """The models that are probed, in place of doing it."""
    models: list[ModelKV | None] = []

    def measure(sizes: list[int], model: ModelKV | None, device: str) -> list[TeamRates]:
        models.append(model)
        return [
            TeamRates(threads, 90e9, 1e-5, None if model is None else model.layer_token_bytes / 80e9)
            for threads in (len(sizes), 1)
        ]

    def beside(threads: int, most: int, model: ModelKV, device: str, copies: object) -> AttentionRates:
        link = None if copies is None else 45e9
        return AttentionRates(threads, 1e-4, model.layer_token_bytes / 75e9, link)

    monkeypatch.setattr(probes, "measure_teams", measure)
    monkeypatch.setattr(probes, "measure_attention", beside)
    return models


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config("qwen3_30b_a3b", tmp_path_factory.mktemp("model") / "qwen3")


def test_plan_of_qwen3(qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", str(qwen3), *RATES, "--batch", "32", "--context", "32768"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("96.0 KiB of KV a token (bfloat16), 48 layers; CPU attention 84.0 GB/s")
    row = next(line for line in out.splitlines() if line.strip().startswith("32 x 32768")).split()
    # 2**20 tokens of 96 KiB; the bandwidths' shares; the sum of both.
    assert row[3:5] == ["103.08", "0.62"]
    assert float(row[5]) == pytest.approx(103.08e3 / 136 + 1e3 * STEP_START_S, rel=0.01)


def test_the_cpu_pays_from_where_the_rows_say_so(qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the rest of a step too: the header and the rows are of the same lines."""
    plan = ["plan", "--model", str(qwen3), *RATES, "--batch", "1", "--page-size", "2", "--step-ms", "2000"]
    assert cli.main([*plan, "--context", "1"]) == 0
    first = int(capsys.readouterr().out.split("the CPU pays from ")[1].split()[0])
    assert first > 1_000_000
    assert cli.main([*plan, "--context", f"{first * 9 // 10},{first * 11 // 10}"]) == 0
    below, above = (line.split()[4] for line in capsys.readouterr().out.splitlines()[2:4])
    assert float(below) == 0.0 < float(above)


def test_what_fits_the_gpu_is_not_on_the_host(qwen3: Path) -> None:
    model, cpu, transfer = read_model(qwen3, 256), Line(0.0, 1e-6), Line(0.0, 2e-6)
    page = model.shape.page_bytes
    found = predict(model, cpu, transfer, 2, 1000, 3 * page, 0.001)
    assert found.host_bytes == (2 * 4 - 3) * page
    assert predict(model, cpu, transfer, 2, 1000, 8 * page, 0.001).step_s == 0.001
    # The rest of a layer waits for the CPU, and copies hide behind it.
    tokens, rest = 5 * 256, 0.001 / 48
    assert found.share == pytest.approx((2e-6 * tokens - rest) / (3e-6 * tokens))
    assert found.step_s == pytest.approx(STEP_START_S + 48 * 2e-6 * (1 - found.share) * tokens)
    assert found.transfer_s == pytest.approx(STEP_START_S + 48 * 2e-6 * tokens)
    assert found.cpu_s == pytest.approx(STEP_START_S + 0.001 + 48 * 1e-6 * tokens)
    # Few enough tokens cross behind the rest of the step, which takes no longer for them.
    hidden = predict(model, cpu, Line(0.0, 1e-9), 2, 1000, 3 * page, 0.001)
    assert hidden.step_s == STEP_START_S + 0.001
    assert found.transfer_s > found.step_s < found.cpu_s


def test_a_step_of_qwen3_by_hand(qwen3: Path) -> None:
    """67 MB a layer: 0.1 + 0.895 ms for the CPU, 1.266 ms for the link, and 0.2 ms for the rest of a layer."""
    model = read_model(qwen3, 256)
    cpu, link, rest_s = Line(1e-4, 2048 / 75e9), Line(0.0, 2048 / 53e9), 48 * 2e-4
    assert model.layer_token_bytes == 2048 and model.shape.layers == 48
    found = predict(model, cpu, link, 1, 32768, 0, rest_s)
    # (1.266 - 0.1 - 0.2) / (0.895 + 1.266), at which both sides take 0.700 ms.
    assert found.share == pytest.approx(0.447, abs=5e-4)
    start_s = STEP_START_S
    assert found.step_s == pytest.approx(start_s + 48 * 0.7001e-3, rel=1e-3)
    assert found.cpu_s == pytest.approx(start_s + 48 * (0.1e-3 + 0.2e-3 + 0.8948e-3), rel=1e-3)
    assert found.transfer_s == pytest.approx(start_s + 48 * 1.2662e-3, rel=1e-3), (
        "without the CPU's fixed part"
    )
    # 2048 tokens cross in 0.079 ms, behind the rest of the layer: the CPU gets none and its fixed part is not counted.
    short = predict(model, cpu, link, 1, 2048, 0, rest_s)
    assert (short.share, short.step_s, short.transfer_s) == (0.0, start_s + rest_s, start_s + rest_s)
    # 8192 cross in 0.317 ms, a little longer than the CPU's fixed part and the rest of the layer.
    longer = predict(model, cpu, link, 1, 8192, 0, rest_s)
    assert longer.share == pytest.approx(0.031, abs=5e-4) and longer.step_s < longer.transfer_s


def test_plan_of_a_latent_model(tmp_path: Path) -> None:
    model = read_model(write_config("deepseek_v2_lite", tmp_path / "v2"), 256)
    assert (model.shape.kv_heads, model.shape.head_dim, model.shape.value_dim) == (1, 576, 512)
    assert model.layer_token_bytes == 1152 and model.q_heads == 16


def test_plan_of_deepseek_v4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory alone. Flash: 21 CSA layers of 512 and 128 wide entries, one in 4 tokens; 20 HCA layers, one in 128."""
    (tmp_path / "config.json").write_text(json.dumps(FLASH | {"dtype": "bfloat16"}), encoding="utf-8")
    command = ["plan", "--model", str(tmp_path), "--context", "1048576,100", "--batch", "2"]
    assert cli.main([*command, "--gpu-memory", "1GB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "21 CSA, 20 HCA and 2 window layers, bfloat16, pages of 256 tokens"
    assert "5.25 KiB of CSA entries" in lines[1] and f"{(21 * 32 + 20 * 4) * 2 / 1024:.2f} KiB" in lines[2]
    page_bytes = 256 * 5376
    host = (2 * 4096 - 10**9 // page_bytes) * page_bytes / 1e9
    row = dict(zip(("host", "D", "kept", "requests"), lines[6].split()[3:], strict=True))
    assert row["host"] == f"{host:.2f}" and row["D"] == "1.00" and row["kept"] == f"{2**21 * 1504 / 1e9:.2f}"
    assert lines[7].split()[:5] == ["2", "x", "100", "0.00", "0.00"], "one page each, in D"
    assert cli.main([*command, "--page-size", "200"]) == 2
    line = "--page-size: asked 200, possible with DeepSeek-V4 are multiples of 128"
    assert capsys.readouterr().err == f"error: {line}\n"
    (tmp_path / "config.json").write_text(json.dumps(FLASH | {"head_dim": None}), encoding="utf-8")
    assert cli.main(command) == 2
    assert capsys.readouterr().err == "error: --model: its config.json has no head_dim\n"


@pytest.mark.parametrize(
    "given", [["--cpu-gbps", "x"], ["--link-gbps", "50"], ["--step-ms", "5"], ["--redo-probes"]]
)
def test_rates_are_of_no_use_with_deepseek_v4(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FLASH), encoding="utf-8")
    assert cli.main(["plan", "--model", str(tmp_path), *given]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {given[0]}: possible with a DeepSeek-V4 is none")
    assert captured.out == ""


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v2"])
def test_plan_measures_the_cpu(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny(kind, checkpoint_path(f"tiny-{kind}"))
    assert cli.main(["plan", "--model", str(model), "--link-gbps", "1", "--batch", "4"]) == 0
    rate = float(capsys.readouterr().out.split("CPU attention ")[1].split()[0])
    assert 0.1 < rate < 1000


def test_plan_measures_once(
    qwen3: Path, probed: list[ModelKV | None], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, kept = ["plan", "--model", str(qwen3), "--link-gbps", "52"], []
    for extra, probes_made in (([], 1), ([], 1), (["--redo-probes"], 2), (["--cpu-gbps", "70"], 2)):
        assert cli.main([*plan, *extra]) == 0
        assert len(probed) == probes_made
        given = "--cpu-gbps" in extra
        told = "70.0 GB/s" if given else "75.0 GB/s and 110 us a layer"
        out = capsys.readouterr().out
        assert f"CPU attention {told}" in out
        kept.append("--redo-probes measures anew" in out)
    assert kept == [False, True, False, False]
    assert probed[0] == read_model(qwen3, 256)


@pytest.mark.parametrize(
    ("given", "has_gpu", "cpu", "link", "note"),
    [
        ([], True, "75.0 GB/s and 110 us", 45, "Rates as measured here, of both sides at once."),
        (["--link-gbps", "52"], True, "75.0 GB/s and 110 us", 52, "the CPU's as measured here beside copies"),
        (["--cpu-gbps", "84"], True, "84.0 GB/s and 10 us", 45, "the link's as measured here beside CPU"),
        (
            ["--link-gbps", "52"],
            False,
            "75.0 GB/s and 110 us",
            52,
            "with nothing beside it: where they share",
        ),
        (RATES, True, "84.0 GB/s", 52, "Rates as given, of both sides at once."),
        (RATES, False, "84.0 GB/s", 52, "Rates as given, of both sides at once."),
    ],
)
def test_plan_tells_what_its_rates_are(
    given: list[str],
    has_gpu: bool,
    cpu: str,
    link: int,
    note: str,
    qwen3: Path,
    probed: list[ModelKV | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone = SimpleNamespace(rate_alone=lambda: 50e9, close=lambda: None)
    monkeypatch.setattr(probes, "QueuedCopies", lambda piece_bytes: alone)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(cores, "_gpu_address", lambda: "0000:00:00.0")
    assert cli.main(["plan", "--model", str(qwen3), *given]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert f"CPU attention {cpu}" in first and f"link {link}.0 GB/s" in first
    assert note in last and ("a step takes longer" in last) == (not has_gpu and given != RATES)


def test_doctor_measures_once(probed: list[ModelKV | None], capsys: pytest.CaptureFixture[str]) -> None:
    for extra, kept in (([], False), ([], True), (["--redo-probes"], False)):
        cli.main(["doctor", *extra])
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "rates: " in line)
        assert line.startswith("ok   rates: knee at 1 of ") and "which read 90.0 GB/s" in line
        assert line.endswith("(kept from before)") == kept
    assert probed == [None, None]


def test_doctor_on_topology() -> None:
    nodes = {0: Node(frozenset({0, 1}), 2**36, ()), 1: Node(frozenset({2, 3}), 0, ())}
    here = Topology(cores=(2, 3, 0, 1), usable=4, physical=2, gpu_node=1, nodes=nodes)
    found = doctor.nodes(here, has_gpu=True)
    assert found.advice is None
    assert found.found == (
        "2 physical of 4 cores, on nodes 0, 1 of 2; without memory node 1; the GPU on node 1 with 2 of them"
    )
    away = doctor.nodes(Topology((0, 1), 2, 2, 1, nodes), has_gpu=True)
    assert away.advice == "affinity leaves out the cores of the GPU's node: numactl --cpunodebind=1"
    no_cores = Topology((0, 1), 2, 2, 1, {0: nodes[0], 1: Node(frozenset(), 2**36, ())})
    assert doctor.nodes(no_cores, has_gpu=True).advice is None
    bare = Topology((0, 1), 2, 2, None, {})
    assert doctor.nodes(bare, has_gpu=True).found.endswith("on no node of 0; the GPU's node is not told")
    assert "GPU" not in doctor.nodes(bare, has_gpu=False).found


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--model", "/nowhere", *RATES],
            "--model: /nowhere/config.json: No such file or directory; possible is a folder with a config.json",
        ),
        (
            ["--cpu-gbps", "-1", "--link-gbps", "1"],
            "--cpu-gbps: asked '-1', possible is a number from 0.001 to 1000000",
        ),
        (
            ["--cpu-gbps", "1", "--link-gbps", "nan"],
            "--link-gbps: asked 'nan', possible is a number from 0.001 to 1000000",
        ),
        (["--page-size", "1", *RATES], "--page-size: asked '1', possible is a whole number from 2 to 65536"),
        (
            ["--context", "8k", *RATES],
            "--context: asked '8k', possible is a whole number from 1 to 1000000000",
        ),
        (["--batch", "4,", *RATES], "--batch: asked '', possible is a whole number from 1 to 1000000000"),
        (["--step-ms", "inf", *RATES], "--step-ms: asked 'inf', possible is a number from 0 to 1000000"),
        *[
            (
                ["--gpu-memory", text, *RATES],
                f"--gpu-memory: asked {text!r}, possible is a size such as 512MB, 96GB, 4GiB",
            )
            for text in ("auto", "4096tok")
        ],
    ],
)
def test_bad_input_gets_one_line(
    arguments: list[str], line: str, qwen3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if "--model" in arguments else ["--model", str(qwen3)]
    assert cli.main(["plan", *model, *arguments]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


def test_probes_of_nothing_are_refused(qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", str(qwen3), *RATES, "--redo-probes"]) == 2
    assert capsys.readouterr().err.startswith("error: --redo-probes: possible is none beside both rates")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a link to measure")
def test_no_link_to_measure(qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", str(qwen3), "--cpu-gbps", "1"]) == 2
    assert "--link-gbps: unset, and this host has no GPU" in capsys.readouterr().err


def test_a_library_that_is_missing(qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        mock.patch("cpu_attn.Executor", side_effect=RuntimeError("no library")),
        mock.patch("cpu_attn.isa", side_effect=RuntimeError("no library")),
    ):
        assert cli.main(["plan", "--model", str(qwen3), *RATES]) == 2
        assert "CPU attention does not run here: no library" in capsys.readouterr().err
        assert doctor.instruction_set().advice == "no library"
        assert doctor.rates("cpu", redo=False).advice == "no library"
        assert cli.main(["plan", "--model", str(qwen3), *RATES[2:]]) == 2
        assert "CPU attention does not run here: no library" in capsys.readouterr().err


def test_a_link_that_cannot_be_measured(
    qwen3: Path, probed: list[ModelKV | None], capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "get_device_name", return_value="a GPU"),
        mock.patch.object(probes, "topology", return_value=cores.topology()),
        mock.patch.object(probes, "QueuedCopies", side_effect=RuntimeError("pinning failed")),
    ):
        assert cli.main(["plan", "--model", str(qwen3), *RATES[:2]]) == 2
    assert capsys.readouterr().err == "error: the link to the GPU cannot be measured: pinning failed\n"


def test_doctor_of_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor"])
    out = capsys.readouterr().out
    assert code == ("LOOK" in out)
    assert "ok   SGLang: " in out and "ok   plugin: registered" in out and "host memory: " in out


@pytest.mark.parametrize(
    ("text", "found", "well"),
    [
        ("always [madvise] never", "madvise", True),
        ("[always] madvise never", "always", True),
        ("always madvise [never]", "never", False),
        (None, "unknown", False),
    ],
)
def test_doctor_on_huge_pages(text: str | None, found: str, well: bool, tmp_path: Path) -> None:
    path = tmp_path / "enabled"
    if text is not None:
        path.write_text(text)
    finding = doctor.huge_pages(path)
    assert finding.found == found and (finding.advice is None) == well


def test_doctor_on_the_rest() -> None:
    assert doctor.cores(15, 16, has_gpu=True).advice is None
    assert doctor.cores(16, 16, has_gpu=True).advice is not None
    assert doctor.cores(2, 2, has_gpu=False).advice is None
    assert doctor.locked_memory(resource.RLIM_INFINITY).advice is None
    assert "65536" in doctor.locked_memory(65536).found
    with mock.patch.object(doctor, "version", side_effect=PackageNotFoundError):
        assert doctor.sglang().found == "not installed" and doctor.sglang().advice is not None
    with mock.patch.object(doctor, "entry_points", return_value=[]):
        assert doctor.plugin().advice is not None
