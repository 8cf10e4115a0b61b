"""Message stages and reducers: what they compute, in every executor and across a stop."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from deployment import Grid
from rows import ROWS
from torch import Tensor

from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.blocks.trees import tree_map
from fedminimax.config import ConfigError, Experiment, changed, messages_of, messages_table
from fedminimax.data.clients import Clients
from fedminimax.engine.simulate import simulate
from fedminimax.messages import CentredClipping, Clip, Mean, Median, Messages, Stage, TrimmedMean
from fedminimax.messages.stage import bytes_of, norm
from fedminimax.problems.functions import Minimax
from fedminimax.types import Clock, Point

CLOCK = Clock.at()


class Up(NamedTuple):
    x: Tensor
    y: Tensor
    momentum_y: Tensor


DOWN = Point(torch.tensor([1.0, 0.0]), torch.tensor([2.0]))
UP = Up(torch.tensor([4.0, 4.0]), torch.tensor([2.5]), torch.tensor([12.0]))


def clipped(stage: Clip) -> Up:
    return stage.at_client(DOWN, None, UP, (), CLOCK)[0]


def test_clip_bounds_the_update_of_all_fields_together():
    # The update is (3, 4), 0.5 and 12, of length sqrt(169.25).
    factor = 1.3 / 169.25**0.5
    found = clipped(Clip(1.3))
    torch.testing.assert_close(found.x, DOWN.x + factor * torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(found.y, DOWN.y + factor * 0.5)
    torch.testing.assert_close(found.momentum_y, factor * UP.momentum_y)


def test_clip_bounds_each_player_by_its_own_norm():
    found = clipped(Clip(1.0, dual_norm=100.0))
    torch.testing.assert_close(found.x, DOWN.x + torch.tensor([0.6, 0.8]))
    assert torch.equal(found.y, UP.y)
    found = clipped(Clip(5.0, dual_norm=0.1))
    torch.testing.assert_close(found.x, UP.x)
    dual = torch.cat([found.y - DOWN.y, found.momentum_y])
    assert float(dual.norm()) == pytest.approx(0.1)


def test_clip_leaves_short_updates_as_they_are_and_nan_visible():
    assert all(map(torch.equal, clipped(Clip(100.0)), UP))
    bad = UP._replace(x=torch.tensor([float("inf"), 0.0]))
    found, _ = Clip(1.0).at_client(DOWN, None, bad, (), CLOCK)
    assert not bool(torch.isfinite(found.x).all())


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clip_that_bounds_nothing_is_refused(norm):
    with pytest.raises(ValueError, match="give a finite number above 0"):
        Clip(norm)


def replies(count: int, seed: int = 0) -> Point:
    generator = torch.Generator().manual_seed(seed)
    kind = {"generator": generator, "dtype": torch.float64}
    return Point(torch.randn(count, 3, **kind), torch.randn(count, 1, **kind))  # type: ignore


def reduced(reducer, ups, weights, down=None, state=()):
    down = down or Point(torch.zeros(3, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    return reducer.reduce(state, down, ups, weights, CLOCK)


def even(count: int) -> Tensor:
    return torch.full((count,), 1 / count, dtype=torch.float64)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 10, 49])
def test_the_median_is_numpys_with_equal_weights(count):
    ups = replies(count)
    found, _ = reduced(Median(), ups, even(count))
    np.testing.assert_allclose(found.x, np.median(ups.x, axis=0), rtol=1e-12)


@pytest.mark.parametrize("reducer", [Median(), TrimmedMean(0.2)])
def test_a_weight_of_two_is_two_clients(reducer):
    ups, weights = replies(5), torch.tensor([1.0, 2.0, 1.0, 3.0, 1.0], dtype=torch.float64)
    twice = Point(*(torch.cat([f, f[[1, 3, 3]]]) for f in ups))
    one, _ = reduced(reducer, ups, weights / 8)
    other, _ = reduced(reducer, twice, even(8))
    torch.testing.assert_close(one, other)


def test_the_trimmed_mean_is_scipys_with_equal_weights():
    from scipy.stats import trim_mean

    ups = replies(10)
    found, _ = reduced(TrimmedMean(0.2), ups, even(10))
    np.testing.assert_allclose(found.x, trim_mean(ups.x.numpy(), 0.2, axis=0), rtol=1e-12)
    plain, _ = reduced(TrimmedMean(0.0), ups, even(10))
    torch.testing.assert_close(plain.x, ups.x.mean(0))


@pytest.mark.parametrize("reducer", [Median(), TrimmedMean(0.21), CentredClipping(2.0)])
def test_one_liar_of_five_moves_a_robust_reducer_little(reducer):
    ups = replies(5)
    lying = ups._replace(x=torch.cat([ups.x[:4], torch.full((1, 3), 1e6, dtype=torch.float64)]))
    state = reducer.init_server(tree_map(lambda f: torch.zeros_like(f[0]), ups))
    honest, _ = reduced(reducer, ups, even(5), state=state)
    found, _ = reduced(reducer, lying, even(5), state=state)
    assert float(norm(tree_map(torch.sub, found, honest))) < 3
    assert float(norm(reduced(Mean(), lying, even(5))[0])) > 1e5


def test_centred_clipping_by_the_papers_formula():
    ups, weights = replies(4), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    down = Point(*(torch.full_like(f[0], 0.5) for f in ups))
    centre = Point(*(torch.full_like(f[0], 0.25) for f in ups))
    found, state = reduced(CentredClipping(0.7, iterations=2), ups, weights, down, centre)
    v = np.full(4, 0.25)
    updates = np.concatenate([ups.x - 0.5, ups.y - 0.5], axis=1)
    for _ in range(2):
        scale = np.minimum(1, 0.7 / np.linalg.norm(updates - v, axis=1))
        v = v + (weights.numpy() * scale) @ (updates - v)
    np.testing.assert_allclose(torch.cat(state), v, rtol=1e-12)
    np.testing.assert_allclose(torch.cat(found), v + 0.5, rtol=1e-12)


def test_a_large_radius_is_the_mean():
    ups, weights = replies(4), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    state = tree_map(lambda f: torch.zeros_like(f[0]), ups)
    found, _ = reduced(CentredClipping(1e9), ups, weights, state=state)
    torch.testing.assert_close(found, reduced(Mean(), ups, weights)[0])


# ------------------------------------------------------------------ runs


@dataclass(frozen=True)
class Feedback(Stage):
    """Sends the largest numbers only, and adds what was left out to the next message."""

    share: float = 0.5

    def init_client(self, up):
        return up

    def at_client(self, down, client, up, kept, clock):
        whole = tree_map(torch.add, up, kept)
        sent = tree_map(self.largest, whole)
        return sent, tree_map(torch.sub, whole, sent)

    def largest(self, field: Tensor) -> Tensor:
        if not field.numel():
            return field
        count = max(1, int(self.share * field.numel()))
        return torch.where(field.abs() >= field.abs().topk(count).values[-1], field, 0 * field)

    def bytes(self, up):
        return bytes_of(up) // 2


def saddle() -> Minimax:
    return Minimax(
        lambda x, y, b: b.mean((b.rows[0] @ x[:2] - 1) ** 2) + x.square().sum() + x[:2] @ y - y @ y,
        torch.ones(3, dtype=torch.float64),
        torch.ones(2, dtype=torch.float64),
    )


def five_clients() -> Clients:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (4, 9, 6, 12, 5)]
    return Clients([(r,) for r in rows], batch_size=4, weights="size")


PIPELINES = {
    "clip": [Clip(0.2)],
    "clip each player": [Clip(0.2, 0.1)],
    "page": [Grid(0.05)],  # the stage that docs/adding_a_stage.md writes
    "kept": [Feedback()],
    "clip, kept": [Clip(0.2), Feedback()],
    "median": [Median()],
    "clip, trimmed": [Clip(0.2), TrimmedMean(0.2)],
    "kept, centred": [Feedback(), CentredClipping(0.3)],
}


def run(messages, executor="debug", method=None, rounds=6, **settings):
    method = method or Codasca(lr=0.05, local_steps=2)
    return simulate(
        saddle(), method, five_clients(), rounds, executor=executor, messages=messages, **settings
    )


COMPILED = ("clip, kept", "kept, centred")  # a linear reducer, and one that is not


@pytest.mark.parametrize("name", PIPELINES)
def test_all_executors_agree(name):
    one, plain = run(PIPELINES[name]), run([])
    assert float((one.point.x - plain.point.x).norm()) > 1e-6
    for executor in ("threads", "vectorised", *(["compiled"] if name in COMPILED else [])):
        other = run(PIPELINES[name], executor)
        torch.testing.assert_close(one.point, other.point, rtol=1e-10, atol=1e-12)
        assert one.history[-1]["bytes_up"] == other.history[-1]["bytes_up"]


@pytest.mark.slow
def test_the_stage_of_the_page_is_compiled():
    one, other = run(PIPELINES["page"]), run(PIPELINES["page"], "compiled")
    torch.testing.assert_close(one.point, other.point, rtol=1e-10, atol=1e-12)


def test_a_stage_says_how_many_bytes_travel():
    plain, half = run([]), run([Feedback()])
    assert half.history[-1]["bytes_up"] * 2 == plain.history[-1]["bytes_up"]
    assert half.history[-1]["bytes_down"] == plain.history[-1]["bytes_down"]


@pytest.mark.parametrize("name", ["kept, centred", "clip, kept"])
@pytest.mark.parametrize("cohort", [None, 2])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, name, cohort):
    how = {"cohort": cohort, "allow_partial": True, "checkpoint_every": 1}
    whole = run(PIPELINES[name], rounds=7, **how)
    run(PIPELINES[name], rounds=3, folder=tmp_path, **how)
    (tmp_path / "final.safetensors").unlink()
    after = run(PIPELINES[name], rounds=7, folder=tmp_path, resume=True, **how)
    assert torch.equal(whole.point.x, after.point.x)
    assert torch.equal(whole.point.y, after.point.y)


def test_another_stage_is_another_experiment(tmp_path):
    run([Clip(0.2)], rounds=2, folder=tmp_path)
    with pytest.raises(ValueError, match="of another experiment"):
        run([Clip(0.3)], rounds=4, folder=tmp_path, resume=True)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_method_runs_with_stages(row):
    messages = Messages.of([Clip(0.5), Feedback(), CentredClipping(1.0)])
    if not row.algorithm.robust:
        messages = Messages.of([Clip(0.5), Feedback()])
    found = simulate(
        row.problem(), row.algorithm, row.clients(), 2, executor="debug", messages=messages
    )
    assert found.outcome == "finished"


@pytest.mark.parametrize("stages", [[Clip(0.2)], [Feedback()]])
def test_drift_is_measured_beside_other_stages(stages):
    plain = run(stages, method=LocalSGDA(0.05, 0.1, local_steps=3))
    watched = run(
        stages,
        method=LocalSGDA(0.05, 0.1, local_steps=3),
        measures=["drift"],
        evaluate_every=2,
    )
    assert torch.equal(plain.point.x, watched.point.x)
    assert watched.history[-1]["optimality"]["drift_x"] > 0
    assert watched.history[-1]["bytes_up"] == plain.history[-1]["bytes_up"]


def test_a_nan_does_not_hide_behind_a_median():
    clients = five_clients()
    clients.train.columns[0][:4] = float("nan")
    found = simulate(
        saddle(), LocalSGDA(0.1, 0.1), clients, 3, executor="debug", messages=[Median()]
    )
    assert "client 0" in found.outcome


def test_bad_settings_end_in_a_sentence():
    with pytest.raises(ValueError, match="last at most one reducer"):
        run([Median(), Clip(1.0)])
    with pytest.raises(ValueError, match="'drift' needs means"):
        run([Median()], measures=["drift"])
    for table, sentence in [
        ({"clap": 1.0}, "did you mean 'clip'"),
        ({"clip": 0}, "give a finite number above 0"),
        ({"clip": "wide"}, "give a number"),
        ({"clip": {"size": 1}}, "has no key 'size'"),
        ({"reduce": "mode"}, "reduce is 'mode'"),
        ({"reduce": {"name": "trimmed_mean", "share": 0.5}}, "below 0.5"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            messages_of(table)


def test_messages_are_a_section_of_a_file():
    table = {
        "data": {"name": "heart"},
        "problem": {"name": "auc"},
        "model": {"name": "mlp"},
        "method": {"name": "codasca"},
    }
    experiment = Experiment.from_table(
        changed(table, ["messages.clip=0.5", 'messages.reduce={name="trimmed_mean", share=0.3}'])
    )
    assert experiment.messages == Messages((Clip(0.5),), TrimmedMean(0.3))
    assert Experiment.from_table(experiment.to_table()).messages == experiment.messages
    assert messages_of(messages_table(experiment.messages)) == experiment.messages
