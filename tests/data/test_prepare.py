"""From tables to clients: no row twice, nothing learnt from rows that judge."""

import json
from itertools import chain

import numpy as np
import pytest

from fedminimax.data.heart import Heart
from fedminimax.data.pooled import Pooled
from fedminimax.data.prepare import Split, auxiliary, prepare, split_sites
from fedminimax.data.sites import DataError, Schema
from fedminimax.data.statistics import Standardiser

PARTS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def reading():
    return Heart().read()


def numbered(reading):
    """The sites with a number in place of the first feature, so that every row can be told."""
    marked, start = [], 0
    for site in reading.sites:
        features = site.features.copy()
        features[:, 0] = np.arange(start, start + len(site))
        marked.append(type(site)(site.name, site.columns, features, site.labels))
        start += len(site)
    return marked


def row_numbers(sites):
    return np.concatenate([site.features[:, 0] for site in sites]).astype(int).tolist()


# Splits


def test_the_server_s_own_rows_are_the_first_of_each_class():
    one = (np.array([[1.0], [2.0], [3.0]]), np.array([0, 1, 0]))
    rows = [one, (np.ones((1, 1)), np.array([1]))]
    found = auxiliary(rows, 2)
    assert found is not None
    features, labels = found
    assert (features[:, 0].tolist(), labels.tolist()) == ([1, 3, 2, 1], [0, 0, 1, 1])
    assert auxiliary(rows, 0) is None
    with pytest.raises(DataError, match="only 2 training rows of class 0"):
        auxiliary(rows, 3)
    with pytest.raises(DataError, match="only 1 training rows of class 1"):
        auxiliary([one], 3)  # of class 0 there are too few as well
    with pytest.raises(DataError, match=r"split\.auxiliary is -1"):
        auxiliary(rows, -1)


def test_every_row_is_in_one_split(reading):
    parts = {
        name: row_numbers(sites) for name, sites in split_sites(numbered(reading), Split()).items()
    }
    assert list(parts) == list(PARTS)
    assert sorted(chain(*parts.values())) == list(range(920))


def test_the_splits_have_their_sizes_and_class_shares_at_every_site(reading):
    parts = split_sites(reading.sites, Split())
    for number, site in enumerate(reading.sites):
        for name, fraction in zip(PARTS, (0.6, 0.2, 0.2), strict=True):
            part = parts[name][number]
            assert part.name == site.name
            # Each class is rounded by itself, so two classes are off by less than two rows.
            assert abs(len(part) - fraction * len(site)) < 2
            assert abs(part.labels.sum() - fraction * site.labels.sum()) < 1


def test_a_split_depends_on_its_seed_alone(reading):
    sites = numbered(reading)

    def rows(**options):
        return {k: row_numbers(v) for k, v in split_sites(sites, Split(**options)).items()}

    assert rows() == rows(seed=0, standardise=False)
    assert rows(seed=1) == rows(seed=1)
    assert rows(seed=1)["test"] != rows(seed=0)["test"]
    thin = {"positive_share": 0.1}
    assert rows(seed=1, **thin)["train"] != rows(seed=0, **thin)["train"]


def test_a_split_of_fraction_zero_is_left_out(reading):
    parts = split_sites(reading.sites, Split(train=0.75, validation=0, test=0.25))
    assert list(parts) == ["train", "test"]
    assert sum(map(len, parts["train"])) + sum(map(len, parts["test"])) == 920


@pytest.mark.parametrize(
    "fractions", [{"validation": 0.0}, {"train": 0.0, "test": 0.8}, {"train": 1.2, "test": -0.4}]
)
def test_fractions_that_do_not_add_up_are_refused(reading, fractions):
    with pytest.raises(DataError, match=r"The fractions are .* that add up to 1"):
        split_sites(reading.sites, Split(**fractions))


def test_a_site_too_small_for_a_split_ends_in_a_sentence(reading):
    small = reading.sites[0].take(np.flatnonzero(reading.sites[0].labels == 0)[:2])
    with pytest.raises(DataError) as caught:
        split_sites([reading.sites[1], small], Split())
    message = str(caught.value)
    assert "Site 'cleveland' has 2 rows, too few for validation rows" in message
    assert "set split.validation = 0" in message
    parts = split_sites([reading.sites[1], small], Split(0.5, 0, 0.5))
    assert [len(site) for site in parts["test"]][1] == 1


# Thinning


