"""A comparison's records as a Markdown table: medians, and how many times as fast as each peer.

python benchmarks/report.py benchmarks/results/DATE-COMMIT.json
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

OURS = "loraplex"
SKIPPED = ("warm-up", "ready", "end")


def medians(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Label -> contender -> median output tokens per second, over runs without an error."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for record in run["records"]:
            if record["label"] not in SKIPPED and not record["errors"]:
                values[record["label"]][run["contender"]].append(record["output_tok_s"])
    return {
        label: {name: statistics.median(numbers) for name, numbers in of.items()}
        for label, of in values.items()
    }


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(runs: list[dict[str, Any]]) -> str:
    """Output tokens per second of each contender, then ours over each peer's."""
    peers = list(dict.fromkeys(run["contender"] for run in runs if run["contender"] != OURS))
    heads = ["workload", OURS, *peers, *(f"÷ {peer}" for peer in peers)]
    lines = [row(heads), row(["---"] * len(heads))]
    for label, found in medians(runs).items():
        ours = found.get(OURS)
        numbers = [ours, *(found.get(peer) for peer in peers)]
        ratios = [ours / found[peer] if ours and found.get(peer) else None for peer in peers]
        cells = [f"{number:.1f}" if number else "-" for number in numbers]
        cells += [f"{ratio:.2f}" if ratio else "-" for ratio in ratios]
        lines.append(row([label, *cells]))
    return "\n".join(lines)


def extremes(runs: list[dict[str, Any]]) -> str:
    """Start-up, memory and waste: one line per contender, of its first run."""
    lines = {}
    for run in runs:
        records = {record["label"]: record for record in run["records"]}
        ready, end = records.get("ready"), records.get("end")
        if ready and end and run["contender"] not in lines:
            text = f"ready in {ready['seconds']} s, {end['rss_mb']} MiB resident at the end"
            if "waste_mean" in end:
                text += f", KV waste {end['waste_mean']:.2%} (peak {end['waste_peak']:.2%})"
            lines[run["contender"]] = f"- {run['contender']}: {text}"
    return "\n".join(lines.values())


def report(result: dict[str, Any]) -> str:
    machine, runs = result["machine"], result["runs"]
    head = (
        f"Commit {result['commit']}, {result['date']}, {result['repeats']} repeats, medians. "
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB. "
        + ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    )
    return "\n\n".join((head, table(runs), extremes(runs)))


if __name__ == "__main__":
    print(report(json.loads(Path(sys.argv[1]).read_text())))
