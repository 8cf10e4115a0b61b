"""The problems beside AUC and the quadratic: naive formulas, derivatives, saddles and measures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rows import labelled_rows, seeded
from torch import Tensor, nn

from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.algorithms.local_sgdm import LocalSGDM
from fedminimax.data.clients import Clients
from fedminimax.data.gaussian import GaussianData, TiltData
from fedminimax.engine.query import LocalQuery
from fedminimax.engine.simulate import Run, simulate
from fedminimax.models.gan import SmallGAN
from fedminimax.problems.cross_entropy import CrossEntropy
from fedminimax.problems.fair import Fair
from fedminimax.problems.gradients import gradients
from fedminimax.problems.image_gan import ImageGAN, with_noise
from fedminimax.problems.pl_pl import PLPL
from fedminimax.problems.ratio_loss import RatioLoss
from fedminimax.problems.robust import Robust
from fedminimax.problems.wgan import WGAN
from fedminimax.problems.worst_site import WorstSite, add_numbers
from fedminimax.types import Algorithm, Batch, Point, Problem, batch_of


def rows_of(classes: int = 3, sizes: tuple[int, ...] = (7, 4, 9, 2), seed: int = 0) -> list[tuple]:
    """Rows (features, label) with centres by class and a different mix of classes per client."""
    random = np.random.default_rng(seed)
    rows = []
    for k, size in enumerate(sizes):
        labels = (np.arange(size) * (k + 1) // 2 + k) % classes
        features = random.standard_normal((size, 3)) + 1.5 * np.eye(3)[labels % 3]
        rows.append((features, labels))
    return rows


def network(outputs: int = 3) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)))


def fair() -> tuple[Problem, Clients]:
    return Fair(network(), classes=3), Clients(rows_of(), batch_size=3)


def fair_of_two() -> tuple[Problem, Clients]:
    return Fair(network(1), classes=2), Clients(rows_of(2), batch_size=3)


def worst_site() -> tuple[Problem, Clients]:
    return WorstSite(network(), sites=4), Clients(add_numbers(rows_of()), batch_size=3)


def robust() -> tuple[Problem, Clients]:
    return Robust(network(), shape=(3,), radius=0.5), Clients(rows_of(), batch_size=3)


def wgan() -> tuple[Problem, Clients]:
    rows = GaussianData(clients=4, rows=12, mu=0.3, sigma=0.5).client_rows()
    return WGAN(penalty=0.1), Clients(rows, batch_size=5)


def pl_pl() -> tuple[Problem, Clients]:
    data = TiltData(clients=4, dimension=2, noise=0.5, rows=6)
    return PLPL(2), Clients(data.client_rows(), batch_size=4)


def ratio_loss() -> tuple[Problem, Clients]:
    return RatioLoss(network(1)), Clients(rows_of(2), batch_size=3)


def images(count: int, side: int = 4, seed: int = 0) -> np.ndarray:
    """A bright spot that wanders over dark images, with pixels in [-1, 1]."""
    random = np.random.default_rng(seed)
    centre = side * random.uniform(0.3, 0.7, (count, 2, 1, 1))
    row, column = np.mgrid[:side, :side] + 0.5
    away = (row - centre[:, 0]) ** 2 + (column - centre[:, 1]) ** 2
    return 2 * np.exp(-away / side)[:, None] - 1


def small_networks(shape: tuple[int, ...], noise: int = 2, width: int = 3) -> Any:
    """A generator and a critic with the same first weights at every call."""
    return seeded(lambda: nn.ModuleList(SmallGAN(noise, width).build(shape)[:2]))


def image_gan(form: str = "wasserstein") -> tuple[Problem, Clients]:
    rows = with_noise([images(n, seed=n) for n in (7, 4, 9, 2)], size=2)
    made, told = small_networks((1, 4, 4))
    return ImageGAN(made, told, form, radius=5.0), Clients(rows, batch_size=3)  # type: ignore[arg-type]


def logistic_gan() -> tuple[Problem, Clients]:
    return image_gan("logistic")


ALL = [
    fair, fair_of_two, worst_site, robust, wgan, pl_pl, ratio_loss, image_gan, logistic_gan
]  # fmt: skip
on_all = pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
Make = Callable[[], tuple[Problem, Clients]]


def asking(problem: Problem, clients: Clients, kind: str | None = None) -> LocalQuery:
    weights = clients.weight_vector(kind or clients.weights or problem.client_weights)  # type: ignore[arg-type]
    return LocalQuery(problem, clients, "train", weights)


def prepared(made: tuple[Problem, Clients]) -> tuple[Problem, Clients]:
    problem, clients = made[0], made[1].to(torch.float64)
    return problem.prepare(asking(problem, clients)), clients


def point_of(problem: Problem, shift: float = 0.1) -> Point:
    x, y = (v.double() for v in problem.start())
    return Point(x + shift, problem.project_y(y + shift * torch.linspace(-1, 1, y.numel())))


def run(
    made: tuple[Problem, Clients], algorithm: Algorithm, rounds: int = 3, **options: Any
) -> Run:
    options = {"executor": "debug", "dtype": torch.float64, "evaluate_every": rounds, **options}
    return simulate(*made[:1], algorithm, made[1], rounds, **options)


def method_for(problem: Problem, lr: float = 0.1) -> Algorithm:
    return LocalSGDA(lr, lr, 2) if problem.start().y.numel() else FedAvg(lr, 2)


# What every problem does.


@on_all
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_are_the_finite_differences(make: Make, padded):
    problem, clients = prepared(make())
    full = batch = clients.train.batch(2)
    n = len(full.weight)
    if padded:
        rows = tuple(torch.cat([column, column[:2]]) for column in full.rows)
        weight = torch.cat([full.weight, torch.zeros(2)])
        batch = Batch(rows, weight, torch.cat([torch.zeros(n), torch.ones(2)]).double())
    point, step = point_of(problem), 1e-6
    found = gradients(problem, point, (batch,))
    random = torch.Generator().manual_seed(0)
    for i, (vector, slope) in enumerate(zip(point, found, strict=True)):
        for _ in range(4 if vector.numel() else 0):
            along = torch.randn(vector.numel(), generator=random, dtype=torch.float64)
            ends = [point._replace(**{"xy"[i]: vector + sign * step * along}) for sign in (1, -1)]
            high, low = (problem.outer(*end, full) for end in ends)
            assert float(slope @ along) == pytest.approx(
                float(high - low) / (2 * step), rel=1e-6, abs=1e-8
            )


@on_all
def test_executors_agree(make: Make):
    points = [
        run(make(), method_for(make()[0]), 2, executor=name).point
        for name in ("debug", "vectorised")
    ]
    for point in points[1:]:
        for a, b in zip(point, points[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert not torch.equal(points[0].x, make()[0].start().x.double())


@on_all
def test_a_step_is_one_graph(make: Make):
    problem, clients = prepared(make())
    draw, point = (clients.train.batch(0),), point_of(problem)
    torch._dynamo.reset()
    graph = torch.compile(
        lambda point, draw: gradients(problem, point, draw), fullgraph=True, backend="eager"
    )
    for found, plain in zip(graph(point, draw), gradients(problem, point, draw), strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-13)


@on_all
def test_points_stay_in_the_sets_and_measures_are_numbers(make: Make):
    problem = make()[0]
    found = run(make(), method_for(problem, 0.5), 3, evaluate_every=1, executor="vectorised")
    assert found.outcome == "finished"
    torch.testing.assert_close(problem.project_y(found.point.y), found.point.y)
    for record in found.history:
        assert np.isfinite(record["train"][problem.monitor])
        assert np.isfinite(record["train"]["loss"])


@on_all
def test_single_precision_stays_single(make: Make):
    found = run(make(), method_for(make()[0]), 2, dtype=torch.float32, executor="vectorised")
    assert {v.dtype for v in found.point} == {torch.float32}


# Fair classification and the worst site.


def class_means(problem: Any, clients: Clients, x: Tensor, weights: Tensor) -> Tensor:
    """F_c row by row: the mean over all rows of a group, each row weighted by its client."""
    sums, mass = torch.zeros(problem.groups).double(), torch.zeros(problem.groups).double()
    for k, weight in enumerate(weights.tolist()):
        batch = clients.train.batch(k)
        logits = problem.network(x, batch.features)
        group = batch.rows[2] if len(batch.rows) > 2 else batch.labels
        for z, label, g in zip(logits, batch.labels, group, strict=True):
            share = weight / len(batch.labels)
            sums[int(g)] -= share * float(torch.log_softmax(z, 0)[int(label)])
            mass[int(g)] += share
    return sums / mass


@pytest.mark.parametrize("make", [fair, worst_site])
@pytest.mark.parametrize("kind", ["size", "uniform"])
def test_the_objective_is_the_weighted_sum_of_the_groups_mean_losses(make: Make, kind):
    problem, clients = make()
    clients = clients.to(torch.float64)
    problem = problem.prepare(asking(problem, clients, kind))
    ask = asking(problem, clients, kind)
    x, y = point_of(problem)
    means = class_means(problem, clients, x, ask.weights)
    assert float(ask.mean("loss", x, y)[0]) == pytest.approx(float(y @ means), rel=1e-12)
    slopes = [gradients(problem, Point(x, y), (clients.train.batch(k),)).y for k in range(4)]
    total = ask.weights @ torch.stack(slopes)
    torch.testing.assert_close(total, means, rtol=1e-12, atol=0)


def test_stochastic_class_gradients_are_unbiased_where_batch_means_are_not():
    """All batches of two of a client with three rows of one class and one of the other."""
    features = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).double()
    labels = torch.tensor([0, 0, 0, 1])
    clients = Clients([(features, labels)], batch_size=2)
    problem, clients = prepared((Fair(network(2), classes=2), clients))
    point = point_of(problem)
    batches = [
        batch_of(features[[i, j]], labels[[i, j]]) for i in range(4) for j in range(i + 1, 4)
    ]
    found = torch.stack([gradients(problem, point, (b,)).y for b in batches]).mean(0)
    exact = gradients(problem, point, (clients.train.batch(0),)).y
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=0)

    def batch_mean(batch: Batch, c: int) -> Tensor:
        chosen = batch.labels == c
        losses = problem.losses(point.x, batch.features, batch)  # type: ignore[attr-defined]
        return losses[chosen].mean() if chosen.any() else losses.new_zeros(())

    naive = torch.stack([torch.stack([batch_mean(b, c) for c in (0, 1)]) for b in batches]).mean(0)
    assert float(naive[1] / exact[1]) == pytest.approx(0.5)  # half of the batches lack the class


def test_a_class_absent_from_a_batch_contributes_nothing():
    problem, clients = prepared(fair())
    rows = clients.train.rows(0)
    only = rows[1] == rows[1][0]
    batch = batch_of(rows[0][only], rows[1][only])
    point = point_of(problem)
    slope = gradients(problem, point, (batch,)).y
    present = int(rows[1][0])
    assert float(slope[present]) > 0
    assert float(slope.sum() - slope[present]) == 0
    none = point.y * (torch.arange(3) != present)
    assert not gradients(problem, Point(point.x, none), (batch,)).x.any()


def test_a_site_s_objective_is_its_loss_times_its_weight_times_their_number():
    problem, clients = worst_site()
    clients = clients.to(torch.float64)
    problem = problem.prepare(asking(problem, clients, "uniform"))
    x, y = point_of(problem)
    for k in range(4):
        batch = clients.train.batch(k)
        loss = problem.losses(x, batch.features, batch).mean()  # type: ignore[attr-defined]
        assert float(problem.outer(x, y, batch)) == pytest.approx(4 * float(y[k] * loss), rel=1e-12)


def test_fair_training_lifts_the_worst_class():
    """A rare class that plain training gives up is not given up."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(4):
        labels = (np.arange(40) % 10 == 0).astype(int)
        rows.append((random.standard_normal((40, 3)) + 0.6 * labels[:, None], labels))
    clients = Clients(rows, batch_size=20)
    linear = seeded(lambda: nn.Linear(3, 2))
    options: dict[str, Any] = {"executor": "vectorised"}
    # Class weights in proportion to the shares are the plain cross-entropy.
    start = Point(torch.zeros(8), torch.tensor([0.9, 0.1]))
    plain = run((Fair(linear, 2), clients), LocalSGDA(0.3, 0.0, 4), 40, start=start, **options)
    fairly = run((Fair(linear, 2), clients), LocalSGDA(0.3, 0.05, 4), 40, **options)
    worst = [r.history[-1]["train"]["worst_class_accuracy"] for r in (plain, fairly)]
    assert worst[0] < 0.45
    assert worst[1] > 0.6


