"""Compressed messages: what travels, where a run arrives, and in which combinations."""

import re
import tomllib
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from deployment import EXPERIMENTS, ROOT, SITES, deployed, in_process
from rows import ROWS, noise_free, wide_quadratic
from torch import Tensor

from fedminimax.algorithms.afl import AFL
from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.drfa import DRFA
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.blocks.trees import flat, tree_map
from fedminimax.config import ConfigError, messages_of, messages_table
from fedminimax.data.clients import Clients
from fedminimax.engine.session import check_messages
from fedminimax.engine.simulate import simulate
from fedminimax.experiment import run_experiment
from fedminimax.messages import (
    COMPRESSORS,
    Clip,
    EightBit,
    Median,
    Messages,
    RandomCoordinates,
    Stage,
    TopK,
)
from fedminimax.messages.compress import Compressor
from fedminimax.messages.stage import bytes_of
from fedminimax.problems.functions import Minimax
from fedminimax.remote.calls import Faults
from fedminimax.remote.server import check_experiment
from fedminimax.remote.wire import Message
from fedminimax.types import Clock, Point


class Up(NamedTuple):
    x: Tensor
    levels: tuple[Tensor, ...]
    control_x: Tensor
    count: Tensor  # type: ignore[reportIncompatibleMethodOverride]  # nobody searches in this tuple


def message(length: int = 100, dtype: torch.dtype = torch.float64, seed: int = 0) -> Up:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    levels = (draw(3, 7), draw(1), draw(0))
    return Up(draw(length) * draw(length).exp(), levels, draw(length), torch.tensor([3]))


STAGES = [EightBit(), EightBit(16), TopK(0.1), TopK(1.0), RandomCoordinates(0.1)]
CLOCK = Clock.at(round=3, phase=1)


def compressed(stage: Compressor, up: Up, clock: Clock = CLOCK) -> Up:
    return stage.decode(stage.encode(up, clock), up, clock)


@pytest.mark.parametrize("stage", STAGES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 16, 2500])
def test_what_travels_can_be_read_and_is_as_long_as_is_said(stage, dtype, length):
    for seed, scale in enumerate((1e-30, 1e-3, 1.0, 1e12)):
        up = message(length, dtype, seed)
        up = tree_map(lambda f, s=scale: f * s if f.is_floating_point() else f, up)
        sent = compressed(stage, up)
        again = compressed(stage, sent)
        assert all(map(torch.equal, flat(sent), flat(again)))
        encoded = stage.encode(up, CLOCK)
        assert stage.bytes(up) == bytes_of(encoded) <= bytes_of(up)
        assert stage.check(encoded, up) is None


@pytest.mark.parametrize("stage", STAGES, ids=repr)
def test_compression_never_adds_to_what_is_left(stage):
    """The contraction that EF21 needs; of random coordinates on average only, but never worse."""
    up = message(2500)
    for field, sent in zip(flat(up), flat(compressed(stage, up)), strict=True):
        assert float((field - sent).double().norm()) <= float(field.double().norm())
    zero = tree_map(torch.zeros_like, up)
    assert all(not bool(f.any()) for f in flat(compressed(stage, zero)))


def test_eight_bits_err_by_half_a_step_of_their_bucket():
    field = message(2500).x
    sent = compressed(EightBit(100), message(2500)).x
    rows, errors = field.reshape(-1, 100), (sent - field).reshape(-1, 100)
    steps = rows.abs().amax(1, keepdim=True) / 127
    assert bool((errors.abs() <= 0.501 * steps).all())
    (numbers, scale) = EightBit(100).pack(field, CLOCK)
    assert (numbers.dtype, scale.dtype, len(scale)) == (torch.int8, torch.float32, 25)


def test_top_sends_the_largest_numbers_of_a_field():
    field = message(50).x
    sent = compressed(TopK(0.1), message(50)).x
    largest = np.sort(np.argsort(-np.abs(field.numpy()))[:5])
    assert np.array_equal(np.flatnonzero(sent.numpy()), largest)
    assert torch.equal(sent[largest], field[largest])


def test_random_coordinates_are_shared_and_all_come_equally_often():
    stage, found = RandomCoordinates(0.2), torch.zeros(50)
    for number in range(400):
        sent = compressed(stage, message(50), Clock.at(round=number))
        assert torch.equal(sent.x != 0, sent.control_x != 0)
        assert int((sent.x != 0).sum()) == 10
        found += sent.x != 0
    # 80 are expected of each, with a standard deviation of 8.
    assert 50 < float(found.min()) < float(found.max()) < 110
    other = compressed(RandomCoordinates(0.2, seed=1), message(50))
    assert not torch.equal(other.x != 0, compressed(stage, message(50)).x != 0)


