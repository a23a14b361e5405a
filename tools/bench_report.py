"""How the benchmark shows its measurements: tables for people, from the JSON document alone."""

from collections.abc import Sequence
from typing import Any

from bench_core import Result, Row
from bench_targets import best, is_peer

TITLES = {
    "layer": "us and speed-up over bf16",
    "gemm": "us and speed-up over cuBLASLt's first heuristic",
    "host": "host us per call and time over bf16's",
    "decode": "us and speed-up over bf16",
    "sizes": "speed-up over bf16",
    "model": "us and speed-up over bf16 in the same mode",
    "step": "us and speed-up over bf16 in the same mode",
    "nanochat12": "us and speed-up over bf16 in the same mode",
    "nanochat24": "us and speed-up over bf16 in the same mode",
}


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return the rows as lines of aligned columns, the first `left` ones flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def cell(row: Row | None, star: bool) -> str:
    """Show one measurement: its time and ratio, or that there is none."""
    if row is None:
        return "-"
    if row["us"] is None:
        return row["status"].upper()
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}x"
    us = f"{row['us']:.1f}" if row["us"] < 100 else f"{row['us']:,.0f}"
    return f"{us} {ratio:>6}{'*' if star else ' '}"


def unique(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))


def phase_table(mode: str, rows: list[Row], phase: str) -> list[str]:
    """Return contenders x cases of one phase, the best peer of each case marked."""
    rows = [row for row in rows if row["phase"] == phase]
    at = {(row["contender"], row["case"]): row for row in rows}
    cases = unique(row["case"] for row in rows)
    stars = [
        best([row for row in rows if row["case"] == case], mode == "host", is_peer)
        for case in cases
    ]  # fmt: skip
    errors = unique(name for row in rows for name in row["errors"])
    memory = mode == "model"  # its cases have contenders of their own: one column will do
    table = [(phase, *cases, *["peak GiB"] * memory, *(f"err {name}" for name in errors))]
    for name in unique(row["contender"] for row in rows):
        mine = [at.get((name, case)) for case in cases]
        shown = [
            cell(row, row is not None and row is star)
            for row, star in zip(mine, stars, strict=True)
        ]  # fmt: skip
        peak = [gib(mine[0]["peak_bytes"] if mine[0] else None)] if memory else []
        table.append((name, *shown, *peak, *(largest_error(mine, error) for error in errors)))
    return aligned(table)


def memory_table(rows: list[Row], phase: str) -> list[str]:
    """Return contenders x cases: the peak of one call above w, x and dy, in MiB."""
    rows = [row for row in rows if row["phase"] == phase and row.get("peak_bytes") is not None]
    if not rows:
        return []
    at = {(row["contender"], row["case"]): row["peak_bytes"] / 2**20 for row in rows}
    cases = unique(row["case"] for row in rows)
    table: list[Sequence[str]] = [(f"{phase}, peak MiB", *cases)]
    for name in unique(row["contender"] for row in rows):
        sizes = [at.get((name, case)) for case in cases]
        table.append((name, *("-" if size is None else f"{size:,.0f}" for size in sizes)))
    return aligned(table)


def gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f}"


def largest_error(rows: Sequence[Row | None], name: str) -> str:
    found = [row["errors"][name] for row in rows if row and name in row["errors"]]
    # Not max alone: it may lose a NaN.
    worst = next((e for e in found if e != e), None) or max(found, default=None)
    return "-" if worst is None else f"{worst:.2g}"


def quantize_table(rows: list[Row]) -> list[str]:
    head = (
        "quantise", "matrix", "us", "GB/s", "one-read floor us", "over it",
        "two-read floor us", "over it", "copy GB/s", "err",
    )  # fmt: skip
    table: list[Sequence[str]] = [head]
    for row in rows:
        error = f"{row['errors'].get('data', float('nan')):.2g}"
        if row["status"] != "ok":
            table.append((row["phase"], row["case"], row["status"].upper(), *["-"] * 6, error))
            continue
        table.append((
            row["phase"], row["case"], f"{row['us']:.1f}", f"{row['gb_per_s']:,.0f}",
            f"{row['one_read_us']:.1f}", f"{row['over_one_read']:.2f}x",
            f"{row['two_reads_us']:.1f}", f"{row['over_two_reads']:.2f}x",
            f"{row['copy_gb_per_s']:,.0f}", error,
        ))  # fmt: skip
    return aligned(table, left=2)


def parts_table(parts: list[Row]) -> list[str]:
    table: list[Sequence[str]] = [
        ("where the time goes, us", "fwd+bwd", "GEMMs", "quantise", "host gap", "GEMMs' share")
    ]
    for part in parts:
        who = (part["contender"], part["case"])
        if part["status"] != "ok":
            table.append((*who, "FAILED", "-", "-", "-"))
            continue
        times = (part["gemms_us"], part["quantise_us"], part["host_gap_us"])
        table.append((*who, *(f"{t:,.0f}" for t in times), f"{part['gemm_share']:.2f}"))
    return aligned(table, left=2)


def model_parts_table(rows: list[Row]) -> list[str]:
    measured = [row for row in rows if row["parts"]]
    if not measured:
        return []
    kinds = ("gemms_us", "quantise_us", "other_us", "idle_us", "host_us")
    head = ("GEMMs", "quantise", "other kernels", "no kernel", "host, not profiled")
    table: list[Sequence[str]] = [("where the time goes, profiled, us", *head)]
    for row in measured:
        table.append((row["contender"], *(f"{row['parts'][kind]:,.0f}" for kind in kinds)))
    return aligned(table)