def test_fair_measures_are_counted_over_all_clients():
    problem, clients = prepared(fair())
    point, ask = point_of(problem, 0.3), asking(problem, clients)
    right, count = np.zeros(3), np.zeros(3)
    for k in range(4):
        features, labels = clients.train.rows(k)
        guess = problem.network(point.x, features).argmax(1)  # type: ignore[attr-defined]
        for g, label in zip(guess.tolist(), labels.tolist(), strict=True):
            right[label] += g == label
            count[label] += 1
    found = problem.evaluate(point, ask)
    assert found["accuracy"] == pytest.approx(right.sum() / count.sum())
    assert found["worst_class_accuracy"] == pytest.approx((right / count).min())
    assert found["worst_class"] == str(np.argmin(right / count))
    assert found["class_accuracies"] == pytest.approx(
        {str(c): right[c] / count[c] for c in range(3)}
    )


def test_sites_go_by_their_names():
    rows = add_numbers(rows_of())
    clients = Clients(rows, batch_size=3, names=["a", "b", "c", "d"])
    found = run((WorstSite(network(), 4), clients), LocalSGDA(0.1, 0.1, 2), 2).history[-1]["train"]
    assert set(found["site_accuracies"]) == {"a", "b", "c", "d"}
    assert found["worst_site"] in "abcd"
    assert found["worst_site_loss"] >= found["loss"]


