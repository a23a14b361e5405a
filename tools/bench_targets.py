"""What fp8lt is meant to reach on an H200, and whether a run did.

Ratios are to eager bf16 `F.linear` in the same run unless the line says otherwise.
"""

import statistics
from collections.abc import Callable
from typing import Any

from bench_core import Result, Row, family
from bench_timing import ratios

DYNAMIC_EXCEPT = ("te-delayed",)  # every other peer takes its scales from the tensor at hand
OURS = ("fp8lt", "bf16", "first heuristic")  # how the names begin that are no peers

# (case, phase, contender) -> ratio: at least; in `host` at most
TARGETS: dict[str, dict[tuple[str, str, str], float]] = {
    "layer": {
        ("8192x4096x4096", "fwd+bwd", "fp8lt"): 1.55,
        ("8192x4096x14336", "fwd+bwd", "fp8lt"): 1.62,
        ("8192x14336x4096", "fwd+bwd", "fp8lt"): 1.62,
        ("16384x1536x6144", "fwd+bwd", "fp8lt"): 1.35,
        ("8192x4096x4096", "fwd+bwd", "fp8lt-delayed"): 1.60,
        ("8192x4096x14336", "fwd+bwd", "fp8lt-delayed"): 1.68,
        ("8192x14336x4096", "fwd+bwd", "fp8lt-delayed"): 1.68,
        ("16384x1536x6144", "fwd+bwd", "fp8lt-delayed"): 1.42,
        ("8192x4096x4096", "fwd+bwd", "fp8lt-rowwise"): 1.40,
        ("8192x4096x4096", "fwd+bwd", "fp8lt-blockwise"): 1.30,
        ("512x4096x4096", "fwd+bwd", "fp8lt"): 0.75,
        ("512x4096x4096", "fwd+bwd", "fp8lt-reused"): 0.9,
    },
    "host": {("16x512x512", "fwd+bwd", "fp8lt"): 1.3},
    "decode": {
        ("16x8192x8192", "fwd", "fp8lt-reused"): 1.3,
        ("16x8192x8192", "fwd, host hidden", "fp8lt-reused"): 1.3,
    },
    "model": {
        ("eager", "fwd+bwd", "fp8lt"): 1.45,
        ("compiled", "fwd+bwd", "fp8lt-compiled"): 1.48,
    },
    "step": {
        ("eager", "step", "fp8lt"): 1.2,
        ("compiled", "step", "fp8lt-compiled"): 1.2,
        ("graphed", "step", "fp8lt-graphed"): 1.2,
    },
}
# The layer of these takes no longer than tensorwise's, in any case: one read less, or finer scales.
AS_FAST = ("fp8lt-delayed", "fp8lt-rowwise_folded")
# Than the first heuristic, every GEMM. Where the rule takes the same kernel (dx, dw), runs on an
# H200 have given 0.98 to 1.01.
NO_WORSE = 0.98
GEMM_SHARE = {"8192x4096x14336": 0.85, "8192x14336x4096": 0.85}
OVER_TWO_READS = dict.fromkeys(
    ("8192x4096 bfloat16", "8192x14336 bfloat16", "16384x1536 bfloat16"), 1.25
)
LEAN_PEERS = ("scaled_mm-compiled", "torchao-tensorwise-compiled")  # the layer's memory: no more
VECTORS = 1.001  # but for the scales: 4 bytes a row
BACKWARD_GEMMS = 1.54  # of `step`, over bf16's
PEAK_GIB = 6.08  # of `model`, eager and compiled: what compiled nanochat and torchao take


def is_peer(row: Row) -> bool:
    return not row["contender"].startswith(OURS)


def rival_of(contender: str) -> Callable[[Row], bool]:
    """Return what accepts the peers of one of ours: of the same recipe, if its scales are finer.

    Tensorwise has the smallest claim to accuracy: it is compared with every peer.
    """
    kind = family(contender)
    return lambda row: is_peer(row) and kind in ("tensorwise", family(row["contender"]))


def best(rows: list[Row], less: bool, accept: Callable[[Row], bool]) -> Row | None:
    """Return the row with the best ratio among those accepted."""
    measured = [row for row in rows if row["ratio"] is not None and accept(row)]
    pick = min if less else max
    return pick(measured, key=lambda row: row["ratio"]) if measured else None


