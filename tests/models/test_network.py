"""A torch module as a function of one vector, and its batch-norm statistics."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.data.clients import Clients
from fedminimax.engine.job import ClientError
from fedminimax.engine.simulate import simulate
from fedminimax.problems.auc import AUC
from fedminimax.problems.cross_entropy import CrossEntropy
from fedminimax.problems.network import Network, channels_last
from fedminimax.types import Batch, batch_of

D = torch.float64


def flat_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(),
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1),
    ).to(D)  # fmt: skip


def image_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.BatchNorm2d(2),
        nn.Flatten(), nn.Linear(8, 1),
    ).to(D)  # fmt: skip


def plain_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(D)


NETS = {"flat": (flat_net, (4,)), "image": (image_net, (1, 5, 5)), "plain": (plain_net, (4,))}


def rows_of(shape: tuple[int, ...], count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def some_clients(shape, sizes=(3, 9, 5), batch_size: int | None = 6, **options) -> Clients:
    rows = [(rows_of(shape, n, seed=n), (torch.arange(n) % 2).to(D)) for n in sizes]
    return Clients(rows, batch_size=batch_size, **options)


# ------------------------------------------------------------------ vector and module


@pytest.mark.parametrize("name", NETS)
def test_the_vector_is_the_module(name):
    make, shape = NETS[name]
    module, x = make(), rows_of(shape, 7)
    network = Network(module)
    assert network.length == sum(p.numel() for p in module.parameters())
    torch.testing.assert_close(network(network.start(), x), module.train()(x), rtol=1e-12, atol=0)
    # Another vector is another module, and back again.
    vector = torch.randn(network.length, dtype=D, generator=torch.Generator().manual_seed(2))
    filled = network.module(vector)
    assert torch.equal(torch.cat([p.reshape(-1) for p in filled.parameters()]), vector)
    assert not filled.training
    torch.testing.assert_close(network(vector, x), filled.train()(x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NETS)
def test_the_gradient_is_autograd_s(name):
    make, shape = NETS[name]
    module, x = make(), rows_of(shape, 7)
    network = Network(module)
    ours = torch.func.grad(lambda v: network(v, x).square().mean())(network.start())
    module.train()(x).square().mean().backward()
    theirs = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("channels", [1, 3])
def test_pooling_first_and_another_order_in_memory_change_no_number(channels):
    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2, padding=1), nn.Flatten()),
        nn.Linear(16, 1),
    ).double()
    rows = torch.randn(6, channels, 8, 8, dtype=torch.float64)
    rows[:, :, :4] = 0.0  # windows of equal pixels
    network = Network(module)
    kinds = [type(part) for part in network._functional.children()]
    assert kinds.index(nn.MaxPool2d) < kinds.index(nn.ReLU)
    assert channels_last(rows).stride(1) == 1
    weights = network.start().requires_grad_()
    outputs = network(weights, rows)
    wanted = module(rows)
    slopes = torch.autograd.grad(wanted.square().sum(), list(module.parameters()))
    assert torch.allclose(outputs, wanted, rtol=1e-12, atol=0)
    (found,) = torch.autograd.grad(outputs.square().sum(), weights)
    torch.testing.assert_close(
        found, torch.cat([s.reshape(-1) for s in slopes]), rtol=1e-10, atol=1e-12
    )


def test_the_user_s_module_is_never_touched():
    module = flat_net()
    before = {n: v.clone() for n, v in module.state_dict().items()}
    clients = some_clients((4,))
    simulate(AUC(module), Codasca(lr=0.1, local_steps=2), clients, 2, executor="threads")
    assert all(torch.equal(v, before[n]) for n, v in module.state_dict().items())
    assert module.training


def test_modules_with_shared_and_frozen_weights():
    """A shared weight is one part of the vector; all parameters are trained."""
    first = nn.Linear(3, 3, bias=False).to(D)
    tied = nn.Sequential(first, nn.Tanh(), first, nn.Linear(3, 1).to(D))
    network, x = Network(tied), rows_of((3,), 5)
    assert network.length == 9 + 4
    vector = torch.randn(13, dtype=D, generator=torch.Generator().manual_seed(0))
    inner = torch.tanh(x @ vector[:9].view(3, 3).T) @ vector[:9].view(3, 3).T
    right = inner @ vector[9:12].view(1, 3).T + vector[12]
    torch.testing.assert_close(network(vector, x), right)
    torch.testing.assert_close(network.module(vector)(x), right)


def test_two_layers_with_one_weight():
    first, second = nn.Linear(3, 3).to(D), nn.Linear(3, 3).to(D)
    second.weight = first.weight
    network, x = Network(nn.Sequential(first, nn.Tanh(), second)), rows_of((3,), 5)
    assert network.length == 9 + 3 + 3
    vector = torch.randn(15, dtype=D, generator=torch.Generator().manual_seed(0))
    weight = vector[:9].view(3, 3)
    right = torch.tanh(x @ weight.T + vector[9:12]) @ weight.T + vector[12:]
    torch.testing.assert_close(network(vector, x), right)


def test_a_recurrent_network_computes_with_the_weights_of_the_vector():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.LSTM(2, 3, batch_first=True)

        def forward(self, x):
            return self.cells(x)[0][:, -1]

    torch.manual_seed(0)
    network, x = Network(Last().to(D)), rows_of((4, 2), 5)
    vector = network.start() / 2
    torch.testing.assert_close(network(vector, x), network.module(vector)(x))


def test_a_weight_that_is_a_buffer_as_well():
    module = nn.Linear(3, 1).to(D)
    module.register_buffer("seen", module.weight)
    network, x = Network(module), rows_of((3,), 5)
    torch.testing.assert_close(network(network.start(), x), module(x))


def test_the_first_call_may_be_a_traced_one():
    network, x = Network(flat_net()), rows_of((4,), 5)
    graph = make_fx(network)(network.start(), x)
    torch.testing.assert_close(graph(network.start() / 2, x), network(network.start() / 2, x))


def test_no_weights_stay_behind_where_a_later_pass_would_find_them():
    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))

        def forward(self, x):
            return checkpoint(self.layers, x, use_reentrant=False)

    network, x = Network(Later().to(D)), rows_of((3,), 5)
    weights = network.start().requires_grad_()
    with pytest.raises(RuntimeError, match="meta"):
        network(weights, x).sum().backward()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        network(weights, x[:, :2])
    few = {name: value for name, value in network.parts(weights)[0].items() if "0" in name}
    with pytest.raises(RuntimeError, match="meta"):
        network(few, x)


# ------------------------------------------------------------------ batch norm in training


@pytest.mark.parametrize("name", ["flat", "image"])
def test_training_uses_the_statistics_of_the_batch_and_no_others(name):
    make, shape = NETS[name]
    module, x = make(), rows_of(shape, 8)
    network = Network(module)
    other = make()
    for part in other.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.running_mean, part.running_var = part.running_mean + 5, part.running_var * 9  # type: ignore
    first = network(network.start(), x)
    assert torch.equal(first, Network(other)(network.start(), x))
    assert torch.equal(first, Network(make().eval())(network.start(), x))
    # No call leaves a trace for the next.
    network(network.start(), 100 * x)
    assert torch.equal(first, network(network.start(), x))
    # One row's output depends on the others, as it must.
    assert not torch.allclose(network(network.start(), x[:4]), first[:4])


@pytest.mark.parametrize("name", ["flat", "image"])
def test_padding_rows_have_no_part(name):
    make, shape = NETS[name]
    network, x = Network(make()), rows_of(shape, 9)
    padding = (torch.arange(9) >= 5).to(D)
    batch = Batch((x,), (1 - padding) / 5, padding)

    def loss(vector, batch):
        return batch.mean(network(vector, batch.features, batch).reshape(-1).square())

    value = loss(network.start(), batch)
    torch.testing.assert_close(value, loss(network.start(), batch_of(x[:5])), rtol=1e-12, atol=0)
    spoiled = batch._replace(rows=(torch.cat([x[:5], 1e3 * x[5:]]),))
    torch.testing.assert_close(loss(network.start(), spoiled), value, rtol=1e-12, atol=0)
    ours, theirs = (torch.func.grad(loss)(network.start(), b) for b in (spoiled, batch_of(x[:5])))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("batch_size", [6, None])
def test_short_clients_are_exact_on_every_executor(name, batch_size):
    make, shape = NETS[name]
    clients = some_clients(shape, batch_size=batch_size)
    runs = [
        simulate(AUC(make()), Codasca(lr=0.1, local_steps=3), clients, 3, executor=executor)
        for executor in ("debug", "threads", "vectorised")
    ]
    assert float((runs[0].point.x - AUC(make()).start().x).abs().max()) > 1e-3
    for run in runs[1:]:
        torch.testing.assert_close(run.point.x, runs[0].point.x, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(run.point.y, runs[0].point.y, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(run.moments, runs[0].moments, rtol=1e-9, atol=1e-11)


def test_a_client_of_one_row_is_treated_alike_by_every_executor():
    """Torch refuses to normalise one row; padding must not hide that from one executor only."""
    clients = some_clients((4,), sizes=(1, 6), batch_size=4)
    outcomes = []
    for executor in ("debug", "threads", "vectorised"):
        try:
            run = simulate(CrossEntropy(flat_net()), FedAvg(0.1, 1), clients, 1, executor=executor)
            outcomes.append(run.point.x)
        except (ClientError, ValueError) as refused:
            outcomes.append(str(refused))
    assert len({type(outcome) for outcome in outcomes}) == 1
    if isinstance(outcomes[0], torch.Tensor):
        for x in outcomes[1:]:
            torch.testing.assert_close(x, outcomes[0], rtol=1e-10, atol=1e-11)


# ------------------------------------------------------------------ batch norm in evaluation


def split_moments(
    network: Network, moments: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(mean, variance) per batch-norm layer, as the module will use them."""
    module = network.module(network.start(), moments)
    return [
        (part.running_mean, part.running_var)  # type: ignore[misc]
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm)
    ]


