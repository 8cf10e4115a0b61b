"""An experiment as a file: every type of option, every mistake, and the way back to text."""

import dataclasses
import tomllib
from pathlib import Path

import numpy as np
import official
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedminimax.algorithms import METHODS
from fedminimax.blocks.schedules import Constant, InverseRoot, Stagewise, StepDecay
from fedminimax.config import CHOICES, ConfigError, Experiment, changed, read_toml, write_toml
from fedminimax.experiment import build
from fedminimax.problems import PROBLEMS
from fedminimax.report.comparison import Comparison, Job
from fedminimax.tuning.auto import is_auto, recipes_of

EXPERIMENTS = sorted((Path(__file__).parents[1] / "experiments").glob("*.toml"))


def table(**sections):
    """A complete experiment, with the sections given changed."""
    usual = {
        "data": {"name": "heart"},
        "model": {"name": "linear"},
        "problem": {"name": "auc"},
        "method": {"name": "codasca"},
    }
    return usual | sections


def parsed(**sections):
    return Experiment.from_table(table(**sections))


def error(**sections):
    with pytest.raises(ConfigError) as caught:
        parsed(**sections)
    return str(caught.value)


def method(**options):
    return {"method": {"name": "codasca", **options}}


# Types


def test_what_is_left_out_is_the_default():
    experiment = parsed()
    assert experiment.run.rounds == 100
    assert experiment.split.train == 0.6
    assert experiment.method.options == {}
    assert experiment.make("method") == METHODS["codasca"]()


def test_every_type_is_read():
    experiment = parsed(
        data={"name": "folder", "path": "a", "label": "b", "drop": ["c", "d"], "most_codes": 7},
        model={"name": "mlp", "hidden": [8, 4], "batch_norm": True, "activation": "relu"},
        problem={"name": "auc", "positive_share": 0.25},
        run={"rounds": 3, "cohort": 2, "weights": "size", "sampled_positives": 1},
    )
    assert experiment.data.options["drop"] == ("c", "d")
    assert experiment.data.options["most_codes"] == 7
    mlp = experiment.make("model")
    assert (mlp.hidden, mlp.batch_norm, mlp.activation) == ((8, 4), True, "relu")
    assert experiment.problem.options["positive_share"] == 0.25
    run = experiment.run
    assert (run.rounds, run.cohort, run.weights) == (3, 2, "size")
    assert isinstance(run.sampled_positives, float)
    assert run.checkpoint_every is None