def test_what_is_not_finite_stays_so():
    for bad in (float("nan"), float("inf")):
        up = message(40)
        up.x[3] = bad
        for stage in (EightBit(), TopK(0.1)):
            assert not bool(torch.isfinite(compressed(stage, up).x).all())


@pytest.mark.parametrize("kind", [EightBit, TopK, RandomCoordinates])
@pytest.mark.parametrize("value", [0, -1, 40000, float("nan")])
def test_bad_settings_are_sentences(kind, value):
    with pytest.raises(ValueError, match=f"{kind.__name__}: .* give a"):
        kind(value)


# ------------------------------------------------------------------ runs


@dataclass(frozen=True)
class Naive(Stage):
    """A compressor without its estimates."""

    stage: Compressor

    def at_client(self, down, client, up, kept, clock):
        return self.stage.decode(self.stage.encode(up, clock), up, clock), kept


METHODS = {  # with the rounds that they take to arrive
    "sgda": (LocalSGDA(0.1, 0.3, local_steps=1), 150),
    "codasca": (Codasca(lr=0.02, local_steps=5, proximal=0.0, stage_rounds=1000), 400),
}
ARRIVES = {"eight_bit": EightBit(4), "top": TopK(0.3), "random": RandomCoordinates(0.5)}


def wide_run(method: str, *stages: Stage) -> float:
    """The distance to the saddle."""
    algorithm, rounds = METHODS[method]
    run = simulate(
        wide_quadratic(),
        algorithm,
        noise_free(),
        rounds,
        executor="vectorised",
        dtype=torch.float64,
        evaluate_every=rounds,
        messages=stages,
    )
    return run.history[-1]["train"]["distance"]


