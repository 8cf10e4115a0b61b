"""Federated standardisation equals the pooled one, also where the one-pass formula breaks."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler

from fedminimax.data.heart import Heart
from fedminimax.data.sites import DataError, Site
from fedminimax.data.statistics import Standardiser, fit, local_moments


def make(arrays, columns=None):
    width = arrays[0].shape[1]
    columns = columns or tuple(f"x{i}" for i in range(width))
    return [Site(f"s{i}", columns, a, np.zeros(len(a), int)) for i, a in enumerate(arrays)]


def holey(rng, rows, width, shift=0.0):
    array = rng.normal(size=(rows, width)) * 10.0 ** np.arange(width) + shift
    return np.where(rng.random(array.shape) < 0.3, np.nan, array)


def test_fit_equals_the_pooled_mean_and_deviation():
    rng = np.random.default_rng(0)
    arrays = [holey(rng, rows, 4) for rows in (50, 1, 7)]
    arrays[2][:, 1] = np.nan
    got, pooled = fit(make(arrays)), np.concatenate(arrays)
    np.testing.assert_allclose(got.mean, np.nanmean(pooled, axis=0), rtol=1e-12)
    np.testing.assert_allclose(got.scale, np.nanstd(pooled, axis=0), rtol=1e-12)
    wanted = np.nan_to_num(StandardScaler().fit_transform(pooled))
    np.testing.assert_allclose(got.transform(pooled), wanted, rtol=1e-12, atol=1e-12)


def test_a_large_shift_does_not_break_it():
    rng = np.random.default_rng(1)
    # Multiples of 2^-20 keep x + 1e8 exact, so that any difference comes from the sums.
    arrays = [np.rint(rng.normal(size=(rows, 2)) * 2**20) / 2**20 for rows in (400, 30)]
    near, far = fit(make(arrays)), fit(make([array + 1e8 for array in arrays]))
    np.testing.assert_allclose(far.scale, near.scale, rtol=1e-12)
    np.testing.assert_allclose(far.mean - 1e8, near.mean, atol=2e-8)
    pooled = np.concatenate(arrays)
    assert np.abs(far.transform(pooled + 1e8) - near.transform(pooled)).max() < 2e-8


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30),
    st.integers(1, 29),
    st.sampled_from([0.0, 1e4, 1e8]),
)
def test_the_cut_into_sites_does_not_matter(values, cut, shift):
    pooled = np.array(values)[:, None] + shift
    parts = [part for part in np.split(pooled, [min(cut, len(pooled))]) if len(part)]
    one, two = fit(make([pooled])), fit(make(parts))
    np.testing.assert_allclose(two.mean, one.mean, rtol=1e-14, atol=1e-9)
    np.testing.assert_allclose(two.transform(pooled), one.transform(pooled), atol=1e-6)


def test_constant_columns_have_scale_one_even_when_their_mean_rounds():
    values = np.random.default_rng(2).normal(size=300) * 10.0 ** np.arange(300) ** 0.3
    arrays = [np.tile(values, (rows, 1)) for rows in (3, 1001)]
    got = fit(make(arrays))
    assert set(got.scale) == {1}
    np.testing.assert_allclose(got.mean, values, rtol=1e-14)
    # Sites that write the same number with another last bit do not make it vary.
    assert fit(make([np.array([[1.0]]), np.array([[1.0 + 2**-52]])])).scale.tolist() == [1]


def test_missing_values_and_missing_codes_become_the_mean():
    sites = Heart().sites()
    got = fit(sites)
    for site in sites:
        clean = got.apply(site).features
        assert np.isfinite(clean).all()
        assert (clean[np.isnan(site.features)] == 0).all()
    # All of Switzerland's cholesterol is missing, so that all of it stands at the others' mean.
    assert (got.apply(sites[2]).features[:, sites[2].columns.index("chol")] == 0).all()


def test_what_is_exchanged_is_counted():
    got = fit(make([np.eye(3), np.eye(3)]))
    # Up: count and sum, then sum and squares. Down: the mean, then mean and scale.
    assert (got.floats_up, got.floats_down, got.exchanges) == (12, 9, 2)
    assert local_moments(np.eye(3)).shape == (3, 3)


def test_a_column_empty_everywhere_is_refused_by_name():
    sites = make([np.array([[1.0, np.nan]]), np.array([[2.0, np.nan]])], ("age", "ca"))
    with pytest.raises(DataError, match="columns 'ca'"):
        fit(sites)


def test_other_bad_input_is_refused():
    with pytest.raises(DataError, match="no sites"):
        fit([])
    with pytest.raises(DataError, match="too large to sum"):
        fit(make([np.array([[1e308], [-1e308], [1e308], [1e308]])]))
    a, b = make([np.eye(2)])[0], make([np.eye(2)], ("x1", "x0"))[0]
    with pytest.raises(DataError, match="the order"):
        fit([a, b])
    with pytest.raises(DataError, match="the order"):
        fit([a]).apply(b)
    with pytest.raises(DataError, match="fitted to 2 columns"):
        fit([a]).transform(np.eye(3))


def test_it_survives_json_to_the_last_bit():
    got = fit(Heart().sites())
    back = Standardiser.from_json(json.loads(json.dumps(got.to_json())))
    assert back.columns == got.columns
    assert back.floats_up == got.floats_up
    np.testing.assert_array_equal(back.mean, got.mean)
    np.testing.assert_array_equal(back.scale, got.scale)