def pooled_moments(
    module: nn.Module, rows: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The statistics of each layer's input when all rows are one batch, by hooks on the module."""
    found, handles = [], []
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):

            def note(part, arguments):
                x = arguments[0].transpose(0, 1).flatten(1)
                found.append((x.mean(1), x.var(1, unbiased=False)))

            handles.append(part.register_forward_pre_hook(note))
    with torch.no_grad():
        module.train()(rows)
    for handle in handles:
        handle.remove()
    return found


def disjoint_clients(shape) -> tuple[Clients, torch.Tensor]:
    """Each client has rows of one class only, of its own mean, and a size of its own."""
    sizes = (40, 100, 20)
    rows = [
        rows_of(shape, n, seed=n) + shift for n, shift in zip(sizes, (1.0, -0.5, 3.0), strict=True)
    ]
    labels = [torch.full((n,), k % 2, dtype=D) for k, n in enumerate(sizes)]
    return Clients(list(zip(rows, labels, strict=True)), batch_size=16), torch.cat(rows)


@pytest.mark.parametrize("name", ["flat", "image"])
def test_merged_statistics_are_those_of_the_pooled_rows(name):
    """Exact for the first layer, even with classes apart, and an approximation for the second.

    The second layer's inputs were normalised by each client's own statistics. Measured here, on
    class-disjoint clients: means off by 0.12 (flat) and 0.05 (image) pooled standard deviations,
    variances by factors of 2.1 and 1.3.
    """
    make, shape = NETS[name]
    clients, pooled = disjoint_clients(shape)
    run = simulate(AUC(make()), Codasca(lr=0.05, local_steps=2), clients, 2, executor="debug")
    network = run.problem.network  # type: ignore[attr-defined]
    weights = run.problem.network_weights(run.point.x)  # type: ignore[attr-defined]
    right = pooled_moments(network.module(weights), pooled)
    ours = split_moments(network, run.moments)  # type: ignore
    torch.testing.assert_close(ours[0][0], right[0][0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(ours[0][1], right[0][1], rtol=1e-11, atol=1e-13)
    off = ((ours[1][0] - right[1][0]).abs() / right[1][1].sqrt()).max()
    spread = (ours[1][1] / right[1][1]).log().abs().max()
    assert float(off) < 0.15
    assert float(spread) < 0.9


@pytest.mark.parametrize("name", ["flat", "image"])
def test_merged_statistics_of_like_clients_are_close_in_every_layer(name):
    make, shape = NETS[name]
    rows = [(rows_of(shape, n, seed=n), (torch.arange(n) % 2).to(D)) for n in (400, 300, 700)]
    run = simulate(AUC(make()), Codasca(0.05, local_steps=2), Clients(rows), 1, executor="debug")
    network = run.problem.network  # type: ignore[attr-defined]
    weights = run.problem.network_weights(run.point.x)  # type: ignore[attr-defined]
    right = pooled_moments(network.module(weights), torch.cat([r[0] for r in rows]))
    for ours, theirs in zip(split_moments(network, run.moments), right, strict=True):  # type: ignore
        torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0.02)
        torch.testing.assert_close(ours[1], theirs[1], rtol=0.05, atol=0)


def test_uniform_weights_count_clients_and_size_weights_count_rows():
    sizes = (5, 50)
    rows = [(rows_of((4,), n) + 3 * k, (torch.arange(n) % 2).to(D)) for k, n in enumerate(sizes)]
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).to(D)
    means = [r[0].mean(0) for r in rows]
    for weights, right in (
        ("uniform", (means[0] + means[1]) / 2),
        ("size", (5 * means[0] + 50 * means[1]) / 55),
        (None, (5 * means[0] + 50 * means[1]) / 55),  # AUC's own choice
    ):
        clients = Clients(rows, weights=weights)  # type: ignore
        run = simulate(AUC(module), Codasca(0.1, local_steps=1), clients, 1, executor="debug")
        torch.testing.assert_close(run.module()[0].running_mean, right)  # type: ignore[index]


