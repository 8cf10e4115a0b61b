"""What a search over rates has found: a table of the best trials, and whether they are better."""

from __future__ import annotations

from collections import Counter

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedminimax.report.tables import number_text
from fedminimax.tuning.search import CUT_OFF, Found, Search, Trial

SHOWN = 5


def trial_line(search: Search, trial: Trial) -> str:
    """One trial, while the search goes on."""
    tried = ", ".join(f"{key} = {number_text(value)}" for key, value in trial.values.items())
    ended = trial.outcome if trial.value is None else f"{search.metric} {number_text(trial.value)}"
    given = " (the settings given)" if trial.number == 0 else ""
    return f"trial {trial.number}/{search.trials - 1}{given}: {tried}: {ended}"


def trials_table(search: Search, found: Found) -> Table:
    """The best trials, and the settings given, by the last validation metric."""
    table = Table(
        title=f"validation {search.metric} ({'higher' if search.larger else 'lower'} is better)",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    judged = f"mean of {search.cuts} cuts" if search.cuts > 1 else search.metric
    for heading in ("trial", *search.given, judged):
        table.add_column(heading, justify="right")
    ended = [trial for trial in found.trials if trial.value is not None]
    ended.sort(key=lambda trial: trial.value or 0.0, reverse=search.larger)
    for trial in ended[:SHOWN] + [trial for trial in ended[SHOWN:] if trial.number == 0]:
        name = "0, given" if trial.number == 0 else str(trial.number)
        tried = (number_text(trial.values[key]) for key in search.given)
        table.add_row(name, *tried, number_text(trial.value))
    return table


def counted(found: Found) -> str:
    """How the trials ended."""
    ends = Counter(
        "came to their end"
        if trial.value is not None
        else "were cut off"
        if trial.outcome.startswith(CUT_OFF)
        else "broke down"
        for trial in found.trials
    )
    return f"{len(found.trials)} trials: " + ", ".join(f"{n} {end}" for end, n in ends.items())


def verdict(found: Found) -> str:
    """Did the search improve on the settings given? In one sentence."""
    if found.best is None:
        return "did not improve on the settings given: no trial came to its end"
    if found.broken is not None and found.broken.number == 0:
        return f"improved on the settings given, which broke down: {found.broken.outcome}"
    if found.broken is not None:
        return (
            f"did not improve on the settings given: trial {found.best.number} broke down when it "
            f"was repeated: {found.broken.outcome}"
        )
    if found.gain is None:
        return "did not improve on the settings given: no trial was better"
    gain, seeds = found.gain, f"over {found.gain.pairs} repeats with other seeds"
    interval = f"95 % interval {gain.low:+.4f} to {gain.high:+.4f}, {seeds}"
    if (gain.low or 0.0) > 0:
        return f"improved on the settings given by {gain.mean:.4f} ({interval})"
    chance = " by more than chance" if gain.mean > 0 else ""
    return f"did not improve on the settings given{chance}: {gain.mean:+.4f} ({interval})"