def sizes_table(rows: list[Row]) -> list[str]:
    """Return shapes x contenders: the speed-ups of each phase."""
    columns = unique((r["contender"], r["phase"]) for r in rows if r["contender"] != "bf16")
    at = {(row["case"], row["contender"], row["phase"]): row["ratio"] for row in rows}
    size = {row["case"]: row["size"] for row in rows}
    table: list[Sequence[str]] = [
        ("fwd+bwd, or (host hidden)", "size", *unique(name for name, _ in columns))
    ]
    for case in sorted(size, key=size.__getitem__):
        cells: dict[str, str] = {}
        for name, phase in columns:
            ratio = at.get((case, name, phase))
            shown = "-" if ratio is None else f"{ratio:.2f}x"
            cells[name] = f"{cells[name]} ({shown})" if name in cells else shown
        table.append((case, f"{size[case]:.0f}", *cells.values()))
    return aligned(table)


def rules_table(rules: list[dict[str, Any]]) -> list[str]:
    table: list[Sequence[str]] = [
        ("FP8 from a size on", "phase", "size", "shapes", "wrong", "loss", "at worst")
    ]
    for rule in rules:
        table.append((
            rule["contender"], rule["phase"], f"{rule['least_size']:.0f}", str(rule["shapes"]),
            str(rule["wrong"]), f"{rule['mean_loss']:.1%}", f"{rule['worst_loss']:.1%}",
        ))  # fmt: skip
    return aligned(table, left=2)


def tokens_table(rows: list[Row]) -> list[str]:
    table: list[Sequence[str]] = [("tokens/s", "")]
    for row in rows:
        if row["us"] is not None:
            table.append((row["contender"], f"{row['tokens'] / row['us'] * 1e6:,.0f}"))
    return aligned(table)


def backward_table(rows: list[Row]) -> list[str]:
    measured = [row for row in rows if row["backward_gemms_us"]]
    if not measured:
        return []
    table: list[Sequence[str]] = [("GEMMs of backward, profiled", "us", "speed-up")]
    for row in measured:
        ratio = f"{row['backward_gemms_ratio']:.2f}x"
        table.append((row["contender"], f"{row['backward_gemms_us']:,.0f}", ratio))
    return aligned(table)


def target_table(verdicts: list[dict[str, Any]]) -> list[str]:
    head = ("target", "measured", "wanted", "verdict", "best peer", "best dynamic peer")
    table: list[Sequence[str]] = [head]
    for v in verdicts:
        peers = [
            f"{peer['ratio']:.2f}x {peer['contender']}" if peer else "-"
            for peer in (v.get("best_peer"), v.get("best_dynamic_peer"))
        ]
        value = "-" if v["value"] is None else f"{v['value']:.2f}"
        wanted = f"{'<=' if v['less'] else '>='} {v['target']:.2f}"
        met = {True: "met", False: "missed", None: "not measured"}[v["met"]]
        table.append((v["what"], value, wanted, met, *peers))
    return aligned(table)


def notes(result: Result) -> list[str]:
    """Say every failure with its reason, once, and what is missing."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in [*result["rows"], *result.get("parts", [])]:
        if row["status"] != "ok":
            key = row["contender"], row["status"].upper(), row["reason"]
            where = f"{row['case']} {row.get('phase', 'profiled')}"
            reasons.setdefault(key, []).append(where)
    lines = [
        f"{name} {status} at {', '.join(where)}: {why}"
        for (name, status, why), where in reasons.items()
    ]
    return lines + [f"{name} is missing: {why}" for name, why in result["missing"].items()]


def mode_report(mode: str, result: Result) -> str:
    """Return all tables of one mode."""
    rows = result["rows"]
    blocks = []
    if mode == "quantize":
        blocks.append(quantize_table(rows))
    elif mode == "sizes":
        blocks += [sizes_table(rows), rules_table(result.get("rules", []))]
    elif mode == "model":  # each case has contenders of its own
        for case in unique(row["case"] for row in rows):
            mine = [row for row in rows if row["case"] == case]
            blocks += [phase_table(mode, mine, "fwd+bwd"), model_parts_table(mine)]
    elif mode == "step":
        for case in unique(row["case"] for row in rows):
            mine = [row for row in rows if row["case"] == case]
            blocks += [phase_table(mode, mine, "step"), model_parts_table(mine)]
            blocks += [backward_table(mine)]
    elif mode.startswith("nanochat"):
        for case in unique(row["case"] for row in rows):
            mine = [row for row in rows if row["case"] == case]
            blocks += [phase_table(mode, mine, "step"), tokens_table(mine)]
            blocks += [model_parts_table(mine)]
    else:
        blocks += [phase_table(mode, rows, phase) for phase in unique(r["phase"] for r in rows)]
    if "parts" in result:
        blocks += [parts_table(result["parts"]), memory_table(rows, "fwd+bwd")]
    if result["targets"]:
        blocks.append(target_table(result["targets"]))
    if lines := notes(result):
        blocks.append(lines)
    if "failure" in result:
        blocks.append([f"FAILED: {result['failure']}"])
    title = TITLES.get(mode, "into both layouts, device time")
    star = "; * best peer" if any(is_peer(row) for row in rows) else ""
    head = f"== {mode}: {title}{star} ({result['seconds']:.0f} s)"
    return "\n\n".join("\n".join(block) for block in [[head], *blocks] if block)