def test_the_module_of_a_run_carries_the_statistics():
    clients, pooled = disjoint_clients((4,))
    run = simulate(AUC(flat_net()), Codasca(0.05, local_steps=2), clients, 2, executor="debug")
    module = run.module()
    assert not module.training
    assert type(module[1]) is nn.BatchNorm1d  # type: ignore[index]
    right = pooled_moments(run.module(), pooled)[0]
    torch.testing.assert_close(module[1].running_mean, right[0], rtol=1e-12, atol=1e-13)  # type: ignore
    scores = run.problem.ranking_scores(run.point.x, run.moments, pooled)  # type: ignore
    with torch.no_grad():
        torch.testing.assert_close(module(pooled).reshape(-1), scores)
        assert not torch.allclose(module(pooled), flat_net().eval()(pooled))


@pytest.mark.parametrize("count", [1, 2, 2048, 2049, 2050, 4097])
def test_statistics_of_any_number_of_rows(count):
    """Rows go through in chunks; a last chunk of one row is no reason to fail."""
    network, rows = Network(flat_net()), rows_of((4,), count)
    mean, variance = split_moments(network, network.moments(network.start(), rows))[0]
    inputs = flat_net()[0](rows)  # type: ignore[index]
    torch.testing.assert_close(mean, inputs.mean(0))
    torch.testing.assert_close(variance, inputs.var(0, unbiased=False), rtol=1e-9, atol=1e-12)