def test_class_balanced_batches_use_the_share_they_are_drawn_with():
    clients = Clients(rows_of(2, (8, 9, 6)), batch_size=4, sampling="balanced", positive_share=0.25)
    problem = Fair(network(1), classes=2)
    assert problem.prepare(asking(problem, clients)).shares == (0.75, 0.25)
    three = Fair(network(), classes=3)
    balanced = Clients(rows_of(3, (8, 9, 6)), batch_size=4, sampling="balanced")
    with pytest.raises(ValueError, match="two classes"):
        three.prepare(asking(three, balanced))


def test_groups_that_do_not_fit_are_refused():
    clients = Clients(rows_of())
    with pytest.raises(ValueError, match=r"not one of 0 \.\. 1"):
        WorstSite(network(), 2).prepare(
            asking(WorstSite(network(), 2), Clients(add_numbers(rows_of())))
        )
    with pytest.raises(ValueError, match="no client has training rows of class 3"):
        Fair(network(4), 4).prepare(asking(Fair(network(4), 4), clients))
    with pytest.raises(ValueError, match="no column with the number of their site"):
        WorstSite(network(), 4).prepare(asking(WorstSite(network(), 4), clients))
    with pytest.raises(ValueError, match="refused beyond 10000"):
        WorstSite(network(), 10_001)
    with pytest.raises(ValueError, match="call prepare"):
        Fair(network(), 3).outer(*Fair(network(), 3).start(), clients.train.batch(0))