@pytest.mark.parametrize(("given", "text"), [("1", "1"), ("true", "true"), ("yes", "yes")])
def test_a_text_needs_no_quotes_that_a_shell_takes_away(given, text):
    table = {"data": {"name": "folder", "path": "a", "label": "b"}, "problem": {"name": "auc"}}
    table = changed({**table, "method": {"name": "fedavg"}}, [f"positive={given}"])
    assert Experiment.from_table(table).data.options["positive"] == text


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"run": {"rounds": 2.5}}, "[run] rounds is 2.5; give a whole number"),
        ({"run": {"rounds": True}}, "[run] rounds is True; give a whole number"),
        ({"run": {"rounds": "5"}}, "[run] rounds is '5'; give a whole number"),
        ({"run": {"cohort": 2.0}}, "[run] cohort is 2.0; give a whole number"),
        ({"run": {"cohort": {"kind": "constant", "value": 2}}}, "give a whole number"),
        ({"run": {"allow_partial": 1}}, "[run] allow_partial is 1; give true or false"),
        ({"run": {"sampled_positives": True}}, "[run] sampled_positives is True; give a number"),
        ({"run": {"sampled_positives": float("nan")}}, "is nan; give a finite number"),
        (method(server_lr="fast"), "[method] server_lr is 'fast'; give a number"),
        (method(lr=float("inf")), "[method] lr is inf; give a finite number"),
        (method(lr="fast"), "[method] lr is 'fast'; give a number, or a schedule such as {kind"),
        (method(lr=True), "[method] lr is True; give a number, or a schedule"),
        ({"run": {"executor": "vectorized"}}, "did you mean 'vectorised'?"),
        ({"run": {"weights": "Size"}}, "[run] weights is 'Size'; did you mean 'size'?"),
        (
            {"data": {"name": "folder", "path": ["a"], "label": "y"}},
            "[data] path is ['a']; give a text",
        ),
        ({"model": {"name": "mlp", "hidden": 8}}, "[model] hidden is 8; give a list, such as"),
        ({"model": {"name": "mlp", "hidden": [8, "a"]}}, "[model] hidden is 'a'; give a whole"),
        ({"problem": {"name": "auc", "positive_share": "half"}}, "is 'half'; give a number"),
    ],
)
def test_a_wrong_type_is_named(sections, sentence):
    assert sentence in error(**sections)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("0.25", 0.25),
        ("1", 1.0),
        ('{kind = "constant", value = 1}', Constant(1.0)),
        ('{kind = "stagewise", value = 0.5, factor = 3}', Stagewise(0.5, 3.0)),
        (
            '{kind = "step_decay", value = 0.1, factor = 2, at = [5, 7], unit = "stage"}',
            StepDecay(0.1, 2.0, (5, 7), "stage"),
        ),
        ('{kind = "step_decay", value = 0.1}', StepDecay(0.1)),
        (
            '{kind = "inverse_root", value = 1, shift = 8, power = 0.25, unit = "round"}',
            InverseRoot(1.0, 8.0, 0.25, "round"),
        ),
    ],
)
def test_a_rate_is_a_number_or_a_schedule(written, meant):
    found = parsed(**method(lr=tomllib.loads(f"v = {written}")["v"])).make("method").lr
    assert found == meant
    assert type(found) is type(meant)


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        ({"value": 0.1}, "[method] lr is {'value': 0.1}; give a number, or a schedule such as"),
        ({"kind": "stepdecay", "value": 1}, "[method] lr kind is 'stepdecay'; did you mean 'step_"),
        ({"kind": ["constant"], "value": 1}, "[method] lr kind is ['constant']; did you"),
        ({"kind": "step_decay"}, "[method] lr needs the key 'value'"),
        ({"kind": "step_decay", "value": 1, "att": [3]}, "[method] lr has no key 'att'; did you"),
        ({"kind": "step_decay", "value": "a"}, "[method] lr value is 'a'; give a number"),
        ({"kind": "step_decay", "value": 1, "at": 3}, "[method] lr at is 3; give a list"),
        ({"kind": "step_decay", "value": 1, "at": [3.5]}, "[method] lr at is 3.5; give a whole"),
        ({"kind": "step_decay", "value": 1, "unit": "rounds"}, "did you mean 'round'?"),
    ],
)
def test_a_bad_schedule_is_named_with_its_place(schedule, sentence):
    assert sentence in error(**method(lr=schedule))


@pytest.mark.parametrize(
    "schedule", [{"kind": "constant", "value": -1}, {"kind": "stagewise", "value": 1, "factor": -3}]
)
def test_a_schedule_below_zero_is_refused(schedule):
    with pytest.raises(ValueError, match=r"is -[13]\.0; give a finite number"):
        parsed(**method(lr=schedule))


# Names


@pytest.mark.parametrize(
    ("sections", "sentences"),
    [
        ({"methd": {}}, ["unknown section [methd]", "did you mean 'method'?", "split"]),
        ({"zzz": {}}, ["unknown section [zzz]; known: data, model, problem, method, split, run"]),
        (method(local_step=3), ["[method] has no key 'local_step'", "mean 'local_steps'?", "lr"]),
        (method(LR=3), ["[method] has no key 'LR'; did you mean 'lr'?"]),
        ({"run": {"round": 3}}, ["[run] has no key 'round'; did you mean 'rounds'?"]),
        ({"split": {"valid": 0.1}}, ["[split] has no key 'valid'", "validation"]),
        ({"method": {"name": "codaska"}}, ["name is 'codaska'; did you mean 'codasca'?", "fedavg"]),
        ({"model": {"name": ["mlp"]}}, ["[model] name is ['mlp']", "mlp"]),
        ({"data": {}}, ["section [data] has no name", "heart, folder, pooled, quadratic"]),
        ({"data": {"name": "folder", "path": "x"}}, ["[data] needs the key 'label'"]),
        ({"problem": {"name": "auc", "module": 3}}, ["[problem] has no key 'module'"]),
        ({"rounds": 5}, ["rounds = 5 stands outside the sections", "[run]"]),
        ({"run": 5}, ["run = 5 stands outside the sections"]),
    ],
)
def test_an_unknown_name_gives_the_nearest(sections, sentences):
    message = error(**sections)
    for sentence in sentences:
        assert sentence in message