def test_thinning_leaves_the_test_rows_and_all_negatives_alone(reading):
    sites = numbered(reading)
    plain, thin = split_sites(sites, Split()), split_sites(sites, Split(positive_share=0.1))
    assert row_numbers(thin["test"]) == row_numbers(plain["test"])
    for name in ("train", "validation"):
        for before, after in zip(plain[name], thin[name], strict=True):
            negatives = before.features[before.labels == 0, 0].tolist()
            assert after.features[after.labels == 0, 0].tolist() == negatives
            assert set(row_numbers([after])) <= set(row_numbers([before]))
            assert after.labels.sum() == max(1, int(len(negatives) / 9))


def test_thinning_makes_the_training_share_about_a_tenth(reading):
    labels = np.concatenate([s.labels for s in split_sites(reading.sites, Split())["train"]])
    thinned = split_sites(reading.sites, Split(positive_share=0.1))["train"]
    assert labels.mean() > 0.5
    assert np.concatenate([s.labels for s in thinned]).mean() == pytest.approx(0.1, abs=0.015)


def test_a_share_that_is_none_is_refused(reading):
    with pytest.raises(DataError, match=r"share of positives is 1\.5"):
        split_sites(reading.sites, Split(positive_share=1.5))


# Standardising


def pooled(prepared, part):
    return np.concatenate([features for features, _ in prepared.rows[part]])


@pytest.mark.parametrize("share", [None, 0.1])
def test_the_training_rows_decide_the_scale(reading, share):
    split = Split(positive_share=share)
    prepared, raw = prepare(reading, split), split_sites(reading.sites, split)
    train, missing = (
        pooled(prepared, "train"),
        np.isnan(np.concatenate([site.features for site in raw["train"]])),
    )
    present = np.ma.array(train, mask=missing)
    np.testing.assert_allclose(present.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(present.var(0), 1, atol=1e-12)
    # The other rows are shifted by the same numbers, so theirs are only near.
    assert np.abs(pooled(prepared, "test").mean(0)).max() > 1e-3


def test_other_rows_have_no_say(reading):
    """Spoiling every validation and test row changes no training row."""
    raw = split_sites(numbered(reading), Split())
    judged = set(row_numbers(raw["validation"])) | set(row_numbers(raw["test"]))
    start, spoilt = 0, []
    for site in reading.sites:
        features = site.features.copy()
        rows = [row - start for row in judged if start <= row < start + len(site)]
        features[rows] = 1e6
        spoilt.append(type(site)(site.name, site.columns, features, site.labels))
        start += len(site)
    clean, dirty = prepare(reading, Split()), prepare(reading._replace(sites=spoilt), Split())
    np.testing.assert_array_equal(pooled(clean, "train"), pooled(dirty, "train"))
    assert pooled(dirty, "test").min() > 1e3


@pytest.mark.parametrize("standardise", [True, False])
def test_missing_values_are_imputed_at_the_mean(reading, standardise):
    split = Split(standardise=standardise)
    prepared, raw = prepare(reading, split), split_sites(reading.sites, split)
    for part in PARTS:
        missing = np.isnan(np.concatenate([site.features for site in raw[part]]))
        assert missing.any()
        assert (pooled(prepared, part)[missing] == 0).all()
        assert np.isfinite(pooled(prepared, part)).all()


def test_without_standardising_values_are_only_centred(reading):
    split = Split(standardise=False)
    prepared, raw = prepare(reading, split), split_sites(reading.sites, split)["train"]
    age = np.concatenate([site.features[:, 0] for site in raw])
    np.testing.assert_allclose(pooled(prepared, "train")[:, 0], age - age.mean(), atol=1e-9)


def test_labels_names_and_notes_come_along(reading):
    prepared = prepare(reading, Split())
    assert prepared.names == ("cleveland", "hungary", "switzerland", "va")
    assert [len(prepared.rows[part]) for part in PARTS] == [4, 4, 4]
    raw = split_sites(reading.sites, Split())
    for part in PARTS:
        for (_, labels), site in zip(prepared.rows[part], raw[part], strict=True):
            np.testing.assert_array_equal(labels, site.labels)
    assert prepared.notes == reading.notes


def test_a_site_of_one_class_is_noted(reading):
    lone = reading.sites[1].take(reading.sites[1].labels == 1)
    sites = [reading.sites[0], lone]
    notes = prepare(reading._replace(sites=sites), Split()).notes
    assert notes[-1] == "all rows have the same label at hungary: no AUC can be told there"


def test_what_is_stored_treats_new_rows_alike(reading):
    prepared = prepare(reading, Split())
    about = json.loads(json.dumps(prepared.about()))
    standardiser = Standardiser.from_json(about["standardiser"])
    raw = split_sites(reading.sites, Split())["test"][0]
    np.testing.assert_array_equal(standardiser.transform(raw.features), prepared.rows["test"][0][0])
    assert Schema.from_json(about["schema"]) == reading.schema


# One pooled table


@pytest.fixture
def table(tmp_path):
    """60 rows: x tells the row, `hospital` one of three."""
    lines = [f"{i},{'mf'[i % 2]},{'abc'[i % 3]},{int(i % 4 == 0)}" for i in range(60)]
    path = tmp_path / "all.csv"
    path.write_text("\n".join(["x,sex,hospital,num", *lines, ""]))
    return str(path)


def dealt(sites):
    return [site.features[:, site.columns.index("x")].astype(int).tolist() for site in sites]


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_rows_are_dealt_out_once(table, partition):
    reading = Pooled(table, "num", partition, clients=4).read()
    rows = dealt(reading.sites)
    assert [site.name for site in reading.sites] == ["0", "1", "2", "3"]
    assert sorted(chain(*rows)) == list(range(60))
    for site, own in zip(reading.sites, rows, strict=True):
        assert site.labels.tolist() == [int(row % 4 == 0) for row in own]
        assert site.columns == ("x", "sex=f", "sex=m", "hospital=a", "hospital=b", "hospital=c")
    assert dealt(Pooled(table, "num", partition, clients=4).read().sites) == rows
    assert dealt(Pooled(table, "num", partition, clients=4, seed=1).read().sites) != rows


def test_even_shares_are_even_and_a_small_concentration_is_not(table):
    assert [len(site) for site in Pooled(table, "num", clients=7).read().sites] == [9] * 4 + [8] * 3
    sites = Pooled(table, "num", "dirichlet", clients=4, concentration=0.1).read().sites
    shares = [site.labels.mean() for site in sites]
    assert max(shares) - min(shares) > 0.5


def test_a_column_deals_out_and_is_no_feature(table):
    reading = Pooled(table, "num", "column", column="hospital").read()
    assert [site.name for site in reading.sites] == ["a", "b", "c"]
    assert reading.schema.features == ("x", "sex=f", "sex=m")
    assert dealt(reading.sites) == [list(range(start, 60, 3)) for start in range(3)]
    assert prepare(reading, Split()).names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("options", "sentences"),
    [
        ({"column": "hospitl"}, ["no column 'hospitl' to deal out by", "Did you mean 'hospital'?"]),
        ({}, ["no column '' to deal out by", "set `column` to one of 'x', 'sex', 'hospital'"]),
        ({"column": "num"}, ["no column 'num' to deal out by"]),
        ({"partition": "iid", "clients": 0}, ["0 clients cannot share 60 rows"]),
        ({"partition": "iid", "clients": 61}, ["61 clients cannot share 60 rows"]),
        ({"partition": "dirichlet", "concentration": 0.0}, ["concentration is 0.0"]),
        ({"label": "nums"}, ["all.csv has no label column 'nums'", "Did you mean 'num'?"]),
        ({"drop": ("hospitl",)}, ["drop names column 'hospitl'"]),
    ],
)
def test_bad_options_end_in_a_sentence(table, options, sentences):
    data = Pooled(**{"path": table, "label": "num", "partition": "column", **options})
    if "label" in options or "drop" in options:
        data = Pooled(**{"path": table, "label": "num", **options})
    with pytest.raises(DataError) as caught:
        data.read()
    for sentence in sentences:
        assert sentence in str(caught.value)


