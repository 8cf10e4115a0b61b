"""Federated encoding: edges near the pooled quantiles from sums alone, and what becomes of rows."""

import json

import numpy as np
import pytest

from fedminimax.data.encoding import Encoder, Part, answer, fit, group_values
from fedminimax.data.folder import Reading
from fedminimax.data.prepare import Split, inputs_of, prepare, split_sites
from fedminimax.data.sites import Column, DataError, Schema, Site

ROWS = 10_000  # per site
TOLERANCE = 1e-3


def columns(number):
    """A site's columns; sites differ in where their values lie."""
    random = np.random.default_rng(number)
    normal = random.standard_normal(ROWS) + number
    return {
        "skewed": np.exp(2 * normal),
        "heavy tails": random.standard_cauchy(ROWS),
        "six zeros in ten": np.where(random.random(ROWS) < 0.6, 0.0, normal),
        "decimals": np.round(37 + normal, 1),
        "grades": random.integers(0, 5, ROWS).astype(float),
        "a million": 1e6 + normal,
        "tiny": 1e-9 * normal,
        "single precision": normal.astype(np.float32).astype(float),
        "of one site": normal if number == 1 else np.full(ROWS, np.nan),
        "binary": (random.random(ROWS) < 0.02).astype(float),
        "constant": np.full(ROWS, 7.0),
    }


@pytest.fixture(scope="module")
def sites():
    return [np.stack(list(columns(number).values()), axis=1) for number in range(3)]


def summed(sites, least=0):
    return lambda edges: np.sum([answer(site, edges, least) for site in sites], axis=0)


NAMES = tuple(columns(0))
SCHEMA = Schema(tuple(Column(name) for name in NAMES), "label")


@pytest.fixture(scope="module")
def fitted(sites):
    return fit(SCHEMA, summed(sites))


def rank_error(edges, values, levels):
    """The distance of each level from the nearest edge, in share of rows: 0 on a tie."""
    values = np.sort(values[~np.isnan(values)])
    below, up_to = (
        np.searchsorted(values, edges, side) / len(values) for side in ("left", "right")
    )
    far = np.maximum(below - levels[:, None], levels[:, None] - up_to)
    return float(np.maximum(far, 0.0).min(axis=1).max())


LEVELS = np.arange(1, 16) / 16


@pytest.mark.parametrize("name", [name for name in NAMES if name != "constant"])
def test_edges_are_pooled_quantiles_to_a_thousandth_of_the_rows(name, sites, fitted):
    place = NAMES.index(name)
    pooled = np.concatenate([site[:, place] for site in sites])
    edges = np.array(fitted.parts[place].edges)
    assert rank_error(edges, pooled, LEVELS) <= TOLERANCE
    assert fitted.exchanges <= 4
    # The outermost ones have `rare` rows beyond them, or on them.
    present = pooled[~np.isnan(pooled)]
    assert (present <= edges[0]).sum() >= 9
    assert (present >= edges[-1]).sum() >= 9


@pytest.mark.parametrize("least", [2, 5, 30])
def test_with_counts_of_groups_edges_stay_within_the_bound(least, sites):
    encoder = fit(SCHEMA, summed(sites, least))
    for place, name in enumerate(NAMES[:-1]):
        pooled = np.concatenate([site[:, place] for site in sites])
        rows = (~np.isnan(pooled)).sum()
        bound = TOLERANCE + len(sites) * 2 * least / rows
        assert rank_error(np.array(encoder.parts[place].edges), pooled, LEVELS) <= bound, name


def test_a_site_tells_values_of_groups_alone(sites):
    for column in sites[1].T:
        values = column[~np.isnan(column)]
        told, ties = np.unique(group_values(values, 5), return_counts=True)
        assert ties.min() >= 5
        assert ties.sum() == len(values)
        assert set(told[ties >= 10]) <= set(values)
    assert not group_values(np.arange(4.0), 5).size
    few = np.array([[1.0]] * 9 + [[np.nan]] * 3)
    assert answer(few, [np.empty(0)], 5).tolist() == [9, 0]
    assert answer(few, [np.empty(0)], 3).tolist() == [9, 3]


def test_only_the_sum_over_sites_matters(sites, fitted):
    other = fit(SCHEMA, summed([np.concatenate(sites)]))
    assert other.to_json() == fitted.to_json()


def test_a_constant_has_no_feature_and_a_binary_column_stays_as_it_is(fitted):
    parts = dict(zip(NAMES, fitted.parts, strict=True))
    assert parts["constant"].outputs == ()
    assert parts["binary"].edges == (0.0, 1.0)
    assert parts["grades"].edges == (0.0, 1.0, 2.0, 3.0, 4.0)
    assert parts["of one site"].outputs[-1] == "of one site: missing"


def test_numbers_are_encoded_piecewise_linearly():
    encoder = Encoder(("x",), (Part("x", 1, (1.0, 2.0, 4.0)),), np.array([0.5, 0.25]))
    rows = np.array([[-5.0], [1.5], [2.0], [2.5], [1e9], [np.nan]])
    expected = [[0, 0], [0.5, 0], [1, 0], [1, 0.25], [1, 1]]
    got = encoder.transform(rows)
    np.testing.assert_allclose(got[:-1] / 2 + encoder.mean, expected, atol=1e-12)
    assert got[-1].tolist() == [0, 0]


def test_encoded_training_rows_are_centred(sites, fitted):
    pooled = np.concatenate(sites)
    np.testing.assert_allclose(fitted.transform(pooled).mean(0), 0, atol=0.05)


