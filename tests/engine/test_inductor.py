"""Machine code of graphs: what it returns is right however it is called."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedminimax.engine.device import threads
from fedminimax.engine.executors.compiled import inductor as making
from fedminimax.engine.executors.compiled.chained import RELEASED, RELEASED_IF_HELD, address, play
from fedminimax.engine.executors.compiled.inductor import Code, inductor


def moved(x: Tensor, before: Tensor, time: Tensor) -> list[Tensor]:
    """Returns an input in the place of another, an input as it is, views and a tensor twice."""
    new = x - 0.5**time * (x - before).square()
    return [new, x, time, x.expand(3, -1), new[:2], new]


def given() -> list[Tensor]:
    start = torch.linspace(0.0, 1.0, 5, dtype=torch.float64)
    return [start, start.flip(0), torch.tensor(2.0, dtype=torch.float64)]


def made(size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(making, "SMALL", size)
    return inductor(make_fx(moved)(*given()), given())


@pytest.mark.parametrize("size", [pytest.param(0, marks=pytest.mark.slow), 1 << 14])
def test_a_call_on_what_the_last_one_returned_gives_what_the_operations_give(size, monkeypatch):
    call = made(size, monkeypatch)
    assert call.lends == (size > 0)
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


@pytest.mark.slow
def test_pooling_is_compiled_before_anything_else_was():
    source = (
        "import torch\n"
        "from fedminimax.engine.executors.compiled.inductor import inductor, make_fx\n"
        "pool = lambda x: [torch.nn.functional.max_pool2d(x, 2)]\n"
        "x = torch.rand(1, 1, 4, 4)\n"
        "assert torch.equal(*inductor(make_fx(pool)(x), [x])([x]), *pool(x))"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


ROWS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, float("nan")]], dtype=torch.float64)


def summed(total: Tensor, rows: Tensor, row: Tensor) -> list[Tensor]:
    new = total + rows.index_select(0, row)[0]
    return [new, torch.isfinite(new).all()]


def code_of(function: Callable[..., list[Tensor]], rows: Tensor = ROWS) -> Code:
    given = [torch.zeros(rows.shape[1], dtype=torch.float64), rows, torch.tensor([0])]
    with threads(1):  # torch's own code cannot fail on several
        return inductor(make_fx(function)(*given), given)


@pytest.fixture(scope="module", params=["stack", "heap"])
def summing(request) -> tuple[Code, Tensor]:
    """Code, and rows that it adds up."""
    rows = ROWS if request.param == "stack" else ROWS.repeat(1, 2000)
    call = code_of(summed, rows)
    assert call.lends == (request.param == "stack")
    return call, rows


def in_a_row(summing: tuple[Code, Tensor], *numbers: int) -> list[float] | None:
    """The total after adding these rows, if all went well: its first two numbers, which the others
    repeat."""
    code, rows = summing
    assert code.address is not None
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    every_other = torch.tensor([(number, -1) for number in numbers])[:, :1]  # not neighbours
    inputs = [total, rows, torch.tensor([0])]
    found = play(code.address, len(numbers), inputs, {2: every_other}, [(0, total)])
    assert not total.any()
    if found is None:
        return None
    assert torch.equal(found[0], found[0][:2].repeat(len(total) // 2))
    return found[0][:2].tolist()


def test_rounds_in_a_row_go_on_from_each_other(summing):
    assert in_a_row(summing, 1) == [3.0, 4.0]
    assert in_a_row(summing, 1, 0, 1, 1) == [10.0, 14.0]


def test_a_row_ends_where_a_number_is_not_finite_or_the_code_fails(summing):
    assert in_a_row(summing, 1, 2, 0) is None
    assert in_a_row(summing, 1, 7, 0) is None
    assert in_a_row(summing, 0) == [1.0, 2.0]


def test_other_threads_have_python_while_rounds_follow_each_other(summing):
    """And the rounds do not wait for it: in the seconds of a long row this thread counts to more
    than a handful, which is as far as it would come by being let in between two calls."""
    count = 0
    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(in_a_row, summing, *[0] * 50_000)
        while not playing.done():
            count += 1
    assert playing.result() == [50_000.0, 100_000.0]
    assert count > 1_000


@pytest.mark.slow
def test_code_that_asks_for_more_than_its_inputs_is_not_called_in_a_row():
    held = torch.linspace(0.0, 1.0, 100, dtype=torch.float64)  # too many to stand in the code
    rows, total = ROWS.repeat(1, 50), torch.zeros(100, dtype=torch.float64)

    def adding(total: Tensor, rows: Tensor, row: Tensor) -> list[Tensor]:
        new = total + held
        return [new, torch.isfinite(new).all()]

    code = code_of(adding, rows)
    assert torch.equal(code([total, rows, torch.tensor([0])])[0], held)
    assert code.address is None


@pytest.mark.slow
def test_without_the_private_parts_of_torch_code_is_made_all_the_same(monkeypatch):
    monkeypatch.setattr("fedminimax.engine.executors.compiled.chained.ENTRY", "no_such_part")
    assert made(1 << 14, monkeypatch).address is None
    for part in ("cpp_wrapper_cpu", "cpp_wrapper_cpu_array_ref"):
        monkeypatch.setitem(sys.modules, f"torch._inductor.codegen.{part}", None)
    code = made(1 << 14, monkeypatch)
    assert (code.address, code.lends) == (None, False)
    for found, expected in zip(code(given()), moved(*given()), strict=True):
        torch.testing.assert_close(found, expected)


def test_code_that_lets_go_of_python_by_itself_is_not_called_in_a_row(summing, tmp_path):
    """It would end the process: the loop over rounds has not got it."""
    (entry,) = (cell.cell_contents for cell in summing[0].call.current_callable.__closure__)
    made = Path(entry.__self__.__file__)

    def address_of(text: str) -> int | None:
        copy = tmp_path / made.name
        copy.write_bytes(made.read_bytes())
        copy.with_suffix(".cpp").write_text(text)
        bound = SimpleNamespace(__self__=SimpleNamespace(__file__=str(copy)))
        return address(SimpleNamespace(current_callable=lambda: bound), 3)

    text = made.with_suffix(".cpp").read_text()
    assert RELEASED_IF_HELD in text
    assert address_of(text) is not None
    assert address_of(text.replace(RELEASED_IF_HELD, RELEASED)) is None
    older = "py::gil_scoped_release release;"
    assert address_of(text.replace(RELEASED_IF_HELD, older)) is None
    assert address_of(text.replace(RELEASED_IF_HELD, f"{RELEASED_IF_HELD} {older}")) is None


@pytest.mark.slow
def test_a_number_out_of_range_is_an_error_on_several_threads_too():
    """Inside a loop that threads share it would end the process."""

    def picked(values: Tensor, columns: Tensor) -> list[Tensor]:
        return [values.gather(1, columns.long()) * 2]

    values, columns = torch.rand(5_000, 40), torch.zeros(5_000, 40)
    with threads(2):
        code = inductor(make_fx(picked)(values, columns), [values, columns])
        columns[7, 3] = 50
        with pytest.raises(RuntimeError, match="out of bounds"):
            code([values, columns])


def test_rows_that_are_looked_up_by_inputs_are_so_on_all_cores():
    def rows(values: Tensor, numbers: Tensor) -> list[Tensor]:
        return [values.index_select(0, numbers[0].reshape(-1)), values[numbers[1]]]

    def by_values(values: Tensor, numbers: Tensor) -> list[Tensor]:
        return [values.index_select(0, values[0].long())]

    given = [torch.rand(5, 3), torch.zeros(2, 4, dtype=torch.int64)]
    assert not making._looks_up(make_fx(rows)(*given).graph)
    assert making._looks_up(make_fx(by_values)(*given).graph)
