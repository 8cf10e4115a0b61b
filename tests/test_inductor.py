"""Machine code of graphs: what it returns is right however it is called."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedminimax.engine import inductor as code
from fedminimax.engine.chained import chained as engine_chained
from fedminimax.engine.inductor import Lending, inductor


def moved(x: Tensor, before: Tensor, time: Tensor) -> list[Tensor]:
    """Returns an input in the place of another, an input as it is, views and a tensor twice."""
    new = x - 0.5**time * (x - before).square()
    return [new, x, time, x.expand(3, -1), new[:2], new]


def given() -> list[Tensor]:
    start = torch.linspace(0.0, 1.0, 5, dtype=torch.float64)
    return [start, start.flip(0), torch.tensor(2.0, dtype=torch.float64)]


def made(size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(code, "SMALL", size)
    return inductor(make_fx(moved)(*given()), given())


@pytest.mark.parametrize("size", [0, 1 << 14])
def test_a_call_on_what_the_last_one_returned_gives_what_the_operations_give(size, monkeypatch):
    call = made(size, monkeypatch)
    assert isinstance(call, Lending) == (size > 0)
    expected, found = given(), given()
    for _ in range(4):
        wanted, got = moved(*expected), call(list(found))
        torch.testing.assert_close(got, wanted)
        expected, found = wanted[:3], got[:3]


def test_small_graphs_return_the_memory_of_the_last_call(monkeypatch):
    call = made(1 << 14, monkeypatch)
    first = call(given())
    kept = [v.clone() for v in first]
    call([v + 1 for v in given()])
    assert any(not torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_pooling_is_compiled_before_anything_else_was():
    source = (
        "import torch; from fedminimax.engine.inductor import inductor, make_fx\n"
        "pool = lambda x: [torch.nn.functional.max_pool2d(x, 2)]\n"
        "x = torch.rand(1, 1, 4, 4)\n"
        "assert torch.equal(*inductor(make_fx(pool)(x), [x])([x]), *pool(x))"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


ROWS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, float("nan")]], dtype=torch.float64)


def summed(total: Tensor, rows: Tensor, row: Tensor) -> list[Tensor]:
    new = total + rows.index_select(0, row)[0]
    return [new, torch.isfinite(new).all()]


@pytest.fixture(scope="module")
def summing() -> Lending:
    given = [torch.zeros(2, dtype=torch.float64), ROWS, torch.tensor([0])]
    call = inductor(make_fx(summed)(*given), given)
    assert isinstance(call, Lending)
    return call


def chained(call: Lending, *rows: int) -> tuple[bool, list[float]]:
    """The total after a call of its own and one for each of the rows, and whether all went well."""
    total, _ = call([torch.zeros(2, dtype=torch.float64), ROWS, torch.tensor([0])])
    assert call.chained is not None
    every_other = torch.tensor([(row, -1) for row in rows])[:, :1]  # rows need not be neighbours
    good = call.chained(len(rows), [total, ROWS, torch.tensor([0])], {2: every_other}, 2)
    return good, total.tolist()


def test_calls_that_are_chained_go_on_from_each_other(summing):
    assert chained(summing, 1) == (True, [4.0, 6.0])
    assert chained(summing, 1, 0, 1, 1) == (True, [11.0, 16.0])


def test_a_chain_ends_where_a_number_is_not_finite_or_the_code_fails(summing):
    assert chained(summing, 1, 2, 0)[0] is False
    assert chained(summing, 1, 7, 0)[0] is False
    assert chained(summing, 0) == (True, [2.0, 4.0])


def test_without_the_private_parts_of_torch_calls_are_not_chained(monkeypatch):
    monkeypatch.setattr("fedminimax.engine.chained.ENTRY", "no_such_part")
    call = made(1 << 14, monkeypatch)
    assert isinstance(call, Lending)
    assert call.chained is None


def test_code_that_lets_go_of_python_by_itself_is_not_chained(summing, tmp_path):
    """It would end the process: the loop over calls has not got it."""
    (entry,) = (cell.cell_contents for cell in summing.code.current_callable.__closure__)
    made = Path(entry.__self__.__file__)

    def chained_as(text: str):
        copy = tmp_path / made.name
        copy.write_bytes(made.read_bytes())
        copy.with_suffix(".cpp").write_text(text)
        library = SimpleNamespace(__file__=str(copy))
        bound = SimpleNamespace(__self__=library)
        return engine_chained(SimpleNamespace(current_callable=lambda: bound))

    text = made.with_suffix(".cpp").read_text()
    assert chained_as(text) is not None
    first = "inputs = steal_from_raw_handles_to_raii_handles"
    assert first in text
    assert (
        chained_as(text.replace(first, f"py::gil_scoped_release_simple release; {first}")) is None
    )
