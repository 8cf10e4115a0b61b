"""Image data sets: the official formats, the papers' tasks with their exact counts, and memory."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

import numpy as np
import official
import pytest
import torch
from official import DATA

import fedminimax as fm
from fedminimax.cli import main
from fedminimax.config import ConfigError, Experiment
from fedminimax.data.gusto import Gusto
from fedminimax.data.image_sets import (
    CHEST,
    CIFAR10,
    CIFAR100,
    MNIST,
    STL10,
    CatDogStandIn,
    FashionMNIST,
    MedMNIST,
)
from fedminimax.data.sites import DataError
from fedminimax.experiment import build, run_experiment

ROOT = Path(__file__).parents[2]
FASHION, CIFAR = DATA / "fashion-mnist", DATA / "cifar-10" / "cifar-10-binary.tar.xz"


@pytest.fixture(autouse=True)
def nowhere_else(monkeypatch, tmp_path):
    """Only the folder that a test names is searched."""
    monkeypatch.delenv("FEDMINIMAX_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def fashion(tmp_path) -> str:
    official.write_idx(tmp_path / "fashion-mnist")
    return str(tmp_path)


def counts(rows) -> list[tuple[int, int]]:
    """Positives and negatives of each client."""
    return [(int((y == 1).sum()), int((y == 0).sum())) for _, y in rows]


def total(rows) -> tuple[int, int]:
    above, below = zip(*counts(rows), strict=True)
    return sum(above), sum(below)


# Formats


def test_idx_files_are_read(fashion):
    data = FashionMNIST(fashion, clients=3)
    assert (data.shape, data.classes) == ((1, 28, 28), 10)
    for rows, count in ((data.client_rows(), 40), (data.test_rows(), 20)):
        images, labels = (torch.cat(part) for part in zip(*rows, strict=True))
        assert images.dtype == torch.float32
        number = (images[:, 0, 5, 7] * 255).round().long()
        assert sorted(number.tolist()) == list(range(count))
        assert torch.equal(labels, number % 10)
    assert data.validation_rows() is None
    official.write_idx(Path(fashion) / "mnist", train=50)
    assert sum(len(y) for _, y in MNIST(fashion).client_rows()) == 50


@pytest.mark.parametrize("form", ["gz", "xz", "folder"])
def test_cifar10_is_read_from_any_archive_and_from_a_folder(tmp_path, form):
    files = official.cifar10_files()
    if form == "folder":
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
    else:
        (tmp_path / f"cifar-10-binary.tar.{form}").write_bytes(official.tar(files, form))
    parts = CIFAR10(str(tmp_path)).pictures()
    assert parts["train"].images.shape == (20, 3, 32, 32)
    assert parts["train"].labels.tolist() == [0, 1, 2, 3] * 5
    assert parts["test"].labels.tolist() == list(range(10))
    first = parts["train"].images[2]
    assert first[0, 0].tolist() == [2, 77] + [2] * 30
    assert (first[1] == 102).all()


def test_an_archive_is_unpacked_once_until_it_changes(tmp_path, monkeypatch):
    opened, file, real = [], tmp_path / "cifar-10-binary.tar.gz", tarfile.open
    packed = [official.tar(official.cifar10_files(train), "gz") for train in (20, 40)]
    monkeypatch.setattr(tarfile, "open", lambda *given: opened.append(given) or real(*given))
    for content, times, images in ((packed[0], 1, 20), (packed[1], 2, 40)):
        file.write_bytes(content)
        for _ in range(2):
            assert len(CIFAR10(str(tmp_path)).pictures()["train"].images) == images
        assert len(opened) == times


@pytest.mark.parametrize(("labels", "wanted"), [("fine", [40, 99]), ("coarse", [3, 19])])
def test_cifar100_has_fine_and_coarse_labels(tmp_path, labels, wanted):
    raw = official.cifar([[3, 40], [19, 99]])
    files = {"cifar-100-binary/train.bin": raw, "cifar-100-binary/test.bin": raw}
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(official.tar(files, "gz"))
    parts = CIFAR100(str(tmp_path), labels=labels).pictures()
    assert parts["test"].labels.tolist() == wanted
    assert (parts["train"].images[1, 1] == 101).all()


def test_stl10_is_stored_column_by_column(tmp_path):
    files = {}
    for split, labels in (("train", [0, 9]), ("test", [4])):
        images, told = official.stl10(labels)
        files |= {f"stl10_binary/{split}_X.bin": images, f"stl10_binary/{split}_y.bin": told}
    (tmp_path / "stl10_binary.tar.gz").write_bytes(official.tar(files, "gz"))
    parts = STL10(str(tmp_path)).pictures()
    assert parts["train"].labels.tolist() == [0, 9]
    image = parts["test"].images[0]
    assert image.shape == (3, 96, 96)
    assert image[0, 50].tolist() == list(range(96))
    assert image[1, :, 50].tolist() == list(range(96))


@pytest.mark.parametrize("colours", [1, 3])
def test_medmnist_has_three_splits(tmp_path, colours):
    random = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 6), ("val", 4), ("test", 4)):
        shape = (count, 28, 28) if colours == 1 else (count, 28, 28, 3)
        arrays[f"{split}_images"] = random.integers(0, 256, shape).astype(np.uint8)
        arrays[f"{split}_labels"] = (np.arange(count) % 2)[:, None]
    np.savez(tmp_path / "breastmnist.npz", allow_pickle=False, **arrays)
    data = MedMNIST(str(tmp_path), subset="breastmnist", clients=2)
    assert (data.shape, data.classes) == ((colours, 28, 28), 2)
    held = data.validation_rows()
    assert held is not None
    assert [len(y) for _, y in held] == [2, 2]
    stored = arrays["train_images"].reshape(6, 28, 28, colours)
    np.testing.assert_array_equal(data.pictures()["train"].images[:, -1], stored[..., -1])
    with pytest.raises(DataError, match="comes with validation images; leave it out"):
        MedMNIST(str(tmp_path), subset="breastmnist", validation=0.1).client_rows()
    with pytest.raises(DataError, match=r"finding is 1, but rows of breastmnist\.npz have 1 label"):
        MedMNIST(str(tmp_path), subset="breastmnist", finding=1).client_rows()


def test_one_of_several_findings_is_chosen_and_objects_are_refused(tmp_path):
    labels = np.array([[0, 1], [1, 0], [0, 1], [1, 1]])
    images = np.zeros((4, 28, 28), np.uint8)
    arrays = {f"{s}_{k}": v for s in ("train", "val", "test") for k, v in
              (("images", images), ("labels", labels))}  # fmt: skip
    np.savez(tmp_path / "chestmnist.npz", allow_pickle=False, **arrays)
    data = MedMNIST(str(tmp_path), subset="chestmnist", finding=1, clients=1)
    assert data.pictures()["train"].labels.tolist() == [1, 0, 1, 1]
    arrays["train_labels"] = np.array([[{}]] * 4, dtype=object)
    np.savez(tmp_path / "chestmnist.npz", allow_pickle=True, **arrays)
    with pytest.raises(DataError, match="cannot be read as npz of plain arrays"):
        data.pictures()


def test_all_findings_of_a_file_of_chest_images_are_trained_at_once(tmp_path):
    """A file of the form of chestmnist.npz, with noise for images."""
    random, arrays = np.random.default_rng(0), {}
    for split, count in (("train", 60), ("val", 30), ("test", 30)):
        arrays[f"{split}_images"] = random.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        arrays[f"{split}_labels"] = random.integers(0, 2, (count, len(CHEST))).astype(np.uint8)
    np.savez(tmp_path / "chestmnist.npz", allow_pickle=False, **arrays)
    data = {"name": "medmnist", "subset": "chestmnist", "folder": str(tmp_path)}
    table = {
        "data": {**data, "findings": "all", "clients": 2},
        "model": {"name": "linear"},
        "problem": {"name": "auc"},
        "method": {"name": "codasca"},
        "run": {"rounds": 1, "batch_size": 8, "executor": "debug"},
    }
    run = run_experiment(Experiment.from_table(table))
    test = run.history[-1]["test"]["labels"]
    assert tuple(test) == CHEST
    positives = arrays["test_labels"].sum(axis=0)
    assert [test[name]["positives"] for name in CHEST] == positives.tolist()
    with pytest.raises(DataError, match="task is 'first_half', which is of one label"):
        MedMNIST(str(tmp_path), subset="chestmnist", findings="all", task="first_half")
    one = {f"{s}_{k}": v[:, :1] if k == "labels" else v for s in ("train", "val", "test")
           for k in ("images", "labels") for v in [arrays[f"{s}_{k}"]]}  # fmt: skip
    np.savez(tmp_path / "breastmnist.npz", allow_pickle=False, **one)
    with pytest.raises(DataError, match=r"rows of breastmnist\.npz have one label"):
        MedMNIST(str(tmp_path), subset="breastmnist", findings="all").pictures()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"no gzip", "is not a whole gzip file"),
        (gzip.compress(b"\0\0\x08\x01" + bytes(40))[:-9], "is not a whole gzip file"),
        (gzip.compress(b"\0\0\x0d\x01\0\0\0\x01\0"), "not in the idx format of unsigned bytes"),
        (gzip.compress(official.idx(np.zeros((40, 28, 28)))[:-1]), "(40, 28, 28) bytes, and has"),
        (gzip.compress(official.idx(np.zeros((39, 28, 28)))), "give images and as many labels"),
    ],
    ids=["no gzip", "cut", "type", "length", "count"],  # what gzip makes has the time in it
)
def test_a_damaged_idx_file_is_told(fashion, content, told):
    (Path(fashion) / "fashion-mnist" / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(DataError) as caught:
        FashionMNIST(fashion).client_rows()
    assert told in str(caught.value)


def test_a_damaged_archive_is_told(tmp_path):
    file = tmp_path / "cifar-10-binary.tar.gz"
    whole = official.cifar10_files()
    short = {name: content[:-1] for name, content in whole.items()}
    lacking = {name: content for name, content in whole.items() if "test" not in name}
    for content, told in (
        (b"nothing", "is not a whole tar archive"),
        (official.tar(whole, "gz")[:200], "is not a whole tar archive"),
        (official.tar(short, "gz"), "no multiple of 3073"),
        (official.tar(lacking, "gz"), "lacks 'test_batch.bin'"),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=told):
            CIFAR10(str(tmp_path)).pictures()


def test_a_missing_file_ends_in_where_it_was_looked_for_and_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMINIMAX_DATA", str(tmp_path / "mine"))
    with pytest.raises(DataError) as caught:
        FashionMNIST(str(tmp_path / "given")).client_rows()
    said = str(caught.value)
    places = [tmp_path / "given", tmp_path / "mine", tmp_path / "cache" / "fedminimax"]
    assert [said.index(str(p)) for p in places] == sorted(said.index(str(p)) for p in places)
    assert "no train-images-idx3-ubyte.gz" in said
    assert "`fedminimax data fetch fashion_mnist`" in said


# Tasks and clients


@pytest.fixture
def hundred(tmp_path) -> str:
    """100 training and 50 test images of ten classes."""
    official.write_idx(tmp_path / "fashion-mnist", train=100, test=50)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("task", "positive", "above"),
    [
        ("first_half", (), {0, 1, 2, 3, 4}),
        ("second_half", (), {5, 6, 7, 8, 9}),
        ("listed", (0, 9), {0, 9}),
    ],
)
def test_a_task_tells_which_classes_are_positive(hundred, task, positive, above):
    data = FashionMNIST(hundred, task=task, positive=positive, clients=2)
    assert data.classes == 2
    for images, labels in (*data.client_rows(), *data.test_rows()):
        number = (images[:, 0, 0, 0] * 255).round().long() % 10
        assert labels.tolist() == [int(c in above) for c in number.tolist()]


def test_positives_are_thinned_in_all_together_and_the_test_images_stay(hundred):
    data = FashionMNIST(hundred, task="first_half", positive_share=0.2, clients=4)
    assert total(data.client_rows()) == (12, 50)  # int(0.2 / 0.8 * 50)
    assert total(data.test_rows()) == (25, 25)
    assert data.notes == [
        "Fashion-MNIST: 62 train images, 12 positive and 50 negative; 50 test images, 25 positive "
        "and 25 negative"
    ]
    other = FashionMNIST(hundred, task="first_half", positive_share=0.2, clients=4, seed=1)
    assert not torch.equal(data.client_rows()[0][0], other.client_rows()[0][0])


def classes_of(rows) -> list[set[int]]:
    return [set(((x[:, 0, 0, 0] * 255).round().long() % 10).tolist()) for x, _ in rows]


def test_class_disjoint_clients_keep_their_classes_in_the_test_images(hundred):
    data = FashionMNIST(
        hundred, task="first_half", positive_share=0.3, partition="classes", clients=5
    )
    train, test = classes_of(data.client_rows()), classes_of(data.test_rows())
    assert train == test
    assert [len(own) for own in train] == [2] * 5
    assert set.union(*train) == set(range(10))
    # Each client has a class of each side, and is thinned by itself: int(0.3 / 0.7 * 10).
    assert counts(data.client_rows()) == [(4, 10)] * 5
    assert counts(data.test_rows()) == [(5, 5)] * 5
    with pytest.raises(DataError, match=r"5 positive and 5 negative classes\. Ask for at most 5"):
        FashionMNIST(hundred, task="first_half", partition="classes", clients=6).client_rows()


def test_more_clients_than_classes_of_a_side_have_single_classes(hundred):
    data = FashionMNIST(
        hundred, task="first_half", positive_share=0.2, partition="single_class", clients=10
    )
    assert [len(own) for own in classes_of(data.client_rows())] == [1] * 10
    assert total(data.client_rows()) == (12, 50)
    assert sum(bool(above) and bool(below) for above, below in counts(data.client_rows())) == 0
    assert data.notes[1].startswith("classes are dealt out one by one")
    several = FashionMNIST(hundred, partition="classes", clients=10)
    assert [len(own) for own in classes_of(several.client_rows())] == [1] * 10


def test_dirichlet_makes_the_training_images_unlike(hundred):
    def spread(concentration) -> float:
        data = FashionMNIST(
            hundred, partition="dirichlet", concentration=concentration, clients=4, seed=2
        )
        assert sum(len(y) for _, y in data.client_rows()) == 100
        shares = [torch.bincount(y, minlength=10) / len(y) for _, y in data.client_rows()]
        return float(torch.stack(shares).std(0).mean())

    assert spread(0.05) > 2 * spread(100.0)
    even = FashionMNIST(hundred, partition="dirichlet", clients=5).test_rows()
    assert [len(y) for _, y in even] == [10] * 5


def test_some_classes_a_share_and_a_validation_part(hundred):
    data = FashionMNIST(hundred, only=(2, 7, 9), share=0.5, validation=0.2, clients=2)
    assert data.classes == 3
    held = data.validation_rows()
    assert held is not None
    for rows, each in ((data.client_rows(), 4), (held, 1), (data.test_rows(), 3)):
        labels = torch.cat([y for _, y in rows])
        # Of 10 training images of a class 5 are used, and one of these is held out; of 5 test
        # images, 3.
        assert torch.bincount(labels).tolist() == [each] * 3
    used = [torch.cat([x[:, 0, 0, 0] for x, _ in r]) for r in (data.client_rows(), held)]
    assert not set(used[0].tolist()) & set(used[1].tolist())


def test_pixels_are_scaled(hundred):
    def pixels(how):
        data = FashionMNIST(hundred, pixels=how, clients=3)
        return tuple(torch.cat([x for x, _ in rows]) for rows in
                     (data.client_rows(), data.test_rows()))  # fmt: skip

    unit, signed, standard = (pixels(how) for how in ("unit", "signed", "standard"))
    torch.testing.assert_close(unit[0].max(), torch.tensor(99 / 255))
    torch.testing.assert_close(signed[0], 2 * unit[0] - 1)
    torch.testing.assert_close(standard[0].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(standard[0].var(correction=0), torch.tensor(1.0))
    # The test images are scaled by what the training images say.
    scale = standard[0].max() - standard[0].min()
    torch.testing.assert_close((standard[1].max() - standard[1].min()) / scale,
                               torch.tensor(49 / 99))  # fmt: skip


def test_images_are_held_once(hundred):
    rows = FashionMNIST(hundred, clients=4).client_rows()
    clients = fm.Clients(rows, batch_size=5).to(torch.float32)
    assert clients.train.columns[0].data_ptr() == rows[0][0].data_ptr()
    assert clients.train.columns[0].untyped_storage().nbytes() == 100 * 784 * 4
    for number, (images, labels) in enumerate(rows):
        assert torch.equal(clients.train.rows(number)[0], images)
        assert torch.equal(clients.train.rows(number)[1], labels)


def test_rows_that_do_not_follow_one_another_are_copied():
    whole = torch.arange(12.0).reshape(6, 2)
    for parts in ([whole[3:], whole[:3]], [whole[::2], whole[1::2]], [whole[:2], whole[3:]],
                  [whole[:3], whole[3:].clone()]):  # fmt: skip
        joined = fm.Clients([(part,) for part in parts]).train.columns[0]
        assert torch.equal(joined, torch.cat(parts))
        assert joined.data_ptr() != whole.data_ptr()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"task": "thirds"}, "task is 'thirds'; use one of 'classes', 'first_half'"),
        ({"partition": "even"}, "partition is 'even'"),
        ({"pixels": "raw"}, "pixels is 'raw'"),
        ({"task": "listed"}, "give the positive classes with task"),
        ({"positive": (1,)}, "give the positive classes with task"),
        ({"positive_share": 0.1}, "no class is positive: set `task`"),
        ({"share": 0.0}, "share is 0.0 and validation 0.0; give"),
        ({"validation": 1.0}, "share is 1.0 and validation 1.0; give"),
        ({"only": (3, 11)}, "no train image is of class 11"),
        ({"task": "listed", "positive": (12,)}, "positive holds 12, which no image is"),
        ({"clients": 0}, "0 clients cannot share 100 rows"),
    ],
)
def test_what_cannot_be_is_refused(hundred, options, told):
    with pytest.raises(DataError) as caught:
        FashionMNIST(hundred, **options).client_rows()
    assert told in str(caught.value)


def test_the_stand_in_for_cat_versus_dog_says_so_everywhere(tmp_path, capsys):
    files = official.cifar10_files(train=100, test=20)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(official.tar(files, "gz"))
    data = CatDogStandIn(str(tmp_path), clients=2)
    # Of each batch of 20 the classes come in turn; blue is the class.
    for images, labels in (*data.client_rows(), *data.test_rows()):
        blue = (images[:, 2, 0, 0] * 255).round().long()
        assert set(blue.tolist()) <= {3, 5}
        assert torch.equal(labels, (blue == 3).long())
    assert "stand-in for CATvsDOG" in data.notes[-1]
    assert "stand-in for CATvsDOG" in (CatDogStandIn.__doc__ or "").splitlines()[0]
    assert main(["list", "data"]) == 0
    assert "cat_dog_stand_in" in capsys.readouterr().out


# Experiments


def test_images_run_from_a_file_with_validation_and_notes(hundred):
    table = {
        "data": {"name": "fashion_mnist", "folder": hundred, "task": "first_half", "clients": 2,
                 "validation": 0.2},
        "model": {"name": "linear"},
        "problem": {"name": "auc"},
        "method": {"name": "codasca"},
        "run": {"rounds": 1, "executor": "debug"},
    }  # fmt: skip
    made = build(Experiment.from_table(table))
    assert [split for split in made.clients.splits] == ["train", "validation", "test"]
    assert made.clients.splits["validation"].sizes.tolist() == [10, 10]
    assert made.notes[0].startswith("Fashion-MNIST: 80 train images, 40 positive and 40 negative")
    for split, told in (
        ({"positive_share": 0.1}, r"\[split\] positive_share is 0.1, .*: set positive_share in"),
        ({"train": 0.8, "test": 0.0}, r"\[split\] train is 0.8, but .*: leave it out"),
    ):
        with pytest.raises(ConfigError, match=told):
            build(Experiment.from_table({**table, "split": split}))


def test_every_image_set_lists_the_keys_of_all(capsys):
    assert main(["list", "cifar100"]) == 0
    said = capsys.readouterr().out
    for word in ('"coarse"', "positive_share: the papers' imratio", 'partition: "iid"'):
        assert word in said


# The real files


@pytest.mark.skipif(not FASHION.is_dir(), reason="the real Fashion-MNIST is not at hand")
def test_fashion_mnist_has_the_counts_of_the_paper():
    data = FashionMNIST(str(DATA), task="first_half", positive_share=0.1, clients=4)
    parts = data.pictures()
    assert [np.bincount(p.labels).tolist() for p in parts.values()] == [[6000] * 10, [1000] * 10]
    assert total(data.client_rows()) == (3_333, 30_000)
    assert total(data.test_rows()) == (5_000, 5_000)
    # The published mean and deviation of the training pixels.
    assert parts["train"].images.mean() / 255 == pytest.approx(0.2860, abs=1e-4)
    assert parts["train"].images.std() / 255 == pytest.approx(0.3530, abs=1e-4)


@pytest.mark.skipif(not (DATA / "mnist").is_dir(), reason="the real MNIST is not at hand")
def test_mnist_has_its_counts():
    parts = MNIST(str(DATA)).pictures()
    assert np.bincount(parts["train"].labels).tolist() == [
        *(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
    ]
    assert parts["test"].images.shape == (10_000, 1, 28, 28)
    assert parts["train"].images.mean() / 255 == pytest.approx(0.1307, abs=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not CIFAR.is_file(), reason="the real CIFAR-10 is not at hand")
def test_cifar10_has_the_counts_of_the_papers(monkeypatch):
    parts = CIFAR10(str(DATA)).pictures()
    assert [np.bincount(p.labels).tolist() for p in parts.values()] == [[5000] * 10, [1000] * 10]
    means = parts["train"].images.mean((0, 2, 3)) / 255
    np.testing.assert_allclose(means, [0.4914, 0.4822, 0.4465], atol=1e-4)
    # Unpacking takes ten seconds: once is enough. The pixels of the rest are not looked at.
    small = {s: p._replace(images=p.images[:, :, :1, :1]) for s, p in parts.items()}
    monkeypatch.setattr(CIFAR10, "pictures", lambda self: small)
    data = CIFAR10(task="first_half", positive_share=0.1, clients=4)
    assert total(data.client_rows()) == (2_777, 25_000)
    assert total(data.test_rows()) == (5_000, 5_000)
    for share, kept in ((0.1, 555), (0.3, 2142)):
        data = CIFAR10(
            task="second_half", positive_share=share, partition="classes", clients=5, seed=1
        )
        assert counts(data.client_rows()) == [(kept, 5_000)] * 5
        assert counts(data.test_rows()) == [(1_000, 1_000)] * 5
    for share, kept in ((None, 5_000), (0.01, 50), (0.05, 263), (0.2, 1_250)):
        pair = CatDogStandIn(positive_share=share, clients=4)
        assert total(pair.client_rows()) == (kept, 5_000)
        assert total(pair.test_rows()) == (1_000, 1_000)


@pytest.mark.skipif(not (DATA / "gusto").is_dir(), reason="GUSTO-I is not at hand")
def test_gusto_is_dealt_out_by_region():
    reading = Gusto(str(DATA)).read()
    assert len(reading.sites) == 16
    assert sum(map(len, reading.sites)) == 40_830
    assert sum(int(s.labels.sum()) for s in reading.sites) == 2_851
    names = {column.name for column in reading.schema.columns}
    assert not names & {"tpa", "tx", "regl", "grpl", "grps", "day30"}
    assert {"age", "Killip", "sysbp"} <= names


def test_gusto_is_looked_for_like_the_others(tmp_path):
    header = "day30,age,regl,grpl,grps,tpa,tx"
    rows = [f"{i % 2},{40 + i},{i % 3},{i % 4},{i},{i % 2},SK" for i in range(12)]
    (tmp_path / "gusto").mkdir()
    packed = gzip.compress("\n".join([header, *rows]).encode())
    (tmp_path / "gusto" / "gusto.csv.gz").write_bytes(packed)
    reading = Gusto(str(tmp_path)).read()
    assert [site.name for site in reading.sites] == ["0", "1", "2"]
    assert reading.schema.features == ("age",)
    assert [len(site) for site in Gusto(str(tmp_path), by="grpl").read().sites] == [3] * 4
    with pytest.raises(DataError, match=r"To have it, write it in R, with write\.csv"):
        Gusto(str(tmp_path / "gone")).read()
    with pytest.raises(DataError, match="by is 'country'; use one of 'regl', 'grpl', 'grps'"):
        Gusto(by="country")  # type: ignore[arg-type]


@pytest.mark.skipif(not FASHION.is_dir(), reason="the real Fashion-MNIST is not at hand")
def test_the_experiment_learns_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDMINIMAX_DATA", str(DATA))
    folder = tmp_path / "run"
    file = ROOT / "experiments" / "fashion_mnist_auc.toml"
    changes = ["share=0.02", "local_steps=6"]
    assert main(["run", str(file), *changes, "--folder", str(folder)]) == 0
    assert "note: Fashion-MNIST: 666 train images, 66 positive and 600" in capsys.readouterr().out
    run = fm.load(folder)
    first, last = (record["test"]["auc"] for record in run.history)
    assert last > max(0.6, first + 0.1)
    assert run.module()(torch.zeros(2, 1, 28, 28)).shape == (2, 1)