@pytest.mark.parametrize("rare", [1, 100, 3000])
def test_each_bin_has_enough_rows(rare, sites):
    encoder = fit(SCHEMA, summed(sites), bins=32, rare=rare)
    for part, column in zip(encoder.parts, np.concatenate(sites).T, strict=True):
        present = column[~np.isnan(column)]
        counts = np.histogram(present, part.edges)[0] if part.edges else []
        assert all(count >= min(rare, len(present) // 4) for count in counts), part.name


@pytest.mark.parametrize("rows", [2, 3, 7, 30])
def test_few_rows_are_enough_for_a_bin(rows):
    encoder = fit(Schema((Column("x"),), "label"), summed([np.arange(rows)[:, None] / 3]))
    assert len(encoder.parts[0].edges) >= 2


# Text columns and missing values


WARD = Schema((Column("ward", "text", ("a", "b", "c", "d")), Column("age")), "label")


def wards(cells):
    cells = [str(cell) for cell in cells]
    return WARD.columns[0].encode(cells, ("",), str, unknown="other")


def ward_rows():
    cells = ["a"] * 40 + ["b"] * 30 + ["c"] * 4 + ["d"] * 3 + [""] * 23
    age = np.linspace(20, 90, 100)[:, None]
    return np.hstack([wards(cells), age])


def test_rare_codes_are_one_and_missing_values_are_marked():
    encoder = fit(WARD, summed([ward_rows()]), bins=2)
    names = ("ward=a", "ward=b", "ward: other", "ward: missing")
    assert encoder.outputs[:4] == names
    cells = ["a", "b", "c", "d", "never seen", ""]
    rows = np.hstack([wards(cells), np.full((6, 1), 50.0)])
    got = (encoder.transform(rows) / 2 + encoder.mean)[:, :4]
    other, share = [0, 0, 1, 0], [40 / 77, 30 / 77, 7 / 77]
    expected = [[1, 0, 0, 0], [0, 1, 0, 0], other, other, other, [*share, 1]]
    np.testing.assert_allclose(got, expected, atol=1e-12)
    np.testing.assert_allclose(encoder.transform(ward_rows())[:, :4].mean(0), 0, atol=1e-12)


def test_a_mark_of_missing_values_needs_as_many_rows_as_a_code():
    values = np.arange(100.0)[:, None]
    for missing, marked in ((9, False), (10, True)):
        values[:missing] = np.nan
        (part,) = fit(Schema((Column("age"),), "label"), summed([values])).parts
        assert part.missing is marked


def test_without_rare_codes_one_that_was_never_seen_counts_as_missing():
    encoder = fit(WARD, summed([ward_rows()]), bins=2, rare=2)
    assert encoder.outputs[:5] == ("ward=a", "ward=b", "ward=c", "ward=d", "ward: missing")
    rows = np.hstack([wards(["never seen"]), [[50.0]]])
    assert not encoder.transform(rows)[0, :4].any()


def test_codes_beside_one_of_reference_are_binary_numbers():
    column = Column("ward", "text", ("a", "b", "c"), drop_first=True)
    rows = column.encode(["a"] * 30 + ["b"] * 20 + ["c"] * 3, ("",), str)
    encoder = fit(Schema((column,), "label"), summed([rows]))
    assert [part.outputs for part in encoder.parts] == [("ward=b bin 1",), ()]


# As part of what a run is prepared with


def reading(sites):
    rows = [np.hstack([site[:400, :4]]) for site in sites]
    labels = np.arange(400) % 2
    held = [Site(name, NAMES[:4], x, labels) for name, x in zip("abc", rows, strict=True)]
    return Reading(held, [], Schema(SCHEMA.columns[:4], "label"))


def test_new_rows_are_treated_as_those_of_the_run(sites):
    prepared = prepare(reading(sites), Split(bins=8))
    again = inputs_of(json.loads(json.dumps(prepared.about())))
    assert isinstance(again, Encoder)
    assert again.outputs == prepared.inputs.outputs
    values = reading(sites).sites[0].features
    np.testing.assert_array_equal(again.transform(values), prepared.inputs.transform(values))
    assert prepared.rows["test"][0][0].shape == (80, len(again.outputs))
    with pytest.raises(DataError, match=r"shape \(400, 3\), but the encoder was fitted to 4 col"):
        again.transform(values[:, :3])


def test_other_than_training_rows_have_no_say(sites):
    plain = reading(sites)
    prepared = prepare(plain, Split(bins=8))
    spoilt = [
        Site(s.name, s.columns, np.where(np.isin(s.features, kept), s.features, 1e6), s.labels)
        for s, kept in zip(plain.sites, training_values(plain), strict=True)
    ]
    again = prepare(plain._replace(sites=spoilt), Split(bins=8))
    assert again.inputs.to_json() == prepared.inputs.to_json()


def training_values(plain):
    return [site.features for site in split_sites(plain.sites, Split())["train"]]


@pytest.mark.parametrize(
    ("values", "options", "sentence"),
    [
        (np.full((50, 1), np.nan), {}, "No site has values in the columns 'x'"),
        (np.full((50, 1), 3.0), {}, "No column has two values that 10 training rows"),
        (np.linspace(-1e200, 1e200, 50)[:, None], {}, "column 'x' are too large"),
        (np.ones((50, 1)), {"bins": -1}, r"split\.bins is -1; give 0 or more"),
        (np.ones((50, 1)), {"rare": 0}, r"split\.rare is 0; give 1 or more"),
        (np.ones((50, 1)), {"standardise": False}, "features have one scale already"),
    ],
)
def test_what_cannot_be_encoded_ends_in_a_sentence(values, options, sentence):
    schema = Schema((Column("x"),), "label")
    site = Site("a", ("x",), values, np.arange(50) % 2)
    with pytest.raises(DataError, match=sentence):
        prepare(Reading([site], [], schema), Split(**{"bins": 8, **options}))