# The robust network.


def test_the_robust_objective_is_the_naive_formula():
    problem, clients = prepared(robust())
    x, y = point_of(problem)
    features, labels = clients.train.rows(1)
    total = 0.0
    for row, label in zip(features, labels, strict=True):
        logits = problem.network(x, (row + y)[None])[0]  # type: ignore[attr-defined]
        total -= float(torch.log_softmax(logits, 0)[int(label)])
    found = problem.outer(x, y, clients.train.batch(1))
    assert float(found) == pytest.approx(total / len(labels), rel=1e-12)


def test_the_perturbation_reaches_its_bound_and_hurts():
    clients = Clients(rows_of(3, (30, 20, 40), seed=1), batch_size=None)
    made, fast = (Robust(network(), (3,), 2.0), clients), {"executor": "vectorised"}
    trained = run(made, LocalSGDA(0.5, 0.0, 4), 30, **fast)
    attacked = run(made, LocalSGDA(0.0, 1.0, 1), 30, start=trained.point, **fast)
    clean, hurt = trained.history[-1]["train"], attacked.history[-1]["train"]
    assert hurt["perturbation"] == pytest.approx(2.0, rel=1e-2)
    assert clean["perturbed_accuracy"] == clean["accuracy"] == hurt["accuracy"]
    assert hurt["perturbed_accuracy"] < hurt["accuracy"] - 0.1
    assert hurt["loss"] > clean["loss"]


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_robust_square_is_that_of_outputs_and_labels(outputs):
    torch.manual_seed(0)
    module = torch.nn.Linear(3, outputs).double()
    problem = Robust(module, (3,), loss="square")
    start = problem.start()
    y = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)
    features = torch.randn(5, 3, dtype=torch.float64)
    labels = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0] if outputs == 1 else [0.0, 2.0, 1.0, 0.0, 2.0])
    found = float(problem.outer(start.x, y, batch_of(features, labels)))
    total = 0.0
    for row, label in zip(features, labels.tolist(), strict=True):
        for place, output in enumerate(module(row + y).tolist()):
            wanted = label if outputs == 1 else float(place == label)
            total += (output - wanted) ** 2
    assert found == pytest.approx(total / 5, rel=1e-9)