@pytest.mark.parametrize("method", ["sgda", pytest.param("codasca", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ARRIVES)
def test_unlike_clients_arrive_at_the_saddle_and_without_estimates_they_do_not(method, name):
    assert wide_run(method, ARRIVES[name]) < 1e-5
    assert wide_run(method, Naive(ARRIVES[name])) > 1e-3


def saddle() -> Minimax:
    return Minimax(
        lambda x, y, b: b.mean((b.rows[0] @ x[:2] - 1) ** 2) + x.square().sum() + x[:2] @ y - y @ y,
        torch.ones(5, dtype=torch.float64),
        torch.ones(2, dtype=torch.float64),
    )


def five_clients() -> Clients:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (4, 9, 6, 12, 5)]
    return Clients([(r,) for r in rows], batch_size=4, weights="size")


PIPELINES = {
    "eight_bit": [EightBit(2)],
    "top": [TopK(0.4)],
    "random": [RandomCoordinates(0.4)],
    "clip": [Clip(0.3), EightBit(2)],
}
COMPILED = {name: pytest.mark.full for name in PIPELINES} | {"clip": pytest.mark.slow}
CODASCA = Codasca(lr=0.05, local_steps=2)


def run(name: str, executor: str = "debug", method=CODASCA, rounds: int = 6, **settings):
    stages = PIPELINES.get(name, [])
    return simulate(
        saddle(), method, five_clients(), rounds, executor=executor, messages=stages, **settings
    )


@pytest.mark.parametrize(
    ("name", "executor"),
    [
        *((name, executor) for name in PIPELINES for executor in ("threads", "vectorised")),
        *(pytest.param(name, "compiled", marks=COMPILED[name]) for name in PIPELINES),
    ],
)
def test_all_executors_agree(name, executor):
    one, other = run(name), run(name, executor)
    torch.testing.assert_close(one.point, other.point, rtol=1e-10, atol=1e-12)
    assert one.history[-1]["bytes_up"] == other.history[-1]["bytes_up"]
    assert float((one.point.x - run("none").point.x).norm()) > 1e-6


@pytest.mark.parametrize("name", ["eight_bit", "top", "random"])
def test_bytes_are_counted_as_sent(name):
    (stage,) = PIPELINES[name]
    form = Point(torch.zeros(5, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    found, plain = run(name).history[-1], run("none").history[-1]
    assert found["bytes_up"] == 6 * 5 * 2 * bytes_of(stage.encode(form, CLOCK))
    assert plain["bytes_up"] == 6 * 5 * 2 * bytes_of(form)
    assert found["bytes_down"] == plain["bytes_down"]


@pytest.mark.parametrize("name", ["random", "clip"])
@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, name, store):
    how = {"checkpoint_every": 1, "store": store}
    whole = run(name, rounds=7)
    run(name, rounds=3, folder=tmp_path, **how)
    (tmp_path / "final.safetensors").unlink()
    after = run(name, rounds=7, folder=tmp_path, resume=True, **how)
    assert torch.equal(whole.point.x, after.point.x)
    assert torch.equal(whole.point.y, after.point.y)


def test_drift_is_measured_beside_a_compressor():
    watched = run("top", measures=["drift"], evaluate_every=2)
    assert torch.equal(run("top").point.x, watched.point.x)
    assert watched.history[-1]["optimality"]["drift_x"] > 0
    assert watched.history[-1]["bytes_up"] == run("top").history[-1]["bytes_up"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_method_runs_with_a_compressor(row):
    problem, clients = row.problem(), row.clients()
    found = simulate(problem, row.algorithm, clients, 2, executor="debug", messages=[TopK(0.2)])
    assert found.outcome == "finished"


# ------------------------------------------------------------------ what is refused


def test_what_cannot_be_combined_is_refused():
    with pytest.raises(ValueError, match="Median cannot compare between clients"):
        simulate(saddle(), CODASCA, five_clients(), 2, messages=[TopK(), Median()])
    with pytest.raises(ValueError, match="TopK needs all clients in every phase"):
        run("top", cohort=2, allow_partial=True)
    with pytest.raises(ValueError, match="DRFA draws its cohorts itself"):
        check_messages(Messages((TopK(),)), DRFA(), partial=False)
    with pytest.raises(ValueError, match="AFL needs the mean of what clients send"):
        check_messages(Messages(reducer=Median()), AFL(), partial=False)
    with pytest.raises(ValueError, match=r"Clip.* after EightBit.*: put EightBit last"):
        Messages.of([EightBit(), Clip(1.0)])


def test_a_compressor_is_a_key_of_a_file():
    found = messages_of({"compress": {"name": "top", "share": 0.2}, "clip": 1.0})
    assert found == Messages((Clip(1.0), TopK(0.2)))
    assert messages_of(messages_table(found)) == found
    assert messages_of({"compress": "eight_bit"}) == Messages((EightBit(),))
    assert messages_of({"compress": "none"}) == Messages()
    for given, sentence in [
        ("tip", "did you mean 'top'"),
        ({"name": "top", "share": 2}, "at most 1"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            messages_of({"compress": given})


# ------------------------------------------------------------------ at sites


@pytest.mark.parametrize("name", ["eight_bit", "top", "random"])
def test_what_sites_send_is_that_small_and_the_run_is_the_same(name, tmp_path):
    which = EXPERIMENTS["controls"]
    which = replace(which, messages=Messages((ARRIVES[name],)))
    sites, sent = in_process(which, tmp_path), []

    def heard(handler):
        def handle(content: bytes) -> bytes:
            reply = handler(content)
            if Message.from_bytes(reply).about["kind"] == "phase":
                sent.append(bytes_of(tuple(Message.from_bytes(reply).vectors.values())))
            return reply

        return handle

    sites.handlers = {site: heard(handler) for site, handler in sites.handlers.items()}
    found = deployed(which, sites, tmp_path)
    assert found.outcome == "finished"
    assert sum(sent) == found.history[-1]["bytes_up"]
    plain = replace(which, messages=Messages())
    assert sum(sent) < run_experiment(plain).history[-1]["bytes_up"]
    assert all(map(torch.equal, found.point, run_experiment(which).point))


def test_a_site_that_names_a_place_that_is_not_there_is_refused(tmp_path):
    which = replace(EXPERIMENTS["controls"], messages=Messages((TopK(0.3),)))
    sites = in_process(which, tmp_path)
    honest = sites.handlers[SITES[1]]

    def lying(content: bytes) -> bytes:
        reply = Message.from_bytes(honest(content))
        if reply.about["kind"] == "phase":
            reply.vectors["x.1"][0] = 3
        return reply.to_bytes()

    sites.handlers = {**sites.handlers, SITES[1]: lying}
    outcome = deployed(which, sites, tmp_path).outcome
    assert f"{SITES[1]!r} in round 0 is refused: x has a place outside its 3 numbers" in outcome


def test_sites_that_may_be_left_out_are_refused():
    which = replace(EXPERIMENTS["controls"], messages=Messages((TopK(0.3),)))
    with pytest.raises(ValueError, match="TopK needs all clients in every phase"):
        check_experiment(which, SITES, Faults("skip"))


@pytest.mark.parametrize("page", ["messages", "adding_a_stage"])
def test_the_settings_of_a_page_can_be_used(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL):
        found = messages_of(tomllib.loads(block)["messages"])
        check_messages(found, CODASCA, partial=False)
        assert found != Messages()
    for cell in re.findall(r"^\| (`[\"{].*?`) \|", text, re.MULTILINE):
        for value in re.findall("`(.*?)`", cell):
            given = tomllib.loads(f"v = {value}")["v"]
            name = given if isinstance(given, str) else given["name"]
            assert messages_of({"compress" if name in COMPRESSORS else "reduce": given})