def verdict(what: str, target: float, value: float | None, less: bool) -> dict[str, Any]:
    """Compare one number with its target; what was not measured is not met."""
    met = None if value is None else value <= target if less else value >= target
    return {"what": what, "target": target, "less": less, "value": value, "met": met}


def judge(mode: str, result: Result) -> list[dict[str, Any]]:
    """Return a verdict for every target that this mode's cases have."""
    rows, less = result["rows"], mode == "host"
    verdicts = []
    for (case, phase, name), target in TARGETS.get(mode, {}).items():
        near = [row for row in rows if (row["case"], row["phase"]) == (case, phase)]
        ours = next((row for row in near if row["contender"] == name), None)
        if ours is None:
            continue
        found = verdict(f"{name} {case} {phase}", target, ours["ratio"], less)
        near = [row for row in near if rival_of(name)(row)]
        peer = best(near, less, is_peer)
        dynamic = best(near, less, lambda row: row["contender"] not in DYNAMIC_EXCEPT)
        for key, row in (("best_peer", peer), ("best_dynamic_peer", dynamic)):
            found[key] = row and {"contender": row["contender"], "ratio": row["ratio"]}
        verdicts.append(found)
    return verdicts + judge_others(mode, result)


def judge_as_fast(result: Result) -> list[dict[str, Any]]:
    """Compare the time of tensorwise with that of the recipes that are to be as fast."""
    at = {
        (row["case"], row["contender"]): row["rounds_us"]
        for row in result["rows"]
        if row["phase"] == "fwd+bwd" and row["status"] == "ok"
    }
    found = []
    for case in dict.fromkeys(case for case, _ in at):
        for name in AS_FAST:
            if (case, name) in at and (case, "fp8lt") in at:
                value = statistics.median(ratios(at[case, "fp8lt"], at[case, name]))
                what = f"{name} {case} over tensorwise"
                found.append(verdict(what, 1.0, value, less=False))
    return found


def judge_memory(result: Result) -> list[dict[str, Any]]:
    """Compare the peaks of fp8lt's layer with those of the compiled peers of the same recipe."""
    found = []
    at = {
        (row["case"], row["contender"]): row["peak_bytes"] / 2**20
        for row in result["rows"]
        if row["phase"] == "fwd+bwd" and row.get("peak_bytes") is not None
    }
    for case in dict.fromkeys(case for case, _ in at):
        peers = [at[case, name] for name in LEAN_PEERS if (case, name) in at]
        if peers and (case, "fp8lt") in at:
            most = VECTORS * max(peers)
            found.append(verdict(f"peak MiB {case}", most, at[case, "fp8lt"], less=True))
    return found


def judge_others(mode: str, result: Result) -> list[dict[str, Any]]:
    """Judge what is no ratio to bf16: shares, floors, memory."""
    found = [*judge_as_fast(result), *judge_memory(result)] if mode == "layer" else []
    for part in result.get("parts", []):
        if part["case"] in GEMM_SHARE and part["contender"] == "fp8lt":
            what, share = f"share of the GEMMs {part['case']}", part.get("gemm_share")
            found.append(verdict(what, GEMM_SHARE[part["case"]], share, less=False))
    for row in result["rows"]:
        if mode == "gemm" and row["contender"] == "fp8lt":
            what = f"{row['phase']} {row['case']} over the first heuristic"
            found.append(verdict(what, NO_WORSE, row["ratio"], less=False))
        tensorwise = mode == "quantize" and row["phase"] == "tensorwise"
        if tensorwise and row["case"] in OVER_TWO_READS:
            what, over = f"over two reads {row['case']}", row.get("over_two_reads")
            found.append(verdict(what, OVER_TWO_READS[row["case"]], over, less=True))
        if mode == "step" and row["contender"] in ("fp8lt", "fp8lt-compiled"):
            what, ratio = f"backward GEMMs {row['contender']}", row["backward_gemms_ratio"]
            found.append(verdict(what, BACKWARD_GEMMS, ratio, less=False))
        if mode == "model" and row["contender"].startswith("fp8lt") and row["peak_bytes"]:
            gib = row["peak_bytes"] / 2**30
            what = f"peak GiB {row['contender']}"
            found.append(verdict(what, PEAK_GIB, gib, less=True))
    return found