def test_a_perturbation_of_another_shape_is_refused():
    problem = Robust(network(), (2,))
    with pytest.raises(ValueError, match="give the problem the shape of one input"):
        problem.outer(*problem.start(), Clients(rows_of()).to(torch.float32).train.batch(0))
    with pytest.raises(ValueError, match="radius"):
        Robust(network(), (3,), radius=0.0)
    with pytest.raises(ValueError, match="loss is 'squared'; give"):
        Robust(network(), (3,), loss="squared")  # type: ignore[arg-type]


# The Gaussian GAN.


def test_the_gan_s_derivatives_are_the_closed_forms():
    problem, clients = prepared(wgan())
    z, real = (column.numpy() for column in clients.train.rows(0))
    mu, sigma, phi1, phi2 = 0.4, 0.7, -0.3, 0.9
    point = Point(torch.tensor([mu, sigma]).double(), torch.tensor([phi1, phi2]).double())
    made = mu + sigma * z
    value = np.mean(phi1 * real + phi2 * real**2 - phi1 * made - phi2 * made**2) - 0.1 * (
        phi1**2 + phi2**2
    )
    batch = clients.train.batch(0)
    assert float(problem.outer(*point, batch)) == pytest.approx(value, rel=1e-6)
    found = gradients(problem, point, (batch,))
    by_hand = [
        -phi1 - 2 * phi2 * made.mean(),
        -phi1 * z.mean() - 2 * phi2 * (made * z).mean(),
        (real - made).mean() - 0.2 * phi1,
        (real**2 - made**2).mean() - 0.2 * phi2,
    ]
    np.testing.assert_allclose(torch.cat(tuple(found)).numpy(), by_hand, rtol=1e-6)


def test_the_gan_s_target_is_a_saddle_and_its_best_critic_is_closed():
    problem, clients = prepared(wgan())
    ask = asking(problem, clients)
    target = problem.target(ask)  # type: ignore[attr-defined]
    assert target.tolist() == pytest.approx([0.3, 0.5], rel=1e-9)
    batches = [clients.train.batch(k) for k in range(4)]

    def slopes(point: Point) -> Point:
        found = [gradients(problem, point, (b,)) for b in batches]
        return Point(*(torch.stack(player).mean(0) for player in zip(*found, strict=True)))

    at_rest = slopes(Point(target, torch.zeros(2).double()))
    assert max(float(v.abs().max()) for v in at_rest) < 1e-12
    x = torch.tensor([1.0, 0.2]).double()
    mean = torch.stack([problem.dual_statistics(x, b) for b in batches]).mean(0)
    assert float(slopes(Point(x, problem.dual_from(mean))).y.abs().max()) < 1e-12
    assert float(slopes(Point(x, torch.zeros(2).double())).y.abs().max()) > 0.1