def test_statistics_of_features_far_from_zero_in_single_precision():
    """E[x^2] - E[x]^2 cancels: features such as years must keep their variance."""
    rows = rows_of((3,), 500).float() + 1000
    network = Network(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    _, variance = split_moments(network, network.moments(network.start(), rows))[0]
    torch.testing.assert_close(
        variance, rows.double().var(0, unbiased=False).float(), rtol=0.02, atol=0
    )


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "part",
    [
        nn.Dropout(0.5),
        nn.Dropout2d(0.1),
        nn.AlphaDropout(0.1),
        nn.RReLU(),
    ],
    ids=lambda part: type(part).__name__,
)
def test_parts_that_draw_their_own_numbers_are_refused(part):
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(part), nn.Linear(4, 1))
    sentence = r"'1\.0'.*draws its own random numbers.*set its dropout to 0"
    with pytest.raises(ValueError, match=sentence):
        AUC(module)


@pytest.mark.parametrize(
    "part",
    [nn.LSTM(4, 4, 2, dropout=0.5), nn.GRU(4, 4, 2, dropout=0.5), nn.MultiheadAttention(4, 2, 0.5)],
    ids=lambda part: type(part).__name__,
)
def test_parts_that_hide_a_dropout_are_refused(part):
    with pytest.raises(ValueError, match="draws its own random numbers"):
        Network(nn.Sequential(part))


