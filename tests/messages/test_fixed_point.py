"""Sums in fixed point: exact in any order, refused out of range, and otherwise a plain mean."""

import itertools

import numpy as np
import pytest
import torch
from rows import Row
from table import ROWS, first_of_each, marked

from fedminimax.algorithms.afl import AFL
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.config import ConfigError, Experiment, messages_of
from fedminimax.data.clients import Clients
from fedminimax.engine.query import LocalQuery
from fedminimax.engine.session import check_masked
from fedminimax.engine.simulate import simulate
from fedminimax.messages import (
    Clip,
    EightBit,
    Masked,
    Messages,
    RandomCoordinates,
    TopK,
)
from fedminimax.messages.secure import fixed_point
from fedminimax.messages.secure.fixed_point import (
    LONG,
    SHORT,
    WIDE,
    RangeError,
    add,
    decode,
    encode,
    negate,
)
from fedminimax.messages.stage import Mean
from fedminimax.problems.functions import Minimax
from fedminimax.problems.worst_site import WorstSite
from fedminimax.types import Clock, Point

MASKED = [row for row in ROWS if row.algorithm.robust]


def drawn(size: int = 1000, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    return scale * np.random.default_rng(seed).standard_normal(size)


@pytest.mark.parametrize(
    ("form", "scale"), [(SHORT, 1), (LONG, 1e5), (WIDE, 1e-12), (WIDE, 1), (WIDE, 1e20)]
)
def test_a_sum_errs_by_half_a_step_per_client_and_not_by_its_order(form, scale):
    parts = [drawn(scale=scale, seed=seed) for seed in range(4)]
    words = [encode(part, form) for part in parts]
    expected = np.sum(np.array(parts, dtype=np.longdouble), 0)
    totals = []
    for order in itertools.permutations(words):
        total = order[0]
        for own in order[1:]:
            total = add(total, own)
        totals.append(total)
    assert all(np.array_equal(total, totals[0]) for total in totals)
    step = 2.0**-form.exponent
    error = np.abs(decode(totals[0], form) - expected)
    # Rounding to a double comes on top.
    assert (error <= 4 * step / 2 + 4e-16 * np.abs(expected)).all()


@pytest.mark.parametrize("form", [SHORT, LONG, WIDE])
def test_any_mask_cancels_in_a_sum(form):
    generator = np.random.default_rng(1)
    numbers = drawn(200)
    mask = generator.integers(0, 2**form.bits, (form.limbs, 200), dtype=form.dtype)
    hidden = add(encode(numbers, form), mask)
    assert not np.array_equal(hidden, encode(numbers, form))
    assert np.array_equal(add(hidden, negate(mask)), encode(numbers, form))
    edge = np.full((form.limbs, 1), -1).astype(form.dtype)  # all bits, so that every limb carries
    assert np.array_equal(add(edge, encode(np.array([2.0**-form.exponent]), form)), 0 * edge)


def test_whole_numbers_up_to_2_to_the_53_are_summed_exactly():
    counts = torch.tensor([0, 1, -1, 2**53 - 5], dtype=torch.int64)
    total = fixed_point.added_answers(
        fixed_point.answer_words("counts", counts),
        fixed_point.answer_words("counts", torch.ones_like(counts)),
    )
    found = fixed_point.answer_of(total, counts, weighted=False)
    assert found.dtype == torch.int64
    assert found.tolist() == [1, 2, 0, 2**53 - 4]


@pytest.mark.parametrize(
    ("bits", "dtype", "largest"),
    [(None, torch.float64, 2.0**22), (None, torch.float32, 32.0), (64, torch.float32, 2.0**22)],
)
def test_what_is_out_of_range_is_refused_and_never_wrapped(bits, dtype, largest):
    def reduced(size: float) -> Point:
        ups = Point(torch.full((3, 2), size, dtype=dtype), torch.zeros(3, 1, dtype=dtype))
        weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
        return Masked(bits).reduce((), None, ups, weights, Clock.at())[0]

    for size in (largest, -largest):
        assert reduced(size).x.tolist() == [size, size]
        assert reduced(size).x.dtype == dtype
    for size in (1.001 * largest, -1.001 * largest):
        with pytest.raises(RangeError, match=r"^x has a number of size .*clip the messages"):
            reduced(size)
    with pytest.raises(RangeError, match=r"up to 4\.836e"):
        fixed_point.answer_words("loss", torch.tensor([1e30]))
    with pytest.raises(RangeError, match="loss has a NaN"):
        fixed_point.answer_words("loss", torch.tensor([float("nan")]))


def test_the_error_of_a_mean_is_what_the_page_says():
    for count, dtype, most in ((4, torch.float64, 2e-12), (100, torch.float64, 5e-11),
                               (4, torch.float32, 1e-6), (100, torch.float32, 1e-6)):  # fmt: skip
        ups = Point(torch.from_numpy(drawn(count * 500)).reshape(count, 500).to(dtype),
                    torch.zeros(count, 0, dtype=dtype))  # fmt: skip
        weights = torch.full((count,), 1 / count, dtype=torch.float64)
        found, _ = Masked().reduce((), None, ups, weights, Clock.at())
        expected = ups.x.double().mean(0)
        assert float((found.x - expected).abs().max()) < most


def started(messages, executor: str = "debug", **settings):
    row = ROWS[0]
    return simulate(row.problem(), row.algorithm, row.clients(), 3, executor=executor,
                    messages=messages, dtype=torch.float64, **settings)  # fmt: skip


@pytest.mark.parametrize("executor", ["threads", "vectorised", "compiled"])
def test_all_executors_agree(executor):
    one, other = started([Masked()]), started([Masked()], executor)
    torch.testing.assert_close(one.point, other.point, rtol=1e-9, atol=1e-11)


FAST = ("codasca", "scaffold", "fess-gda", "scgdam-levels-2")


@pytest.mark.parametrize("row", marked(first_of_each(MASKED), lambda row: row.name in FAST))
def test_every_method_computes_what_it_does_with_a_plain_mean(row: Row):
    common = {"rounds": 2, "executor": "debug", "dtype": "float64", "evaluate_every": 1}
    runs = [
        simulate(row.problem(), row.algorithm, row.clients(), messages=messages, **common)
        for messages in ([Masked()], [])
    ]
    assert runs[0].outcome == runs[1].outcome
    for found, expected in zip(runs[0].point, runs[1].point, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)
    # Answers before the first round take three words for each number.
    spent = [r.history[-1]["bytes_up"] - r.history[0]["bytes_up"] for r in runs]
    assert spent[0] == spent[1]


def test_answers_are_summed_in_fixed_point_and_counted_as_they_travel():
    rows = [(1e6 * torch.randn(9, 2, dtype=torch.float64) + k,) for k in range(4)]
    clients = Clients(rows, weights="size")
    problem = Minimax(lambda x, y, b: b.mean((b.rows[0] - x).square()).sum(), torch.zeros(2))
    asks = [LocalQuery(problem, clients, "train", clients.weight_vector("size")) for _ in range(2)]
    asks[1].masked = True
    at = torch.zeros(2, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    for how in ("mean", "sum"):
        plain, masked = (getattr(ask, how)("loss", *at)[0] for ask in asks)
        torch.testing.assert_close(masked, plain, rtol=1e-14, atol=0)
        assert masked.dtype == plain.dtype
    assert asks[1].cost.bytes_up == 3 * asks[0].cost.bytes_up


def test_a_nan_ends_a_run_with_the_sentence_of_a_plain_one():
    rows = [(torch.randn(9, 2, dtype=torch.float64),) for _ in range(4)]
    problem = Minimax(lambda x, y, b: b.mean((b.rows[0] - x).square()).sum(), torch.zeros(2))
    clients = Clients(rows)
    clients.train.columns[0][9:12] = float("nan")
    found = [
        simulate(problem, FedAvg(), clients, 3, executor="debug", messages=messages)
        for messages in ([], [Masked()])
    ]
    assert "client 1" in found[0].outcome
    assert found[0].outcome == found[1].outcome


@pytest.mark.parametrize(
    ("messages", "problem", "method", "cohort", "sentence"),
    [
        ([Masked()], Minimax, AFL(), 4, "only its own entry is not zero"),
        ([Masked()], WorstSite, FedAvg(), 4, "entries of its own"),
        ([Masked()], Minimax, FedAvg(), 2, "at least 3"),
        ([TopK(), Masked()], Minimax, FedAvg(), 4, 'use compress = "random"'),
        ([EightBit(), Masked()], Minimax, FedAvg(), 4, 'use compress = "random"'),
    ],
)
def test_what_masks_cannot_hide_is_refused(messages, problem, method, cohort, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_masked(Messages.of(messages), problem, method, cohort)


def test_a_simulation_refuses_it_too_and_takes_what_can_be_masked():
    with pytest.raises(ValueError, match="at least 3"):
        started([Masked()], cohort=2, allow_partial=True)
    assert started([Clip(0.5), RandomCoordinates(0.5), Masked()]).outcome == "finished"


def test_it_is_a_key_of_a_file():
    assert messages_of({"reduce": "masked"}) == Messages(reducer=Masked())
    usual = {"data": "heart", "model": "linear", "problem": "auc", "method": "codasca"}
    table: dict = {section: {"name": name} for section, name in usual.items()}
    table["messages"] = {"reduce": {"name": "masked", "bits": 64}}
    read = Experiment.from_table(table)
    assert read.messages.reducer == Masked(64)
    assert Experiment.from_table(read.to_table()).messages == read.messages
    with pytest.raises(ConfigError, match="give 32 or 64"):
        messages_of({"reduce": {"name": "masked", "bits": 16}})
    assert Messages().reducer == Mean()
    assert not Messages().masked