def test_the_paper_s_gan_learns():
    data = GaussianData(clients=4, rows=200)
    clients = Clients(data.client_rows(), batch_size=100)
    found = run((WGAN(0.01), clients), LocalSGDA(0.05, 0.05, 10), 80, executor="vectorised")
    errors = [record["train"]["error"] for record in found.history]
    assert errors[0] == pytest.approx(1 + 0.9**2, rel=1e-6)
    assert errors[-1] < 0.05 * errors[0]
    mirrored = found.point._replace(x=found.point.x * torch.tensor([1.0, -1.0]))
    ask = LocalQuery(found.problem, clients, "train", clients.weight_vector("uniform"))
    here, there = (found.problem.evaluate(p, ask) for p in (found.point, mirrored))
    assert here["distribution_error"] == there["distribution_error"] == here["error"]
    assert there["error"] > here["error"]
    assert found.point.x[1] > 0


def test_gaussian_rows_are_those_of_the_paper():
    rows = GaussianData().client_rows()
    assert (len(rows), len(rows[0][0])) == (10, 1000)
    z, real = (np.concatenate(columns) for columns in zip(*rows, strict=True))
    np.testing.assert_allclose(real, 0.1 * z, atol=1e-15)
    assert abs(z.mean()) < 0.05
    assert abs(z.std() - 1) < 0.05
    own = [r.mean() - 0.1 * z.mean() for z, r in GaussianData(mu=2.0, spread=1.0).client_rows()]
    assert np.mean(own) == pytest.approx(2.0)
    assert np.std(own) > 0.3
    with pytest.raises(ValueError, match="rows is 0"):
        GaussianData(rows=0)


# The GAN of two networks.


def test_both_players_of_the_image_gan_are_networks():
    made, told = small_networks((1, 4, 4))
    problem, clients = image_gan()
    assert problem.start().x.numel() == sum(p.numel() for p in made.parameters())
    assert problem.start().y.numel() == sum(p.numel() for p in told.parameters())
    pictures, noise = (column.float() for column in clients.train.rows(0))
    with torch.no_grad():
        fake, real = told(made(noise)).flatten(), told(pictures).flatten()
        norm = sum(float(p.square().sum()) for p in told.parameters())
    batch = batch_of(pictures, noise)
    value = float((real - fake).mean()) - 1e-3 * norm
    assert float(problem.outer(*problem.start(), batch)) == pytest.approx(value, abs=1e-5)
    logistic = logistic_gan()[0]
    value = torch.log(torch.sigmoid(real)).mean() + torch.log(1 - torch.sigmoid(fake)).mean()
    found = float(logistic.outer(*logistic.start(), batch))
    assert found == pytest.approx(float(value) - 1e-3 * norm, abs=1e-5)


@pytest.mark.parametrize("form", ["wasserstein", "logistic"])
def test_a_tiny_image_gan_learns_in_seconds(form):
    began = time.perf_counter()
    rows = with_noise([images(40, side=8, seed=k) for k in range(3)], size=4)
    clients = Clients(rows, batch_size=20)
    problem = ImageGAN(*small_networks((1, 8, 8), noise=4, width=16), form=form, penalty=0.05)
    lr = 0.02 if form == "wasserstein" else 0.1
    found = run((problem, clients), LocalSGDA(lr, lr, 4), 40, executor="vectorised")
    first, last = (record["train"]["mean_distance"] for record in found.history)
    assert last < 0.5 * first
    made = found.module()(torch.zeros(2, 4, dtype=torch.float64))
    assert made.shape == (2, 1, 8, 8)
    assert time.perf_counter() - began < 30


def test_gans_that_cannot_be_posed_are_refused():
    made, told = small_networks((1, 4, 4))
    normed = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16))
    with pytest.raises(ValueError, match="batch normalisation"):
        ImageGAN(normed, told)
    with pytest.raises(ValueError, match="form"):
        ImageGAN(made, told, form="nonsaturating")  # type: ignore[arg-type]
    small = ImageGAN(*small_networks((1, 3, 3)))
    with pytest.raises(ValueError, match="the generator makes 9 pixels"):
        small.outer(*small.start(), image_gan()[1].to(torch.float32).train.batch(0))