@pytest.mark.parametrize("section", ["data", "problem", "method"])
def test_a_missing_section_is_named(section):
    whole = table()
    del whole[section]
    with pytest.raises(ConfigError, match=rf"no section \[{section}\]; add one with name") as error:
        Experiment.from_table(whole)
    for name in CHOICES[section]:
        assert name in str(error.value)


def test_a_network_needs_a_model_and_a_problem_needs_its_data():
    whole = table()
    del whole["model"]
    with pytest.raises(ConfigError, match=r"no section \[model\].*linear, mlp"):
        build(Experiment.from_table(whole))
    with pytest.raises(ConfigError, match=r"\[problem\] quadratic cannot be posed on \[data\] hea"):
        build(parsed(problem={"name": "quadratic"}))
    with pytest.raises(ConfigError, match=r"\[problem\] auc cannot be posed on \[data\] quadratic"):
        build(parsed(data={"name": "quadratic"}))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "there is no file"),
        (b"[run\nrounds = 3", "is not valid TOML"),
        (b"[run]\nrounds = 3\nrounds = 4", "is not valid TOML"),
        (b"# \xff\xfe", "is not valid TOML"),
        (b"rounds = 3", "rounds = 3 stands outside the sections"),
    ],
)
def test_a_file_that_is_none(tmp_path, content, sentence):
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Experiment.from_file(path)
    assert sentence in str(caught.value)
    assert content is not None or "x.toml" in str(caught.value)


def test_a_folder_is_not_a_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_toml(tmp_path)


# Changes


def test_changes_are_typed_as_in_the_file():
    experiment = Experiment.from_table(
        changed(
            table(),
            [
                "method.lr=0.05",
                "local_steps=3",
                'run.executor = "debug"',
                "sampling=iid",
                "run.seed=7",
                "model.name=mlp",
                "hidden=[4, 2]",
                "batch_norm=true",
                "proximal={kind = 'constant', value = 0.5}",
            ],
        )
    )
    assert experiment.make("method") == METHODS["codasca"](
        **{"lr": 0.05, "local_steps": 3, "proximal": Constant(0.5)}
    )
    assert (experiment.run.executor, experiment.run.sampling, experiment.run.seed) == (
        *("debug", "iid"),
        7,
    )
    assert experiment.split.seed == 0
    assert experiment.make("model").hidden == (4, 2)


def test_a_text_may_hold_anything():
    folder = {"name": "folder", "path": "a", "label": "b"}
    changes = ["path=../my sites=2/x", "label=", 'data.positive="1"', "drop=['p.id']"]
    options = Experiment.from_table(changed(table(data=folder), changes)).data.options
    assert options == {
        **{"path": "../my sites=2/x", "label": "", "positive": "1"},
        "drop": ("p.id",),
    }


def test_the_table_given_is_left_as_it_was():
    before = table(run={"rounds": 3})
    after = changed(before, ["rounds=9", "split.seed=4"])
    assert before == table(run={"rounds": 3})
    assert after["run"] == {"rounds": 9}
    assert after["split"] == {"seed": 4}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("rounds", "'rounds' is not a change; write section.key=value"),
        ("seed=3", "'seed' is a key of several sections; write split.seed or run.seed"),
        ("positive_share=0.3", "write problem.positive_share or split.positive_share"),
        ("round=3", "no section has a key 'round'; did you mean 'rounds'?"),
        ("metod.lr=3", "unknown section [metod]; did you mean 'method'?"),
        ("run.lr=3", "[run] has no key 'lr'"),
        ("method.lr.value=3", "[method] has no key 'lr.value'"),
        ("model.name=[1]", "[model] name is [1]"),
        ("rounds=many", "[run] rounds is 'many'; give a whole number"),
    ],
)
def test_a_bad_change_ends_in_a_sentence(change, sentence):
    with pytest.raises(ConfigError) as caught:
        Experiment.from_table(changed(table(), [change]))
    assert sentence in str(caught.value)


def test_another_method_keeps_the_options_that_it_has_too_and_says_which_are_left_out():
    whole, notes = table(**method(server_lr=2.0, lr=0.3, local_steps=4)), []
    kept = {"name": "coda", "lr": 0.3, "local_steps": 4}
    assert changed(whole, ["method.name=coda"], notes.append)["method"] == kept
    assert notes.pop() == "[method] server_lr left out: coda has no such option"
    assert changed(whole, ["method.name=codasca"], notes.append) == whole
    for order in (["method.name=fedavg", "lr=0.7"], ["method.lr=0.7", "method.name=fedavg"]):
        assert changed(whole, order)["method"] == {"name": "fedavg", "lr": 0.7, "local_steps": 4}
    assert not notes


