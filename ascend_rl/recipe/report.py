"""Report what a run did, from verl's metrics.jsonl: a table, report.json and report.png.

python -m ascend_rl.report outputs/gspo_qwen3_tiny_cpu [outputs/grpo_qwen3_tiny_cpu]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ascend_rl.recipe import report_page
from ascend_rl.recipe.report_figures import as_json, dies, predicted, read_run, shortfalls, summarise, table
from ascend_rl.recipe.report_plots import plot
from ascend_rl.settings.numbers import real


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_rl.report",
        description="Table, report.json and report.png of a run, with --html also report.html.",
        epilog="""Examples:
  python -m ascend_rl.report outputs/gspo_qwen3_tiny_cpu
  python -m ascend_rl.report outputs/new outputs/old                # both in one picture
  python -m ascend_rl.report outputs/new outputs/old --html         # one page, also with warnings

Writes report.json, report.png and, with --html, report.html into the directory of the (first) run.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", type=Path, nargs="+", help="directory with metrics.jsonl; more to compare it with"
    )
    parser.add_argument("--html", action="store_true", help="write one page that needs no other file")
    parser.add_argument("--wall", type=real(), metavar="S", help="how long the whole run took")
    parser.add_argument(
        "--min-reward",
        type=real(-1e12),
        default=0,
        metavar="R",
        help="fail below this final or held-out reward",
    )
    parser.add_argument(
        "--max-probs-diff", type=real(), metavar="D", help="fail if rollout and trainer differed by more"
    )
    args = parser.parse_args()
    run = args.run[0]
    runs = [(one.resolve().name, read_run(one)) for one in args.run]
    report = summarise(runs[0][1], args.wall, predicted(run, runs[0][1]))
    if watched := dies(run):
        report["dies"] = watched
    (run / "report.json").write_text(as_json(report))
    plot(runs, run / "report.png")
    print(table(report))
    if warned := watched.get("warnings"):
        print(f"\nWarnings of dies ({len(warned)}), the last one: {warned[-1]}")
    print(f"\n{run / 'report.png'}\n{run / 'report.json'}")
    if args.html:
        page = report_page.page(
            args.run, [rows for _, rows in runs], args.wall, report["predicted_s"], watched
        )
        (run / "report.html").write_text(page)
        print(run / "report.html")
    if problems := shortfalls(report, args.min_reward, args.max_probs_diff):
        sys.exit("\n".join(f"FAILED: {problem}" for problem in problems))
