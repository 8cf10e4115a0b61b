"""Partitions, imbalance and splits: every row where it belongs, and always an end."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedminimax.data.imbalance import keep_positives
from fedminimax.data.partition import by_column, class_groups, dirichlet, iid, positive_classes
from fedminimax.data.sites import DataError
from fedminimax.data.split import stratified_split

seeds = st.integers(0, 2**31)
label_lists = st.lists(st.integers(0, 4), min_size=1, max_size=60)


def cover(parts, rows):
    return np.sort(np.concatenate(parts)).tolist() == list(range(rows))


def equal(ours, theirs):
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@given(label_lists, seeds, st.data())
def test_iid_deals_all_rows_in_equal_shares(labels, seed, data):
    clients = data.draw(st.integers(1, len(labels)))
    parts = iid(np.array(labels), clients, seed)
    sizes = [len(part) for part in parts]
    assert len(parts) == clients
    assert cover(parts, len(labels))
    assert max(sizes) - min(sizes) <= 1
    assert all((np.diff(part) > 0).all() for part in parts)
    assert equal(parts, iid(np.array(labels), clients, seed))


@settings(deadline=None)
@given(label_lists, seeds, st.floats(1e-300, 1e300), st.data())
def test_dirichlet_always_ends_with_every_client_served(labels, seed, concentration, data):
    clients = data.draw(st.integers(1, len(labels)))
    parts = dirichlet(np.array(labels), clients, concentration, seed)
    assert len(parts) == clients
    assert cover(parts, len(labels))
    assert min(map(len, parts)) >= 1
    assert all((np.diff(part) > 0).all() for part in parts)
    assert equal(parts, dirichlet(np.array(labels), clients, concentration, seed))


def test_dirichlet_concentration_sets_how_unlike_the_clients_are():
    labels = np.repeat([0, 1], 5000)

    def spread(concentration):
        parts = dirichlet(labels, 10, concentration, seed=0)
        return np.std([labels[part].mean() for part in parts])

    assert spread(0.1) > 0.2 > 0.05 > spread(1000.0)
    # At the far end of the numbers the limit stands in: equal shares.
    assert {len(part) for part in dirichlet(labels, 10, 1e308, seed=0)} == {1000}


def test_seeds_differ():
    labels = np.repeat([0, 1], 50)
    assert not equal(iid(labels, 2, 0), iid(labels, 2, 1))
    assert not equal(dirichlet(labels, 2, 1.0, 0), dirichlet(labels, 2, 1.0, 1))
    assert not equal(stratified_split(labels, seed=0), stratified_split(labels, seed=1))
    assert not equal(stratified_split(labels, number=0), stratified_split(labels, number=1))
    assert not np.array_equal(keep_positives(labels, 0.1, 0), keep_positives(labels, 0.1, 1))
    assert not np.array_equal(keep_positives(labels, 0.1, 0, 0), keep_positives(labels, 0.1, 0, 1))


@pytest.mark.parametrize("clients", [0, 4])
def test_more_clients_than_rows_or_none_are_refused(clients):
    labels = np.array([0, 1, 1])
    for partition in (
        iid,
        lambda *a: dirichlet(a[0], a[1], 1.0, a[2]),
        lambda *a: class_groups(a[0], a[1], 0.1, a[2]),
    ):
        with pytest.raises(DataError, match=f"{clients} clients cannot share 3 rows"):
            partition(labels, clients, 0)


@pytest.mark.parametrize("concentration", [0.0, -1.0, np.inf, np.nan])
def test_a_bad_concentration_is_refused(concentration):
    with pytest.raises(DataError, match="concentration is"):
        dirichlet(np.array([0, 1]), 2, concentration, 0)


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_class_groups_are_the_papers_cifar100(share):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(100), 500))
    index, binary = class_groups(labels, 16, share, seed=3)
    np.testing.assert_array_equal(binary, labels >= 50)
    owned = [set(labels[rows].tolist()) for rows in index]
    assert sum(map(len, owned)) == 100 == len(set.union(*owned))
    for rows in index:
        negatives = int((binary[rows] == 0).sum())
        # 50 classes to 16 clients: three or four of each side, and every negative is kept.
        assert negatives in (1500, 2000)
        assert (np.diff(rows) > 0).all()
        assert binary[rows].sum() == min(int(share / (1 - share) * negatives), 500 * 4)
    assert not equal(index, class_groups(labels, 16, share, seed=4)[0])


def test_class_groups_thin_each_client_by_a_draw_of_its_own():
    # Rows in turn 0 1 2 3: both clients' rows lie alike, so that only the draws can differ.
    labels = np.tile(np.arange(4), 200)
    index, binary = class_groups(labels, 2, 0.2, seed=0)
    first, second = (rows[binary[rows] == 1] // 4 for rows in index)
    assert len(first) == len(second) == 50
    assert not np.array_equal(first, second)


def test_class_groups_take_other_positive_classes():
    labels = np.repeat(np.arange(6), 10)
    index, binary = class_groups(labels, 2, 0.5, seed=0, positive=[0, 5])
    np.testing.assert_array_equal(binary, np.isin(labels, [0, 5]))
    assert all(len(np.unique(labels[rows])) == 3 for rows in index)
    with pytest.raises(DataError, match="hold 7, which no row has"):
        class_groups(labels, 2, 0.5, seed=0, positive=[0, 7])


def test_class_groups_need_a_class_of_each_side_per_client():
    labels = np.repeat(np.arange(5), 10)
    assert positive_classes(labels).tolist() == [2, 3, 4]
    with pytest.raises(DataError, match=r"3 positive and 2 negative classes\. Ask for at most 2"):
        class_groups(labels, 3, 0.1, seed=0)


def test_by_column_makes_a_client_of_every_value():
    names, parts = by_column([10, 9, 10, 2])
    assert names == ["2", "9", "10"]
    assert [part.tolist() for part in parts] == [[3], [1], [0, 2]]
    assert by_column(np.array(["b", "a"], dtype=object))[0] == ["a", "b"]
    for bad in ([1.0, np.nan], ["a", ""], np.array(["a", None], dtype=object)):
        with pytest.raises(DataError, match="Row 1 has no value"):
            by_column(bad)
    with pytest.raises(DataError, match="at least one row"):
        by_column([])


@pytest.mark.parametrize(("negatives", "kept"), [(25_000, 2777), (30_000, 3333)])
def test_keep_positives_gives_the_papers_cifar_counts(negatives, kept):
    labels = np.repeat([1, 0], negatives)
    index = keep_positives(labels, 0.1, seed=0)
    assert (labels[index] == 1).sum() == kept
    assert (labels[index] == 0).sum() == negatives
    assert (np.diff(index) > 0).all()


@given(st.lists(st.integers(0, 1), max_size=60), st.floats(0.001, 0.999), seeds)
def test_keep_positives_keeps_all_negatives_and_one_positive(labels, share, seed):
    labels = np.array(labels, dtype=int)
    kept = labels[keep_positives(labels, share, seed)]
    negatives, positives = int((labels == 0).sum()), int((labels == 1).sum())
    assert (kept == 0).sum() == negatives
    assert (kept == 1).sum() == min(positives, max(1, int(share / (1 - share) * negatives)))


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, np.nan])
def test_a_share_outside_zero_to_one_is_refused(share):
    with pytest.raises(DataError, match="share of positives is"):
        keep_positives(np.array([0, 1]), share, 0)


def test_imbalance_needs_binary_labels():
    with pytest.raises(DataError, match="labels hold -1"):
        keep_positives(np.array([-1, 1]), 0.1, 0)


fraction_lists = st.sampled_from(
    [(0.6, 0.2, 0.2), (0.8, 0.1, 0.1), (1 / 3, 1 / 3, 1 / 3), (0.9, 0.05, 0.05)]
)


@given(label_lists, fraction_lists, seeds, st.integers(0, 9))
def test_split_puts_every_row_in_one_part_and_every_class_where_it_can(
    labels, fractions, seed, site
):
    labels = np.array(labels)
    parts = stratified_split(labels, fractions, seed, site)
    assert cover(parts, len(labels))
    assert all((np.diff(part) > 0).all() for part in parts)
    assert equal(parts, stratified_split(labels, fractions, seed, site))
    for value in np.unique(labels):
        rows = int((labels == value).sum())
        counts = [int((labels[part] == value).sum()) for part in parts]
        assert counts[0] >= 1
        if rows >= 3:
            assert min(counts) >= 1
            assert all(abs(n - f * rows) < 2 for n, f in zip(counts, fractions, strict=True))
        else:
            assert counts == [[1, 0, 0], [1, 0, 1]][rows - 1]


def test_split_cuts_exactly_where_the_fractions_divide():
    labels = np.repeat([0, 1], [1000, 100])
    parts = stratified_split(labels, (0.61, 0.1, 0.29), seed=5)
    assert [(len(part), int(labels[part].sum())) for part in parts] == [
        (671, 61),
        (110, 10),
        (319, 29),
    ]
    train, validation, test = stratified_split(labels, (0.7, 0.0, 0.3), seed=5)
    assert (len(train), len(validation), len(test)) == (770, 0, 330)
    assert [len(part) for part in stratified_split(np.zeros(1), (0.7, 0.0, 0.3))] == [1, 0, 0]
    assert validation.dtype == np.int64


@pytest.mark.parametrize(
    "fractions",
    [
        (0.5, 0.5),
        (0.6, 0.2, 0.1),
        (0.0, 0.5, 0.5),
        (1.2, -0.1, -0.1),
        (np.nan, 0.5, 0.5),
        (0.4, 0.2, 0.2, 0.2),
    ],
)
def test_bad_fractions_are_refused(fractions):
    with pytest.raises(DataError, match="The fractions are"):
        stratified_split(np.array([0, 1]), fractions)