# The PL-PL function.


def test_the_pl_pl_function_is_the_naive_formula_with_its_saddle():
    problem = PLPL(1)
    nothing = batch_of(torch.zeros(1, 1).double(), torch.zeros(1, 1).double())

    def f(x: float, y: float) -> float:
        primal, dual = (torch.tensor([v], dtype=torch.float64) for v in (x, y))
        return float(problem.outer(primal, dual, nothing))

    for x, y in ((0.3, -1.2), (2.0, 1.5)):
        naive = x**2 + 3 * np.sin(x) ** 2 * np.sin(y) ** 2 - 4 * y**2 - 10 * np.sin(y) ** 2
        assert f(x, y) == pytest.approx(naive, rel=1e-12)
    grid = np.linspace(-6, 6, 121)
    assert all(f(0, y) <= f(0, 0) <= f(x, 0) for x, y in zip(grid, grid, strict=True))
    # Neither convex in x nor concave in y.
    h = 1e-3
    quarter = np.pi / 2
    assert f(quarter + h, quarter) + f(quarter - h, quarter) < 2 * f(quarter, quarter)
    assert f(0.1, quarter + h) + f(0.1, quarter - h) > 2 * f(0.1, quarter)


def test_descent_ascent_finds_the_saddle_of_the_pl_pl_function():
    data = TiltData(clients=5, dimension=2, spread=3.0)
    clients = Clients(data.client_rows(), batch_size=None)
    found = run((PLPL(2), clients), LocalSGDA(0.02, 0.02, 1), 300, executor="vectorised")
    assert found.history[-1]["train"]["distance"] < 1e-4


# The ratio loss.


def test_the_ratio_loss_is_the_naive_formula():
    rows = [(f, y) for f, y in labelled_rows((9, 12), seed=2)]
    problem, clients = prepared((RatioLoss(seeded(lambda: nn.Linear(3, 1))), Clients(rows)))
    labels = np.concatenate([y for _, y in rows])
    positives, negatives = labels.sum(), (1 - labels).sum()
    weights = (1 + 0.1 * positives / negatives, 1 + 0.1 * negatives / positives)
    assert problem.class_weights == pytest.approx(weights)  # type: ignore[attr-defined]
    x = np.array([0.4, -0.2, 0.3, 0.1])
    features, y = rows[1]
    q = 1 / (1 + np.exp(-(features @ x[:-1] + x[-1])))
    naive = np.mean(-weights[1] * y * np.log(q) - weights[0] * (1 - y) * np.log(1 - q))
    found = problem.outer(torch.from_numpy(x), torch.zeros(0), clients.train.batch(1))
    assert float(found) == pytest.approx(float(naive), rel=1e-12)


def test_a_ratio_loss_without_slope_is_cross_entropy():
    def end(problem: Problem) -> Tensor:
        return run((problem, Clients(rows_of(2), batch_size=3)), LocalSGDM(0.1, 0.1, 2)).point.x

    assert torch.equal(end(RatioLoss(network(1), slope=0.0)), end(CrossEntropy(network(1))))
    assert not torch.equal(end(RatioLoss(network(1))), end(CrossEntropy(network(1))))


def test_the_ratio_is_capped_and_needs_two_classes():
    rows = [(np.zeros((6001, 3)), np.r_[1.0, np.zeros(6000)])]
    problem, _ = prepared((RatioLoss(network(1)), Clients(rows)))
    assert problem.class_weights[1] == pytest.approx(1 + 0.1 * 5000)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="one class only"):
        prepared((RatioLoss(network(1)), Clients([(np.zeros((3, 3)), np.ones(3))])))


def test_padding_does_not_enter_batch_normalisation_under_a_ratio_loss():
    normed = seeded(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    )
    made = (RatioLoss(normed), Clients(rows_of(2), batch_size=3))
    one, other = (run(made, FedAvg(0.1, 2), executor=e).point.x for e in ("debug", "vectorised"))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