def test_a_missing_table_or_client_ends_in_a_sentence(table, tmp_path):
    with pytest.raises(DataError, match=r"There is no file '.*nowhere\.csv'"):
        Pooled(str(tmp_path / "nowhere.csv"), "num").read()
    (tmp_path / "gap.csv").write_text("x,site,num\n1,a,1\n2,,0\n")
    with pytest.raises(DataError, match="Row 1 has no value in the column that names its client"):
        Pooled(str(tmp_path / "gap.csv"), "num", "column", column="site").read()


def test_a_client_left_with_too_few_rows_is_refused_when_split(table):
    reading = Pooled(table, "num", clients=60).read()
    with pytest.raises(DataError, match=r"Site '0' has 1 rows, too few for .* rows"):
        prepare(reading, Split())


def test_the_first_sites_alone_keep_their_rows():
    reading = Heart().read()
    all_sites, two = prepare(reading, Split()), prepare(reading, Split(sites=2))
    assert two.names == ("cleveland", "hungary")
    for split in ("train", "validation", "test"):
        assert len(two.rows[split]) == 2
        for own, same in zip(two.rows[split], all_sites.rows[split], strict=False):
            assert (own[1] == same[1]).all()
    with pytest.raises(DataError, match=r"split\.sites is 5, but there are 4 sites"):
        prepare(reading, Split(sites=5))
