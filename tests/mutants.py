"""Planted faults: the fast tests that are named beside each must find it.

    python tests/mutants.py             every fault, in a copy of the tree
    python tests/mutants.py storm wire  those of whose file this is a part

Prints a line per fault, and ends with 1 if one was not found or its text is not there any more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FAST = "not slow and not full"
SITES, MASKS = "tests/remote/test_sites.py", "tests/remote/test_masks.py"
SCAFFOLD = "tests/algorithms/test_identities_server.py::test_scaffold_with_ten_of_a_hundred_arrives"
KEYS = f"{MASKS}::test_a_key_that_is_wrong_in_any_way_is_refused_by_name"
MEANINGS = {0: "NOT FOUND", 1: "found"}  # any other end says nothing about the fault


class Fault(NamedTuple):
    file: str  # in src/fedminimax
    old: str
    new: str
    tests: str


# fmt: off
FAULTS = (
    # methods
    Fault("algorithms/local_sgda.py", "at(self.dual_lr, clock)", "at(self.primal_lr, clock)",
          "tests/algorithms/test_transcriptions.py"),
    Fault("algorithms/codasca.py", "plus(down.control_y, less, client.control_y)",
          "plus(down.control_y, 0 * less, client.control_y)",
          "tests/algorithms/test_transcriptions.py"),
    Fault("algorithms/scaffold.py", "server.control + clock.share * mean.change",
          "server.control + mean.change", SCAFFOLD),
    Fault("algorithms/fess_gda.py", "(x - server.anchor)  # line 15",
          "(server.x - server.anchor)  # line 15",
          "tests/algorithms/test_transcriptions_server.py"),
    Fault("algorithms/local_scgdam.py", "h = [x]", "h = [client.x]",
          "tests/algorithms/test_transcriptions_compositional.py"),
    Fault("blocks/storm.py", "plus_difference(new, 1 - rate,", "plus_difference(new, rate,",
          "tests/algorithms/test_transcriptions_momentum.py"),
    Fault("blocks/projections.py", "(torch.cumsum(ordered, 0) - 1)", "torch.cumsum(ordered, 0)",
          "tests/algorithms/test_transcriptions.py"),
    # engine
    Fault("engine/round.py", "iteration=iteration + drawn,", "iteration=iteration,",
          "tests/algorithms/test_contract.py"),
    Fault("engine/round.py", "return weights / weights.sum()", "return weights",
          "tests/engine/test_engine.py"),
    Fault("engine/round.py", "spent += phase_cost(job, done)", "spent = phase_cost(job, done)",
          "tests/algorithms/test_contract.py"),
    Fault("engine/executors/vectorised.py", "new, client) if job.unequal else new",
          "new, new) if job.unequal else new", "tests/algorithms/test_contract.py"),
    Fault("engine/executors/compiled/graphs.py", "weights[: group.again] = 0", "pass",
          "tests/engine/test_groups.py"),
    Fault("engine/trainer.py", "1 if problem.larger_is_better else -1", "1",
          "tests/engine/test_engine.py"),
    Fault("engine/state/folder.py", 'record["round"] <= round', 'record["round"] < round',
          "tests/engine/test_engine.py::test_a_resumed_run_is_the_uninterrupted_one"),
    Fault("engine/state/disk_store.py", "for number in reversed(later):\n                for undo",
          "for number in later[:0]:\n                for undo", "tests/engine/test_store.py"),
    Fault("data/batches.py", "(1 - padding) / filled[:, None]", "(1 - padding) / rows.shape[1]",
          "tests/data/test_sampling.py"),
    # wire and sites
    Fault("remote/worker.py", "if call < last:", "if call[:1] < last[:1]:",
          f"{SITES}::test_a_late_call_is_not_carried_out"),
    Fault("remote/worker.py", "before = self._start(start)", "before = None",
          f"{SITES}::test_sites_compute_what_the_simulator_does"),
    Fault("remote/wire.py", "blake2s(self.to_bytes()", 'blake2s(Message(self.about, {}).to_bytes()',
          f"{SITES}::test_a_call_with_other_vectors_is_computed_anew"),
    Fault("remote/wire.py", 'letter if letter.isprintable() else "?"', "letter",
          f"{SITES}::test_the_reason_of_a_refusal_is_cut"),
    # masks: none at all, two messages under one, and keys of anybody
    Fault("messages/secure/masks.py", "(np.add if adds else np.subtract)(own, mask, out=own)",
          "pass",
          f"{MASKS}::test_masked_words_are_uniform"),
    Fault("remote/masking.py", "if found != call:", "if False:",
          f"{MASKS}::test_a_site_answers_one_call_for_each_phase_also_after_a_kill"),
    Fault("remote/masking.py", "if found != digest:", "if False:",
          f"{MASKS}::test_the_same_call_with_other_numbers_is_not_sent"),
    Fault("remote/masking.py", "if fingerprint_of(identity) != pinned:", "if False:", KEYS),
    Fault("remote/masking.py", "if not is_signed(", "if False and not is_signed(", KEYS),
    Fault("remote/masking.py", "sorted(map(str, names)) != sorted(known)", "False",
          f"{MASKS}::test_who_is_not_pinned_takes_no_part_and_all_who_are_do"),
    Fault("remote/site.py", "if rows != own:", "if False:",
          f"{MASKS}::test_a_site_trusts_no_sizes_of_the_server_that_would_give_it_another_weight"),
    Fault("remote/calls.py", "max(1, 2 * before)", "max(1, before)",
          f"{SITES}::test_a_site_that_is_lost_is_not_waited_for_every_round_and_comes_back"),
    # metrics
    Fault("metrics/federated_auc.py", "(ordered + shared / 2)", "(ordered + shared)",
          "tests/metrics/test_ranking.py"),
    Fault("metrics/ranking.py", "above.var(ddof=1) / above.size + below", "below",
          "tests/metrics/test_ranking.py"),
    Fault("metrics/calibration.py", "(positives + 1) / (positives + 2)", "1.0",
          "tests/metrics/test_calibration.py"),
    Fault("metrics/optimality.py", "modulus * (at.x - x)", "modulus * at.x",
          "tests/metrics/test_optimality.py"),
    # messages
    Fault("messages/clip.py", "(dual, self.dual_norm)", "(dual, self.norm)",
          "tests/messages/test_messages.py"),
    Fault("messages/robust.py", "(until <= 0.5 + slack)", "(until < 0.5 - slack)",
          "tests/messages/test_messages.py"),
    Fault("messages/compress.py", "tree_map(torch.add, expected, sent)",
          "tree_map(torch.add, expected, left)", "tests/messages/test_compress.py"),
    # encoding
    Fault("data/encoding.py", "own.missing < _enough", "own.missing <= _enough",
          "tests/data/test_encoding.py"),
    Fault("data/encoding.py", "sizes // least, 1", "sizes // least, 2",
          "tests/data/test_encoding.py"),
)
# fmt: on


def outcome(fault: Fault, tree: Path) -> str:
    """What the tests say of a tree with the fault in it."""
    path = tree / "src" / "fedminimax" / fault.file
    right = path.read_text(encoding="utf-8")
    if right.count(fault.old) != 1:
        return f"{right.count(fault.old)} places"
    path.write_text(right.replace(fault.old, fault.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", FAST]
    try:
        done = subprocess.run(
            [*command, *fault.tests.split()],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree / "src")},
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(right, encoding="utf-8")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    by = failed[0].removeprefix("FAILED ").partition(" - ")[0] if failed else fault.tests
    return f"{MEANINGS.get(done.returncode, f'ended with {done.returncode}')}: {by}"


def main(words: list[str]) -> int:
    chosen = [f for f in FAULTS if not words or any(word in f.file for word in words)]
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        unneeded = shutil.ignore_patterns(".*", "build", "dist", "site", "runs")
        shutil.copytree(ROOT, tree, ignore=unneeded)
        for number, fault in enumerate(chosen, 1):
            said = outcome(fault, tree)
            found += said.startswith(MEANINGS[1])
            print(f"{number:2} {fault.file}: {fault.new!r}: {said}", flush=True)
    print(f"{found} of {len(chosen)} found")
    return 0 if found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
