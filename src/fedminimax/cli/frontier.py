"""fedminimax frontier: portfolio runs against the efficient frontier of their data."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedminimax.report import portfolio


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("-o", "--output", type=Path, help="also write the page, and a figure, here")


def command(options: argparse.Namespace) -> int:
    """Prints the page, or writes it with its figure."""
    samples = portfolio.placed(options.folders)
    if options.output is None:
        print(portfolio.page(samples), end="")
        return 0
    figure = options.output.with_suffix(".svg")
    if figure == options.output:
        raise ValueError(f"{figure} is where the figure goes: give the page another name")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    portfolio.draw(samples, figure)
    text = portfolio.page(samples, figure.name)
    print(text, end="")
    options.output.write_text(text, encoding="utf-8")
    return 0
