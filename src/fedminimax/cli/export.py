"""fedminimax export: a finished run's model as one file for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedminimax.data.sites import listed
from fedminimax.report.export import export


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("folder", type=Path, metavar="RUN")
    parser.add_argument(
        "file", type=Path, help="where to write: .onnx, or .pt2 for torch.export.load"
    )
    parser.add_argument(
        "--last",
        action="store_true",
        help="the model of the last round, not of the best by validation",
    )


def command(options: argparse.Namespace) -> int:
    """Writes the file, and says what it takes."""
    columns = export(options.folder, options.file, False if options.last else None)
    print(
        f"model: {options.file}; its scores are those of fedminimax predict, on rows drawn for it"
    )
    print(
        f"it takes rows of {len(columns)} numbers, NaN where one is missing: {listed(columns, 8)}"
    )
    return 0
