"""fedminimax report: runs as one page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedminimax.report import card, html, quality, tracking
from fedminimax.report.figures import draw_charts
from fedminimax.report.runs import grouped, runs_in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="RUN", help="a run's folder, or one that has some"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="the page (report.html)"
    )
    parser.add_argument(
        "--card",
        action="store_true",
        help="a model card, model-card.md and .html, into the folder of each finished run",
    )
    parser.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="the charts also as SVG and PNG"
    )
    for name in ("tensorboard", "mlflow"):
        parser.add_argument(
            f"--{name}", type=Path, metavar="FOLDER", help=f"the records also for {name}, as files"
        )


def command(options: argparse.Namespace) -> int:
    """Writes the page, and what else is asked for."""

    def left_out(why: str) -> None:
        print(f"note: left out: {why}", file=sys.stderr)

    groups = grouped(runs_in(options.folders, left_out))
    asks = quality.ask_all(groups)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(html.page(groups, asks), encoding="utf-8")
    print(f"report: {options.output}")
    if options.card:
        for run in (run for group in groups for run in group.runs if run.finished):
            print(f"model card: {' and '.join(map(str, card.write(run)))}")
    if options.figures is not None:
        drawn = draw_charts(html.figures(groups, asks), options.figures)
        print(f"figures: {len(drawn)} files in {options.figures}")
    if options.tensorboard is not None:
        count = tracking.to_tensorboard(groups, options.tensorboard)
        print(f"tensorboard: {count} runs in {options.tensorboard}")
    if options.mlflow is not None:
        count = tracking.to_mlflow(groups, options.mlflow)
        print(f"mlflow: {count} runs in {options.mlflow}")
    return 0
