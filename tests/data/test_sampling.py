"""Randomness and batches: pure functions of (seed, purpose, numbers), in whatever order asked."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from scipy import stats

from fedminimax.data import batches
from fedminimax.data.batches import Pool, Sampler, all_rows
from fedminimax.data.clients import Clients
from fedminimax.engine.query import LocalQuery
from fedminimax.problems.auc import AUC
from fedminimax.random import distinct, generator, key, words

UNLIKELY = 1e-4  # the seeds are fixed, so a test that passes once always passes


def uniform(counts: np.ndarray) -> bool:
    return float(stats.chisquare(counts).pvalue) > UNLIKELY


# ------------------------------------------------------------------ words


def test_words_are_the_same_bits_for_ints_numpy_torch_vmap_and_compile():
    index = [0, 1, 2, 5, 1000, 2**31 - 1, 2**31, 2**40 + 3]
    right = [[words(99, i, j) for j in (0, 7)] for i in index]
    by_numpy = words(99, np.array(index)[:, None], np.array([0, 7])[None, :])
    ours = torch.tensor(index)
    by_torch = words(99, ours[:, None], torch.tensor([0, 7])[None, :])
    by_vmap = torch.vmap(lambda i: words(99, i, torch.tensor([0, 7])))(ours)
    compiled = torch.compile(lambda i: words(99, i, torch.tensor([0, 7])), backend="eager")
    assert by_numpy.tolist() == right
    assert by_torch.tolist() == right
    assert by_vmap.tolist() == right
    assert compiled(ours[:, None]).tolist() == right
    assert all(0 <= w < 2**32 for row in right for w in row)


def test_words_are_the_ones_written_down():
    """A changed hash would change every published run."""
    assert [words(0, 0), words(7, 3), words(7, 3, 1), words(2**32 - 1, 12345)] == [
        33350994,
        553617573,
        3952385035,
        1894531029,
    ]


def test_words_of_arrays_wrap_around_as_those_of_whole_numbers():
    numbers = np.array([[-1], [0], [2**40 + 3]])
    found = words(7, numbers, 5, np.arange(2))
    assert found.dtype == np.int64
    assert found.tolist() == [[words(7, n, 5, i) for i in range(2)] for n in numbers[:, 0].tolist()]


def test_rows_are_the_ones_written_down():
    """Resumed runs and deployed sites count on them."""
    sizes, cohort = np.array([3, 40, 9, 64, 33, 5]), np.array([0, 1, 3, 4, 5])
    pool = Pool(np.cumsum(sizes) - sizes, sizes, 1234)
    taken = [pool.take(cohort, np.arange(first, first + 7), 8) for first in (0, 7, 30)]
    content = b"".join(rows.astype("<i8").tobytes() for rows in taken)
    assert hashlib.blake2s(content).hexdigest()[:8] == "c4847719"


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_words_are_uniform_in_every_byte(shift):
    drawn = words(key(3, "test"), np.arange(200_000)) >> shift & 0xFF
    assert uniform(np.bincount(drawn, minlength=256))


def test_neighbouring_numbers_give_unrelated_words():
    """Avalanche: one bit of any number changes each bit of the word in half of all cases."""
    index = np.arange(20_000)
    for changed in (
        words(5, index ^ 1) ^ words(5, index),
        words(5, index ^ 64) ^ words(5, index),
        words(5, index, 2) ^ words(5, index, 3),
        words(5, index, 2) ^ words(5, index + 1, 2),
    ):
        share = np.array([(changed >> bit & 1).mean() for bit in range(32)])
        assert np.abs(share - 0.5).max() < 0.02


def test_the_order_of_numbers_matters():
    assert words(1, 2, 3) != words(1, 3, 2)
    assert words(1, 0) != words(1, 0, 0) != words(1)


def test_keys_differ_by_seed_purpose_and_numbers():
    keys = [
        key(0, "a"),
        key(1, "a"),
        key(0, "b"),
        key(0, "a", 1),
        key(0, "a", 1, 1),
        key(0, "a", 11),
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= k < 2**32 for k in keys)
    assert generator(0, "a", 1).integers(2**60) == generator(0, "a", 1).integers(2**60)
    assert generator(0, "a", 1).integers(2**60) != generator(0, "a", 2).integers(2**60)


@pytest.mark.parametrize(("count", "below"), [(1, 1), (5, 5), (4, 7), (3, 100), (10, 10**9)])
def test_distinct_gives_different_numbers_in_order(count, below):
    drawn = distinct(key(1, "test"), count, below)
    assert len(drawn) == count
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    assert drawn[0] >= 0
    assert drawn[-1] < below
    assert drawn.tolist() == distinct(key(1, "test"), count, below).tolist()


@pytest.mark.parametrize(("count", "below"), [(3, 10), (7, 10)])
def test_distinct_is_uniform_over_numbers_and_pairs(count, below):
    draws = [distinct(key(0, "test", r), count, below) for r in range(4000)]
    singles = np.bincount(np.concatenate(draws), minlength=below)
    # Draws without replacement spread less than independent ones, by this factor.
    statistic = stats.chisquare(singles).statistic / (1 - count / below) * (below - 1) / below
    assert stats.chi2.sf(statistic, below - 1) > UNLIKELY
    pairs = np.zeros((below, below))
    for draw in draws:
        pairs[np.ix_(draw, draw)] += 1
    share = pairs[~np.eye(below, dtype=bool)] / 4000
    assert np.abs(share - count * (count - 1) / (below * (below - 1))).max() < 0.035


# ------------------------------------------------------------------ epochs


def numbered(sizes, **options) -> Clients:
    """Each row is its own global number; every second row is positive."""
    starts = np.concatenate([[0], np.cumsum(sizes)])
    rows = [
        (torch.arange(starts[k], starts[k + 1], dtype=torch.float64), torch.arange(n) % 2)
        for k, n in enumerate(sizes)
    ]
    return Clients(rows, **options)


def drawn_rows(sampler: Sampler, cohort, iteration: int, steps: int = 1) -> list:
    """[step][level][client] -> row numbers."""
    cohort = np.asarray(cohort)
    draws = sampler.draw(cohort, iteration, steps)
    return [
        [
            [
                draws.client(p, s, sampler.levels)[level].rows[0].int().tolist()
                for p in range(len(cohort))
            ]
            for level in range(sampler.levels)
        ]
        for s in range(steps)
    ]


def test_an_epoch_uses_every_row_once_when_the_batch_divides_the_size():
    sampler = Sampler(numbered([12, 8], batch_size=4), 1, seed=0)
    rows = [drawn_rows(sampler, [0, 1], i)[0][0] for i in range(12)]
    for epoch in range(4):
        used = [row for i in range(3) for row in rows[3 * epoch + i][0]]
        assert sorted(used) == list(range(12))
    for epoch in range(6):
        used = [row for i in range(2) for row in rows[2 * epoch + i][1]]
        assert sorted(used) == list(range(12, 20))
    assert rows[0][0] != rows[3][0]  # another epoch, another permutation


def test_a_row_comes_at_most_once_per_epoch_when_the_batch_does_not_divide():
    sampler = Sampler(numbered([11], batch_size=4), 1, seed=0)
    left_out = set()
    for epoch in range(20):
        used = [row for i in range(2) for row in drawn_rows(sampler, [0], 2 * epoch + i)[0][0][0]]
        assert len(used) == len(set(used)) == 8
        left_out |= set(range(11)) - set(used)
    assert left_out == set(range(11))  # those who wait are others each time


def test_permutations_are_uniform():
    sampler = Sampler(numbered([4] * 500, batch_size=4), 1, seed=1)
    orders = [
        tuple(r - 4 * k for r in rows)
        for i in range(4)
        for k, rows in enumerate(drawn_rows(sampler, np.arange(500), i)[0][0])
    ]
    found, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(found) == 24
    assert uniform(counts)


def test_streams_differ_across_levels_clients_seeds_and_purposes():
    clients = numbered([40, 40], batch_size=40)
    first = drawn_rows(Sampler(clients, 2, seed=0), [0, 1], 0)[0]
    level1, level2 = ([np.array(rows) - 40 * k for k, rows in enumerate(level)] for level in first)
    other = np.array(drawn_rows(Sampler(clients, 2, seed=1), [0], 0)[0][0][0])
    purpose = np.array(drawn_rows(Sampler(clients, 2, 0, "first"), [0], 0)[0][0][0])
    orders = [*level1, *level2, other, purpose]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).mean() < 0.2
            assert abs(stats.spearmanr(a, b).statistic) < 0.45  # type: ignore


def test_short_clients_use_all_their_rows_in_every_step():
    sampler = Sampler(numbered([3, 10], batch_size=4), 1, seed=0)
    for i in range(5):
        short, long = drawn_rows(sampler, [0, 1], i)[0][0]
        assert sorted(short) == [0, 1, 2]
        assert len(set(long)) == 4
    draws = sampler.draw(np.array([0, 1]), 0, 1)
    assert draws.sizes.tolist() == [3, 4]


def test_iid_draws_are_uniform_with_replacement_and_independent():
    sampler = Sampler(numbered([10, 7], batch_size=50, sampling="iid"), 2, seed=0)
    draws = np.array([drawn_rows(sampler, [0, 1], i)[0] for i in range(100)])
    assert uniform(np.bincount(draws[:, 0, 0].ravel(), minlength=10))
    assert uniform(np.bincount(draws[:, 0, 1].ravel() - 10, minlength=7))
    table = np.zeros((10, 10))
    np.add.at(table, (draws[:, 0, 0].ravel(), draws[:, 1, 0].ravel()), 1)
    assert stats.chi2_contingency(table).pvalue > UNLIKELY  # levels are independent  # type: ignore
    assert any(len(set(row.tolist())) < 10 for row in draws[:, 0, 0, :10])


# ------------------------------------------------------------------ balanced


@pytest.mark.parametrize(("share", "positives"), [(0.5, 4), (0.3, 2), (0.01, 1), (0.99, 7)])
def test_balanced_batches_hold_the_exact_number_of_positives(share, positives):
    clients = numbered([20, 9], batch_size=8, sampling="balanced", positive_share=share)
    sampler = Sampler(clients, 1, seed=0)
    for i in range(6):
        for rows in drawn_rows(sampler, [0, 1], i)[0][0]:
            labels = [(r - (20 if r >= 20 else 0)) % 2 for r in rows]
            assert len(rows) == 8
            assert sum(labels) == positives


def test_balanced_pools_are_walked_through_and_start_again():
    clients = numbered([24], batch_size=8, sampling="balanced")
    sampler = Sampler(clients, 1, seed=0)
    for epoch in range(3):
        used = [row for i in range(3) for row in drawn_rows(sampler, [0], 3 * epoch + i)[0][0][0]]
        assert sorted(used) == list(range(24))
    # A pool smaller than its share of a batch is repeated evenly.
    few = Clients([(torch.arange(12.0), torch.tensor([1] * 2 + [0] * 10))], 8, sampling="balanced")
    rows = drawn_rows(Sampler(few, 1, seed=0), [0], 0)[0][0][0]
    assert sorted(r for r in rows if r < 2) == [0, 0, 1, 1]


def test_positives_and_negatives_of_neighbouring_clients_are_drawn_independently():
    """The permutation of one client's positives must not be that of another's negatives."""
    clients = numbered([40] * 6, batch_size=40, sampling="balanced")
    for seed in range(4):
        rows = drawn_rows(Sampler(clients, 1, seed), np.arange(6), 0)[0][0]
        positive = [tuple((np.array(r[:20]) - 40 * k) // 2) for k, r in enumerate(rows)]
        negative = [tuple((np.array(r[20:]) - 40 * k) // 2) for k, r in enumerate(rows)]
        assert len({*positive, *negative}) == 12


def test_the_prior_of_auc_is_the_share_of_balanced_batches():
    module = torch.nn.Linear(1, 1)
    rows = [
        (torch.randn(n, 1, generator=torch.Generator().manual_seed(n)), torch.arange(n) % 4 == 0)
        for n in (8, 24)
    ]

    def prior(**options) -> float:
        clients = Clients(rows, batch_size=8, **options)
        weights = clients.weight_vector(clients.weights or AUC(module).client_weights)
        ask = LocalQuery(AUC(module), clients, "train", weights)
        return AUC(module).prepare(ask).positive_share  # type: ignore[return-value]

    assert prior() == pytest.approx(0.25)
    assert prior(sampling="balanced") == 0.5
    assert prior(sampling="balanced", positive_share=0.3) == 2 / 8  # what 8 rows can hold
    given = AUC(module, positive_share=0.4)
    clients = Clients(rows, batch_size=8, sampling="balanced")
    ask = LocalQuery(given, clients, "train", clients.weight_vector("size"))
    assert given.prepare(ask).positive_share == 0.4


# ------------------------------------------------------------------ stacked and single draws


@pytest.mark.parametrize(
    ("sampling", "batch_size"),
    [(s, b) for s in ("epoch", "iid", "balanced") for b in (4, 8)]
    + [("epoch", None), ("iid", None)],
)
def test_stacked_draws_are_those_of_the_single_clients(sampling, batch_size):
    clients = numbered([5, 12, 7], batch_size=batch_size, sampling=sampling)
    sampler = Sampler(clients, 2, seed=0)
    cohort = np.array([0, 2])
    draws = sampler.draw(cohort, 3, 2)
    for step in range(2):
        for level, stacked in enumerate(draws.stack(step, 2)):
            for p in range(2):
                single = draws.client(p, step, 2)[level]
                real = len(single.weight)
                for ours, theirs in zip(stacked.rows, single.rows, strict=True):
                    assert torch.equal(ours[p][:real], theirs)
                torch.testing.assert_close(stacked.weight[p][:real], single.weight)
                assert float(stacked.weight[p][real:].sum()) == 0
                assert float(stacked.weight[p].sum()) == pytest.approx(1)
                if stacked.padding.shape[1]:
                    expected = torch.arange(stacked.padding.shape[1]) >= real
                    assert torch.equal(stacked.padding[p] > 0, expected)
                else:
                    assert real == stacked.weight.shape[1]


def test_whole_data_gives_all_rows_at_every_level():
    clients = numbered([5, 12, 7], batch_size=4)
    draws = all_rows(clients, np.array([1, 2]))
    draw = draws.client(1, 0, 3)
    assert len(draw) == 3
    assert all(batch.rows[0].tolist() == list(range(17, 24)) for batch in draw)
    assert draws.sizes.tolist() == [12, 7]
    (stacked, *_) = draws.stack(0, 3)
    assert stacked.weight.shape == (2, 12)
    assert stacked.rows[0][1, :7].tolist() == list(range(17, 24))
    means = (stacked.weight * stacked.rows[0]).sum(1)
    torch.testing.assert_close(means, torch.tensor([10.5, 20.0], dtype=torch.float64))


def test_a_full_batch_is_the_whole_data():
    clients = numbered([5, 12], batch_size=None)
    draws = Sampler(clients, 1, seed=0).draw(np.array([0, 1]), 9, 3)
    assert draws.client(0, 2, 1)[0].rows[0].tolist() == list(range(5))


@pytest.mark.parametrize("sampling", ["epoch", "iid", "balanced"])
def test_rows_do_not_depend_on_what_was_drawn_before(sampling):
    """The permutations in use are remembered; any order of questions must give the same answers."""
    clients = numbered([5, 12, 7, 30, 9], batch_size=4, sampling=sampling)
    random = np.random.default_rng(0)
    used = Sampler(clients, 2, seed=4)
    for _ in range(60):
        cohort = np.sort(random.choice(5, size=int(random.integers(1, 6)), replace=False))
        iteration = int(random.integers(0, 25))
        fresh = Sampler(clients, 2, seed=4)
        assert drawn_rows(used, cohort, iteration, 2) == drawn_rows(fresh, cohort, iteration, 2)
        for k, alone in zip(cohort, drawn_rows(fresh, cohort, iteration)[0][0], strict=True):
            assert drawn_rows(Sampler(clients, 2, seed=4), [k], iteration)[0][0][0] == alone


def test_rows_are_drawn_ahead_in_step_with_what_is_used(monkeypatch):
    """A cohort may return by chance, and a run may end soon."""
    ahead: list[int] = []
    plain = Sampler._index
    monkeypatch.setattr(
        Sampler, "_index", lambda s, c, i, steps: (ahead.append(steps), plain(s, c, i, steps))[1]
    )
    sampler, cohort = Sampler(numbered([3, 3]), 1, 0), np.arange(2)
    for iteration in range(100):
        sampler.draw(cohort, iteration, 1)
    assert len(ahead) < 10
    assert sum(ahead) < 3 * 100


@pytest.mark.parametrize("together", [1, 30, 10**9])
@pytest.mark.parametrize("sampling", ["epoch", "iid", "balanced"])
def test_what_is_drawn_ahead_is_what_would_be_drawn_alone(sampling, together, monkeypatch):
    monkeypatch.setattr(batches, "MOST_SHUFFLED", together)
    sizes = (4, 90, 7, 33)
    rows = [(torch.randn(n, 1), (torch.arange(n) % 2).float()) for n in sizes]
    clients = Clients(rows, batch_size=4, sampling=sampling)
    ahead, cohort = Sampler(clients, 2, seed=1), np.arange(4)
    iteration = 0
    for steps in (3, 3, 1, 5, 0, 8, 2, 40, 7):
        found = ahead.draw(cohort, iteration, steps)
        for step in range(steps):
            alone = Sampler(clients, 2, seed=1).draw(cohort, iteration + step, 1)
            assert torch.equal(found.source.index[step], alone.source.index[0])
        iteration += steps


def test_small_clients_do_not_pay_for_a_large_one(monkeypatch):
    hashed = []
    real = batches.words
    monkeypatch.setattr(batches, "words", lambda *given: hashed.append(real(*given)) or hashed[-1])
    clients = Clients([(torch.zeros(n, 1),) for n in [64] * 19 + [20_000]], batch_size=32)
    sampler, steps = Sampler(clients, 1, seed=0), 60
    for iteration in range(steps):
        sampler.draw(np.arange(20), iteration, 1)
    sampler._wait()
    # A pass of a small client is two steps; up to as many are drawn ahead as were used.
    assert sum(part.size for part in hashed) < 20_000 + 4 * 19 * 64 * (steps / 2 + 1)


def test_an_error_while_batches_are_drawn_ahead_is_not_lost(monkeypatch):
    sampler = Sampler(Clients([(torch.zeros(50, 1),)], batch_size=2), 1, seed=0)
    real = sampler._index

    def broken(cohort, iteration, steps):
        if iteration > 20:
            raise RuntimeError("no more")
        return real(cohort, iteration, steps)

    monkeypatch.setattr(sampler, "_index", broken)
    with pytest.raises(RuntimeError, match="no more"):
        [sampler.draw(np.arange(1), iteration, 1) for iteration in range(60)]


def test_first_batches_are_larger_and_keep_their_share_of_positives():
    clients = numbered([40], batch_size=8, sampling="balanced", positive_share=0.25)
    rows = drawn_rows(Sampler(clients, 1, 0, "first", times=3), [0], 0)[0][0][0]
    assert len(rows) == 24
    assert sum(r % 2 for r in rows) == 6


# ------------------------------------------------------------------ what is refused

GOOD = (torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))


@pytest.mark.parametrize(
    ("rows", "options", "sentence"),
    [
        ([], {}, "no clients"),
        ([GOOD, GOOD], {"names": ["a", "a"]}, "as many different names"),
        ([GOOD], {"batch_size": 0}, "batch_size is 0"),
        ([GOOD], {"weights": "equal"}, "weights is 'equal'"),
        ([GOOD], {"sampling": "epochs"}, "sampling is 'epochs'"),
        ([GOOD], {"validation": [GOOD, GOOD]}, "validation rows for 2 clients"),
        ([GOOD], {"sampling": "balanced", "positive_share": 1.0}, "positive_share is 1.0"),
        ([GOOD], {"sampling": "balanced", "batch_size": 1}, "at least 2"),
        ([GOOD], {"sampling": "balanced", "batch_size": None}, "at least 2"),
        ([GOOD[:1]], {"sampling": "balanced"}, "column of labels"),
        ([(GOOD[0], GOOD[1] * 0)], {"sampling": "balanced"}, "one class only"),
        ([GOOD[0]], {}, "not one array"),
        ([(GOOD[0], GOOD[1][:3])], {}, r"\[4, 3\] rows"),
        ([(torch.zeros(0, 2),)], {}, "has no rows"),
        ([(torch.tensor([[0.0], [float("nan")]]),)], {}, "row 1"),
        ([GOOD, (torch.zeros(4, 3), GOOD[1])], {}, "client 1 has columns"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_with_a_sentence(rows, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Clients(rows, **options)
