"""A comparison's records as Markdown: speeds, the goals, start and memory.

python benchmarks/report.py benchmarks/results/DATE-COMMIT.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from goals import OURS, Figures, Goal, goals, over

NO_SPEED = ("warm-up", "ready", "end", "first token")


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(map(row, [heads, ["---"] * len(heads), *rows]))


def speeds(runs: list[dict[str, Any]]) -> str:
    """Output tokens per second of each contender, then ours over each peer's."""
    figures = Figures(runs)
    peers = figures.contenders[1:]
    labels = dict.fromkeys(record["label"] for run in runs for record in run["records"])
    rows = []
    for label in labels:
        if any(text in label for text in NO_SPEED):
            continue
        ours = figures.of(OURS, label)
        theirs = [figures.of(peer, label) for peer in peers]
        cells = [f"{number:.1f}" if number else "-" for number in (ours, *theirs)]
        ratios = [over(ours, number) for number in theirs]
        rows.append([label, *cells, *(f"{ratio:.2f}" if ratio else "-" for ratio in ratios)])
    return table(["workload", OURS, *peers, *(f"÷ {peer}" for peer in peers)], rows)


def goal_table(found: list[Goal]) -> str:
    heads = ["goal", "ours", "compared with", "ratio", "wanted", ""]
    return table(
        heads,
        [
            [goal.case, goal.ours, goal.against, goal.shown_ratio, goal.wanted, goal.verdict]
            for goal in found
        ],
    )


def extremes(runs: list[dict[str, Any]]) -> str:
    """Start-up, memory and waste: one line per contender, of its first run."""
    lines = {}
    for run in runs:
        records = {record["label"]: record for record in run["records"]}
        ready, end = records.get("ready"), records.get("end")
        if ready and end and run["contender"] not in lines:
            text = f"ready in {ready['seconds']} s, {end['pss_mb']} MiB resident at the end"
            if "kv_resident_mb" in end:
                text += f", of it at least {end['kv_resident_mb']:.0f} KV pool"
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
    found = goals(Figures(runs), result.get("roof_tok_s"))
    return "\n\n".join((head, speeds(runs), goal_table(found), extremes(runs)))


if __name__ == "__main__":
    print(report(json.loads(Path(sys.argv[1]).read_text())))
