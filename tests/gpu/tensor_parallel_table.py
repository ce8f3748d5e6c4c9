"""The table that tensor_parallel.py prints of its results.

Knows the form of the results; measures nothing.
"""

from __future__ import annotations

from typing import Any

PER_STEP = {"qwen3-14b": 81, "qwen3-32b": 129}  # all-reduces of a step: two a layer, the embedding


def show(results: dict[str, Any]) -> None:
    """Prints what is there."""
    good = {name: result for name, result in results.items() if "error" not in result}
    for name in sorted(set(results) - set(good)):
        result = dict(results[name])
        error, log = result.pop("error"), result.pop("log", [])
        print(f"\n{name}: {error} {result or ''}", *log, sep="\n    ")
    for name, result in good.items():
        if name.startswith("ar-") and "us" in result:
            show_all_reduce(result)
    show_tokens({n: r for n, r in good.items() if n.startswith("tokens-")})
    show_forms({n: r for n, r in good.items() if n.startswith("forms-")})
    show_offline(good)
    for name in sorted(name for name in good if name.startswith("loss-")):
        print(f"\nlost ranks, {name}:")
        for what, value in good[name].items():
            if what not in ("log", "streams"):
                print(f"  {what}: {value}")


def show_all_reduce(result: dict[str, Any]) -> None:
    print(f"\nall-reduce over {result['ranks']} GPUs, us (custom: {result['custom']})")
    for rows, times in result["us"].items():
        line = "  ".join(f"{way} {us}" for way, us in times.items())
        print(f"  {rows:>5} rows of 10,240 bytes: {line}")
    if "norm_us" in result:
        print("the same with residual and norm; each 100 times 16 calls right if nothing is said")
    for rows, times in result.get("norm_us", {}).items():
        line = "  ".join(f"{way} {us}" for way, us in times.items())
        print(f"  {rows:>5} rows: {line}")


def show_tokens(results: dict[str, Any]) -> None:
    ones = [results.pop(name) for name in list(results) if name.startswith("tokens-1-")]
    if not ones:
        return
    alone = {model: ids for one in ones for model, ids in one.items() if model != "gaps"}
    alone["gaps"] = {model: gaps for one in ones for model, gaps in one["gaps"].items()}
    print("\nequal tokens; where the first differences are, how far the two best logits are apart")
    for name, result in results.items():
        for model in sorted(set(result) - {"seconds"}):
            usual = model.replace(" moe-ep", "")
            if usual in alone:
                gaps = alone["gaps"].get(usual)
                print(f"{name} {model}: {differences(result[model], alone[usual], gaps)}")


def show_forms(results: dict[str, Any]) -> None:
    """Requests with forms: how many end as those of one rank do."""
    alone = results.pop("forms-1", None)
    for name, result in results.items() if alone else ():
        for way in ("greedy", "sampled"):
            pairs = list(zip(result[way], alone[way], strict=True))
            print(f"{name}, {way}: {sum(a == b for a, b in pairs)} of {len(pairs)} equal")


def differences(ids: Any, usual_ids: Any, gaps: Any) -> str:
    """How many requests are equal, and of the others the position of the first difference with the
    gap there, as a part of the logits' range; "?" if the other id is not the second best. `gaps`:
    None where ids are drawn.
    """
    said, largest = [], 0.0
    for row, (one, other) in enumerate(zip(ids, usual_ids, strict=True)):
        if one != other:
            at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
            if gaps is None:
                said.append(str(at))
                continue
            gap, second = gaps[row][at]
            largest = max(largest, abs(gap))
            said.append(f"{at}: {gap:.2%}{'' if second == one[at] else '?'}")
    equal = f"{len(ids) - len(said)} of {len(ids)} equal"
    if gaps is not None and said:
        equal += f"; largest gap {largest:.2%}"
    return f"{equal}; {', '.join(said)}" if said else equal


def show_offline(results: dict[str, Any]) -> None:
    runs = {name: r for name, r in results.items() if "tokens_per_s" in r}
    alone = next((r for r in runs.values() if r["tp"] == r["dp"] == 1), None)
    print(
        f"\n{'':16}{'tokens/s':>10}{'times':>7}{'idle':>7}{'step ms':>9}{'tbt 1/8/32/256 ms':>32}"
    )
    for name, run in runs.items():
        times = ""
        if alone is not None and alone["shape"] == run["shape"]:
            times = f"{run['tokens_per_s'] / alone['tokens_per_s']:.2f}"
        steps = max(run["steps"].values())
        gaps = " / ".join(f"{gap:.2f}" for gap in run["tbt_ms"].values())
        print(
            f"{name:16}{run['tokens_per_s']:10.0f}{times:>7}{run['idle_share']:7.1%}"
            f"{run['busy'] / steps * 1e3:9.2f}{gaps:>32}"
        )
        shares(run, results)


def shares(run: dict[str, Any], results: dict[str, Any]) -> None:
    """How much of a step all-reduces of 256 rows take, by what they take alone."""
    times = results.get(f"ar-{run['tp']}", {}).get("us", {})
    each = times.get("256", times.get(256))
    if each is None or run["shape"] not in PER_STEP:
        return
    usual = min((v for v in each.values() if isinstance(v, float)), default=0.0)
    us = each["nccl"] if run["all_reduce"] == "nccl" else usual
    count, step = PER_STEP[run["shape"]], run["tbt_ms"]["256"] * 1e3
    share = f"{count * us / step:.0%} of a step of 256 rows"
    print(f"{'':16}all-reduces: {count} x {us:.1f} us, {share}")