# There and back


def resolved(experiment):
    """All options, defaults included, as the objects would be made with."""
    return {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in experiment.to_table().items()
    }


def returned(experiment):
    return Experiment.from_table(tomllib.loads(write_toml(experiment.to_table())))


@pytest.mark.parametrize("name", METHODS)
def test_a_resolved_experiment_comes_back(name):
    for problem in PROBLEMS:
        data = {"name": "quadratic"} if problem == "quadratic" else {"name": "heart"}
        experiment = parsed(data=data, problem={"name": problem}, method={"name": name})
        again = returned(experiment)
        assert resolved(again) == resolved(experiment), problem
        assert again.make("method") == experiment.make("method"), problem
        assert (again.run, again.split) == (experiment.run, experiment.split), problem
        # Resolved once, it is what it says: the next round trip is the identity.
        assert returned(again) == again, problem
        # What is None stays away from the file.
        fields = {f.name for f in dataclasses.fields(METHODS[name]) if f.default is not None}
        assert fields <= set(tomllib.loads(write_toml(again.to_table()))["method"]), problem


@pytest.mark.parametrize(
    "schedule", [Constant(0.5), Stagewise(0.1, 2.0), StepDecay(1.0, 3.0, (4, 5)), InverseRoot(1e-7)]
)
def test_schedules_come_back(schedule):
    experiment = parsed(**method(lr=schedule, proximal=schedule))
    assert returned(experiment).make("method").lr == schedule
    assert Experiment.from_table(experiment.to_table()).make("method").proximal == schedule


texts = st.text(st.characters(exclude_categories=["Cs"]))


@settings(max_examples=200, deadline=None)
@given(texts, st.lists(texts, max_size=3), st.floats(0, 1e300), st.integers(0, 2**70))
def test_any_text_and_number_comes_back(text, drop, rate, seed):
    experiment = parsed(
        data={"name": "folder", "path": text, "label": text, "drop": drop},
        method={"name": "codasca", "lr": rate},
        run={"seed": seed},
    )
    again = returned(experiment)
    assert again.data.options["path"] == text
    assert again.data.options["drop"] == tuple(drop)
    assert again.make("method").lr == rate
    assert again.run.seed == seed
    assert returned(again) == again


@pytest.mark.parametrize(
    "text",
    ['say "no"', "C:\\new\\u0041", "a\nb\r\tc", "naïve 心 🫀", "\x7f\x00\x1f", "'''", "#[x]"],
)
def test_odd_texts_come_back(text):
    experiment = parsed(data={"name": "folder", "path": text, "label": text, "drop": [text]})
    assert returned(experiment).data.options["path"] == text


# The files of the repository


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_the_experiments_parse_and_build(path, tmp_path, monkeypatch):
    # my_sites.toml waits for a folder of the user's own.
    lines = [f"{30 + i},{i % 7},{i % 2}" for i in range(40)]
    for site in ("leeds", "york"):
        file = tmp_path / "my-sites" / f"{site}.csv"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(["age,stage,disease", *lines]) + "\n")
    # The Fama-French files are the user's own too.
    portfolios = {sort: np.ones((40, 100), dtype=np.int16) for sort in ("ME", "OP", "INV")}
    np.savez(tmp_path / "ff100_daily.npz", allow_pickle=False, **portfolios)
    official.write_idx(tmp_path / "fashion-mnist")
    monkeypatch.setenv("FEDMINIMAX_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert path.read_text().startswith("# "), "it opens with what it shows"
    if "methods" in read_toml(path):
        comparison = Comparison(path)
        for label in comparison.methods:
            build(comparison.experiment(Job((), label, (), 0)))
        return
    experiment = Experiment.from_file(path)
    if is_auto(experiment):
        for recipe in recipes_of(experiment).values():
            build(recipe)
        assert resolved(returned(experiment)) == resolved(experiment)
        return
    built = build(experiment)
    assert built.algorithm == experiment.make("method")
    assert len(built.clients) >= 2
    assert built.problem.start().x.numel() > 0
    assert resolved(returned(experiment)) == resolved(experiment)


def test_there_are_experiments():
    assert {path.stem for path in EXPERIMENTS} >= {"heart_codasca", "quadratic_codasca"}
