"""The benchmark's arithmetic, verdicts, tables and plot, on numbers known beforehand."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import bench_core
import bench_parts
import bench_peers
import bench_plot
import bench_quantize
import bench_report
import bench_targets
import bench_timing

# ------------------------------------------------------------------------------------- statistics


def test_ratios_compare_times_of_the_same_round_only() -> None:
    # The card slows down from round to round; the ratio does not.
    assert bench_timing.ratios([10, 20, 40], [5, 10, 20]) == [2, 2, 2]
    with pytest.raises(ValueError, match="zip"):
        bench_timing.ratios([1, 2], [1])


def test_the_reported_ratio_is_no_ratio_of_medians() -> None:
    rows = [
        bench_core.make_row("case", "fwd", name, {}, times)
        for name, times in (("bf16", [10.0, 20.0, 90.0]), ("other", [5.0, 40.0, 30.0]))
    ]
    bench_core.add_ratios(rows, rows[0])
    assert rows[1]["ratios"] == [2, 0.5, 3]
    assert rows[1]["ratio"] == 2  # 20 / 30 would be 0.67
    bench_core.add_ratios(rows, rows[0], over=True)
    assert rows[1]["ratio"] == 0.5


@pytest.mark.parametrize(
    ("how", "run"),
    [
        ("layer", "call flush start call call call end"),  # ahead as in a loop
        ("device", "heat heat flush start call end"),  # the host is far ahead
    ],
)
def test_on_a_gpu_heat_comes_first_and_every_run_finds_a_cold_cache(
    how: bench_timing.How, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    class Event:
        made = 0

        def __init__(self, enable_timing: bool) -> None:
            self.name = ("start", "end")[Event.made % 2]
            Event.made += 1
            self.number = Event.made

        def record(self) -> None:
            log.append(self.name)

        def elapsed_time(self, end: "Event") -> float:
            assert log[-1] == "sync"
            return float(end.number)  # 2, 4, 6 ms

    timer = bench_timing.Timer(torch.device("cpu"))
    timer.on_gpu, timer.heat_gemms = True, 4
    timer._flush = types.SimpleNamespace(fill_=lambda _: log.append("flush"))
    monkeypatch.setattr(timer, "_heat_once", lambda: log.append("heat"))
    monkeypatch.setattr(timer, "synchronize", lambda: log.append("sync"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    us = timer.measure(lambda: log.append("call"), how, runs=3)
    assert us == pytest.approx(4000 / run.count("call end") / (3 if how == "layer" else 1))
    assert log == ["heat"] * 4 + ["sync"] + run.split() * 3 + ["sync"]
    del log[:]
    timer.measure(lambda: log.append("call"), how, runs=3, least_ms=40)  # 8 + 10 + 12, + 14 ...
    batches = 2 if how == "layer" else 1
    assert log == ["heat"] * 4 + ["sync"] + (run.split() * 3 + ["sync"]) * batches


def test_everybody_is_measured_once_a_round_and_nobody_always_after_the_same() -> None:
    def order_of(rounds: int) -> str:
        order: list[str] = []
        entries = [
            bench_timing.Entry(name, lambda name=name: order.append(name) or 1.0)
            for name in "abcdefgh"
        ]
        ticks: list[int] = []
        bench_timing.run_rounds(entries, rounds, lambda: ticks.append(1))
        assert [len(entry.rounds_us) for entry in entries] == [rounds] * 8
        assert len(ticks) == rounds * 8
        return "".join(order)

    order = order_of(5)
    rounds = [order[i : i + 8] for i in range(0, 40, 8)]
    assert all(sorted(one) == list("abcdefgh") for one in rounds)
    for name in "abcdefgh":
        assert len({one[one.index(name) - 1] for one in rounds}) > 2
    assert order_of(6)[:40] == order  # the same in every run


def test_what_is_late_ends_after_a_few_whole_rounds() -> None:
    def rounds_of(late_after: int) -> int:
        done: list[str] = []
        entries = [
            bench_timing.Entry(name, lambda name=name: done.append(name) or 1.0) for name in "ab"
        ]
        bench_timing.run_rounds(entries, 9, list, lambda: len(done) > late_after)
        assert len({len(entry.rounds_us) for entry in entries}) == 1
        return len(entries[0].rounds_us)

    assert [rounds_of(n) for n in (0, 9, 99)] == [bench_timing.LEAST_ROUNDS, 5, 9]


def test_errors_are_relative_and_not_a_number_is_an_error() -> None:
    want = torch.tensor([3.0, 4.0])
    assert bench_timing.relative_error(want, torch.tensor([3.0, 4.5])) == pytest.approx(0.1)
    error = bench_timing.relative_error(want, torch.tensor([3.0, float("nan")]))
    assert bench_timing.wrong({"y": error}, {"y": 0.06}) is not None
    assert bench_timing.wrong({"y": 0.05, "dx": 0.1}, {"y": 0.06, "dx": 0.09}) == (
        "error of dx 0.1, want at most 0.09"
    )
    assert bench_timing.wrong({"y": 0.05}, {"y": 0.06, "dx": 0.09}) is None
    with pytest.raises(ValueError, match=r"\[2\], got \[1\]"):  # it would broadcast
        bench_timing.relative_error(want, torch.tensor([3.0]))


def test_the_floors_count_one_or_two_reads_and_two_bytes_written() -> None:
    row = bench_core.make_row("case", "phase", "fp8lt", {}, [60.0, 60.0, 90.0])
    bench_quantize.add_floors(row, 1000, 2, [100.0, 200.0, 100.0])  # bytes per us
    assert row["one_read_us"] == 40  # (2 + 2) * 1000 / 100
    assert row["two_reads_us"] == 60  # (4 + 2) * 1000 / 100
    assert row["over_two_reads_rounds"] == [1, 2, 1.5]
    assert row["over_two_reads"] == 1.5


def test_the_parts_of_a_layer_never_show_a_negative_gap() -> None:
    whole = bench_core.make_row("1x2x3", "fwd+bwd", "fp8lt", {}, [100.0, 100.0, 100.0])
    entry = bench_timing.Entry("parts", bool)
    parts = bench_parts.Parts(entry, [60.0, 60.0, 80.0], [10.0, 20.0, 30.0])
    part = bench_parts.part_row([whole], "fp8lt", parts)
    assert part["rounds_us"]["host_gap"] == [30, 20, 0]
    assert (part["gemms_us"], part["quantise_us"], part["host_gap_us"]) == (60, 20, 20)
    assert part["gemm_share"] == 0.6


def test_the_kernels_of_a_run_follow_its_flush_and_overlaps_count_once() -> None:
    spans = [
        bench_parts.Span(*one)
        for one in [
            ("heat", 0, 50),
            ("FillFunctor<unsigned char>", 50, 60),
            ("void fp8lt::(anonymous namespace)::amax_kernel", 60, 70),
            ("void fp8lt::(anonymous namespace)::cast_kernel", 66, 90),  # starts early
            ("Memset (Device)", 91, 92),
            ("nvjet_qqtst", 93, 193),
            *[("next, not timed", 200 + i, 201 + i) for i in range(4)],
            ("FillFunctor<unsigned char>", 210, 220),
            *[("nvjet_qqtst", 220 + 5 * i, 225 + 5 * i) for i in range(4)],
        ]
    ]
    runs = bench_parts.kernels_of_runs(spans)
    assert [bench_parts.split(run) for run in runs] == [(101, 30), (20, 0)]


def test_the_kernels_of_a_model_are_gemms_or_quantise_or_others() -> None:
    spans = [
        bench_parts.Span(*one)
        for one in [
            ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_ovscale_TNT", 0, 40),
            ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x", 40, 50),
            ("void fp8lt::(anonymous namespace)::amax_kernel<__nv_bfloat16>", 50, 56),
            ("void fp8lt::(anonymous namespace)::cast_kernel<__nv_bfloat16", 54, 60),
            ("cast_transpose_optimized_kernel(__nv_bfloat16 const*", 60, 64),
            ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_traits<cutlass::half_t", 66, 90),
            ("void at::native::vectorized_elementwise_kernel<8, silu>", 90, 96),
            ("triton_poi_fused__to_copy_clamp_clone_gemm_nt_mul_quantize_tensorwise_5", 96, 100),
        ]
    ]
    assert bench_parts.times_by_kind(spans, runs=2) == {
        "gemms_us": 25, "quantise_us": 7, "other_us": 17, "idle_us": 1
    }  # fmt: skip


# ------------------------------------------------------------------------------- targets, tables


def result(case: str, phase: str, **ratios: float | None) -> dict:
    rows = []
    for name, ratio in ratios.items():
        row = bench_core.make_row(case, phase, name.replace("_", "-"), {}, [1.0])
        rows.append({**row, "ratio": ratio})
    return {"rows": rows, "missing": {}, "targets": [], "seconds": 1.0}


def test_a_target_is_met_missed_or_not_measured_and_shows_the_best_peers() -> None:
    case = "8192x4096x4096"
    ratios = {"bf16": 1.0, "te_delayed": 1.5, "te_current": 1.2, "fp8lt_reused": 9.0}
    for ours, met in ((1.55, True), (1.54, False), (None, None)):
        (verdict,) = bench_targets.judge("layer", result(case, "fwd+bwd", fp8lt=ours, **ratios))
        assert verdict["met"] is met
        assert verdict["best_peer"] == {"contender": "te-delayed", "ratio": 1.5}
        assert verdict["best_dynamic_peer"] == {"contender": "te-current", "ratio": 1.2}
    (verdict,) = bench_targets.judge("host", result("16x512x512", "fwd+bwd", fp8lt=1.2, te_x=1.1))
    assert verdict["met"] is True  # there, less is better
    table = "\n".join(bench_report.target_table([verdict]))
    assert re.search(r"fp8lt 16x512x512 fwd\+bwd +1\.20 +<= 1\.30 +met +1\.10x te-x", table)


def test_a_finer_recipe_is_judged_beside_peers_of_the_same_recipe() -> None:
    case, names = "8192x4096x4096", ("fp8lt", "fp8lt-rowwise", "fp8lt-blockwise")
    rows = [
        {**bench_core.make_row(case, "fwd+bwd", name, {}, [1.0]), "ratio": ratio}
        for name, ratio in [
            ("bf16", 1.0), *zip(names, (1.6, 1.41, 1.29), strict=True), ("te-delayed", 1.5),
            ("torchao-rowwise", 0.5), ("torchao-rowwise-compiled", 1.3), ("te-block", 1.1),
        ]
    ]  # fmt: skip
    found = bench_targets.judge("layer", {"rows": rows})
    assert [verdict["what"] for verdict in found] == [f"{name} {case} fwd+bwd" for name in names]
    assert [verdict["target"] for verdict in found] == [1.55, 1.40, 1.30]
    assert [verdict["met"] for verdict in found] == [True, True, False]
    best, dynamic = (
        [verdict[f"best_{kind}"]["contender"] for verdict in found]
        for kind in ("peer", "dynamic_peer")
    )
    assert best == ["te-delayed", "torchao-rowwise-compiled", "te-block"]
    assert dynamic == ["torchao-rowwise-compiled"] * 2 + ["te-block"]
    (_, alone, _) = bench_targets.judge("layer", {"rows": rows[:5]})
    assert alone["best_peer"] is alone["best_dynamic_peer"] is None


def test_every_contender_belongs_to_the_family_of_its_scales() -> None:
    found: dict[str, set[str]] = {}
    for contender in bench_peers.TRAINING:
        found.setdefault(bench_core.family(contender.name), set()).add(contender.name)
    assert found["blockwise"] == {"fp8lt-blockwise", "te-block"}
    assert found["rowwise"] == {
        "fp8lt-rowwise", "fp8lt-rowwise_with_gw_hp", "fp8lt-rowwise_folded", "torchao-rowwise",
        "torchao-rowwise-compiled",
    }  # fmt: skip
    assert {"bf16", "fp8lt", "scaled_mm", "te-delayed", "te-current"} <= found["tensorwise"]


def test_the_floor_is_a_target_of_the_tensorwise_quantise_alone() -> None:
    rows = []
    for kind in ("tensorwise", "rowwise"):
        row = bench_core.make_row("8192x4096 bfloat16", kind, "fp8lt", {"data": 0.026}, [3.0])
        bench_quantize.add_floors(row, 1000, 2, [3000.0])
        rows.append(row)
    shown = {"rows": rows, "missing": {}, "targets": [], "seconds": 1.0}
    (verdict,) = bench_targets.judge("quantize", shown)
    assert (verdict["what"], verdict["value"]) == ("over two reads 8192x4096 bfloat16", 1.5)
    table = bench_report.mode_report("quantize", shown)
    assert re.search(r"^tensorwise +8192x4096 bfloat16 +3\.0", table, re.MULTILINE)
    assert re.search(r"^rowwise +8192x4096 bfloat16 +3\.0", table, re.MULTILINE)


def test_the_table_marks_the_best_peer_of_each_case() -> None:
    shown = result("1x2x3", "fwd", bf16=1.0, fp8lt=1.6, te_block=1.1, scaled_mm=0.9)
    table = bench_report.mode_report("layer", shown)
    assert [line.split()[0] for line in table.splitlines() if "x*" in line] == ["te-block"]


def test_the_peak_of_a_layer_is_shown_and_compared_with_compiled_peers() -> None:
    shown = result("1x2x3", "fwd+bwd", bf16=1.0, fp8lt=1.6, scaled_mm_compiled=1.1)
    shown["rows"][2]["contender"] = "scaled_mm-compiled"
    for row, mib in zip(shown["rows"], (9, 5, 6), strict=True):
        row["peak_bytes"] = mib * 2**20
    shown = {**shown, "parts": []}
    assert re.search(r"^fp8lt +5$", bench_report.mode_report("layer", shown), re.MULTILINE)
    (verdict,) = bench_targets.judge("layer", shown)
    assert (verdict["value"], verdict["met"]) == (5, True)
    assert verdict["target"] == pytest.approx(6, rel=0.002)


def test_the_recipes_that_are_to_be_as_fast_are_compared_round_by_round() -> None:
    rows = [
        bench_core.make_row("1x2x3", "fwd+bwd", name, {}, times)
        for name, times in (
            ("bf16", [200.0, 210.0, 220.0]), ("fp8lt", [100.0, 110.0, 120.0]),
            ("fp8lt-delayed", [100.0, 100.0, 100.0]), ("fp8lt-rowwise_folded", [125.0] * 3),
        )
    ]  # fmt: skip
    found = bench_targets.judge("layer", {"rows": rows, "missing": {}})
    assert [(v["what"], v["value"], v["met"]) for v in found] == [
        ("fp8lt-delayed 1x2x3 over tensorwise", 1.1, True),
        ("fp8lt-rowwise_folded 1x2x3 over tensorwise", 0.88, False),
    ]


def test_the_model_mode_shows_where_the_time_goes() -> None:
    shown = result("eager", "fwd+bwd", bf16=1.0, fp8lt=1.6)
    for row in shown["rows"]:
        row |= {"peak_bytes": None, "parts": None}
    assert "profiled" not in bench_report.mode_report("model", shown)
    times = {"gemms_us": 25, "quantise_us": 7, "other_us": 17, "idle_us": 1, "host_us": 46}
    shown["rows"][1]["parts"] = times
    table = bench_report.mode_report("model", shown)
    assert re.search(r"^fp8lt +25 +7 +17 +1 +46$", table, re.MULTILINE)


def test_the_plot_is_drawn_even_where_everything_failed(tmp_path: Path) -> None:
    shown = result("1x2x3", "fwd+bwd", bf16=1.0, fp8lt=None)
    failed = {"case": "1x2x3", "contender": "fp8lt", "status": "failed", "reason": "x"}
    bench_plot.plot({**shown, "parts": [failed]}, "no device", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_finer_scales_have_a_panel_of_their_own_where_they_ran(tmp_path: Path) -> None:
    def labels(*names: str) -> dict[str, list[str]]:
        rows = [
            {**bench_core.make_row("1x2x3", "fwd+bwd", name, {}, [1.0]), "ratio": ratio}
            for name, ratio in [("bf16", 1.0), *((name, 1.5) for name in names), ("te-block", None)]
        ]
        bench_plot.plot({"rows": rows, "parts": []}, "no device", tmp_path / "x.png")
        found = bench_plot.panels(rows).items()
        return {label: [row["contender"] for row in some] for label, some in found}

    assert labels("fp8lt", "te-delayed") == {"a scale per tensor": ["fp8lt", "te-delayed"]}
    assert labels("fp8lt", "fp8lt-rowwise", "torchao-rowwise", "fp8lt-blockwise") == {
        "a scale per tensor": ["fp8lt"],
        "a scale per row or block": ["fp8lt-rowwise", "torchao-rowwise", "fp8lt-blockwise"],
    }
    assert labels("fp8lt-rowwise") == {"a scale per row or block": ["fp8lt-rowwise"]}


def test_every_contender_has_a_colour_of_its_own() -> None:
    names = [contender.name for contender in bench_peers.TRAINING if contender.name != "bf16"]
    assert set(names) == set(bench_plot.COLOURS)
    assert len(set(bench_plot.COLOURS.values())) == len(names)