@pytest.mark.parametrize(
    "part",
    [nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)],
    ids=lambda part: type(part).__name__,
)
def test_other_norms_that_keep_statistics_are_refused(part):
    """They would change their buffers in every call, on every thread."""
    with pytest.raises(ValueError, match=type(part).__name__):
        Network(nn.Sequential(nn.Linear(4, 4), part))


def test_a_dropout_that_drops_nothing_is_allowed():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 1)).to(D)
    network, x = Network(module), rows_of((4,), 5)
    torch.testing.assert_close(network(network.start(), x), module(x))


def test_a_module_without_parameters_is_refused():
    with pytest.raises(ValueError, match="no parameters: there is nothing to train"):
        AUC(nn.Sequential(nn.Flatten(), nn.ReLU()))


@pytest.mark.parametrize("executor", ["debug", "threads", "vectorised", "auto"])
def test_two_outputs_are_refused_for_a_binary_score(executor):
    module = nn.Linear(4, 2).to(D)
    with pytest.raises(
        (ValueError, ClientError), match=r"\(2,\) numbers per row.*Linear\(\.\.\., 1\)"
    ):
        simulate(AUC(module), Codasca(), some_clients((4,)), 1, executor=executor)


def test_outputs_of_every_shape_of_one_number_are_scores():
    x = rows_of((4,), 5)
    linear = nn.Linear(4, 1).to(D)
    problem = AUC(linear)
    flat = AUC(nn.Sequential(linear, nn.Flatten(0)))
    point = problem.start().x
    assert torch.equal(problem.raw_scores(point, batch_of(x)), flat.raw_scores(point, batch_of(x)))


# ------------------------------------------------------------------ threads


def test_threads_do_not_share_a_module():
    """functional_call swaps weights inside a module: two threads on one would mix their vectors."""
    network, x = Network(flat_net()), rows_of((4,), 64)
    vectors = [
        torch.randn(network.length, generator=torch.Generator().manual_seed(s), dtype=D)
        for s in range(64)
    ]

    def gradient(vector: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda v: network(v, x).square().mean())(vector)

    serial = [gradient(v) for v in vectors]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for ours, theirs in zip(pool.map(gradient, vectors), serial, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_moments_of_a_layer_that_is_used_twice_or_never():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.never = nn.BatchNorm1d(3), nn.BatchNorm1d(2)
            self.last = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(2 + 3 * self.norm(x)))

    x = torch.randn(300, 3, dtype=D) * 4 + 1
    network = Network(Twice().to(D))
    mean, square, never = network.moments(network.start(), x).split([3, 3, 4])
    # The second time it sees mean 2 and variance 9 in each batch of rows.
    torch.testing.assert_close(mean, (x.mean(0) + 2) / 2, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(square, ((x * x).mean(0) + 13) / 2, rtol=1e-5, atol=1e-5)
    assert never.tolist() == [0, 0, 1, 1]
