"""fedminimax deploy: runs between sites, by init, join, approve, peers, server, site, run, status,
stop, ledger, measure and flower."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from fedminimax.cli.common import tell_note
from fedminimax.cli.web import serve as served_page
from fedminimax.config import ConfigError, Experiment
from fedminimax.engine.state.folder import RunFolder
from fedminimax.privacy.accountant import epsilon_of
from fedminimax.remote.audit import AuditLog, summary
from fedminimax.remote.calls import Faults
from fedminimax.remote.consortium import (
    FOLDER,
    INVITATION,
    Consortium,
    approve,
    check_names,
    enrol,
    init,
    install,
    join,
    read_request,
)
from fedminimax.remote.flare.processes import Supervisor, keep_server, keep_site
from fedminimax.remote.flower.runs import write_app
from fedminimax.remote.identity import Identity, checked_peers, pin, spoken
from fedminimax.remote.ledger import Ledger
from fedminimax.remote.measure import measure
from fedminimax.remote.rows import PartOfTables, holding
from fedminimax.remote.served import REQUEST, Served, line_of
from fedminimax.remote.setup import digest_of_experiment, sent_experiment
from fedminimax.remote.site import RUN_NAME
from fedminimax.remote.site_file import FILE, SiteFile, register, register_allowed
from fedminimax.report.live import Going
from fedminimax.report.tables import privacy_text
from fedminimax.tuning.auto import is_auto, recipes_of

PLAIN = (
    "the links of this consortium are NOT encrypted: anybody on the network can read and change "
    "what is sent. Make it without --plain for anything but a test."
)
CENTRAL = (
    "the sites' private keys were made on this machine, so whoever holds it can pose as any site. "
    "Where a site can run a command itself, let it: fedminimax deploy join."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    command = _action(
        actions, "init", _init, "make a consortium: its authority and its server, on this machine",
        "fedminimax deploy init consortium/ --sites cleveland,hungary,switzerland,va",
    )  # fmt: skip
    command.add_argument("--sites", required=True, help="their names; the order is that of clients")
    command.add_argument(
        "--host", default="localhost", help="the server's name, as sites reach it (default: here)"
    )
    command.add_argument("--port", type=int, default=8702, help="the server's port (default: 8702)")
    command.add_argument("--plain", action="store_true", help="no encryption: for tests only")
    command.add_argument(
        "--central", action="store_true", help="make the sites' keys and kits here too"
    )

    command = _action(
        actions, "join", _join, "at a site: make its key and a request, later install the approval",
        "fedminimax deploy join va/ --invitation invitation.json\n"
        "  fedminimax deploy join va/ --approved va.signed.zip",
    )  # fmt: skip
    command.add_argument("--name", help="of the site (default: that of the folder)")
    command.add_argument("--invitation", type=Path, help="the consortium's invitation.json")
    command.add_argument("--approved", type=Path, help="what `deploy approve` made of the request")

    command = _action(
        actions, "approve", _approve, "sign the request of a site",
        "fedminimax deploy approve consortium/ va.request.zip",
    )  # fmt: skip
    command.add_argument("request", type=Path)

    command = _action(
        actions, "peers", _peers, "at a site: who it is to the others, and who they are to it",
        'fedminimax deploy peers va/ --pin hungary "sha256:1f2e 3d4c ..."',
    )  # fmt: skip
    command.add_argument(
        "--pin", nargs=2, action="append", default=[], metavar=("SITE", "FINGERPRINT"),
        help="write what another site has told by telephone into the site file",
    )  # fmt: skip

    _action(
        actions, "server", _server, "run the server, until Ctrl-C",
        "fedminimax deploy server consortium/",
    )  # fmt: skip
    _action(
        actions, "site", _site, "at a site: take part, until Ctrl-C",
        "fedminimax deploy site va/",
    )  # fmt: skip

    command = _action(
        actions, "run", _run, "run an experiment, or go on with it, and watch over it",
        "fedminimax deploy run consortium/ experiments/heart_codasca.toml rounds=40",
    )  # fmt: skip
    _add_run(command, timeout=60.0)

    command = _action(
        actions, "status", _status, "the runs of a consortium, and where they stand",
        "fedminimax deploy status consortium/",
    )  # fmt: skip
    command.add_argument(
        "--web", action="store_true", help="serve a page of them on this machine, until Ctrl-C"
    )
    command = _action(
        actions, "stop", _stop, "stop a run after its round; run again, it goes on",
        "fedminimax deploy stop consortium/ heart_codasca",
    )  # fmt: skip
    command.add_argument("name", help="of the run")

    command = _action(
        actions, "ledger", _ledger, "at a site: what its rows have spent of their privacy",
        "fedminimax deploy ledger va/",
    )  # fmt: skip
    command.add_argument(
        "--confirm", metavar="REASON", help="go on with a ledger that was damaged, and say why"
    )

    command = _action(
        actions, "log", _log, "at a site: what it was asked, and what it has answered",
        "fedminimax deploy log va/",
    )  # fmt: skip
    command.add_argument("--run", metavar="NAME", help="of this run only")

    command = _action(
        actions, "digest", _digest, "a digest of an experiment, by which partners agree on it",
        "fedminimax deploy digest consortium/ experiments/heart_codasca.toml rounds=40",
    )  # fmt: skip
    command.add_argument("config", type=Path, help="a TOML file")
    command.add_argument("changes", nargs="*", metavar="key=value", help="such as method.lr=0.05")

    _action(
        actions, "measure", _measure, "seconds and bytes of a round, with a consortium made here",
        "fedminimax deploy measure measured/",
    )  # fmt: skip

    command = _action(
        actions, "flower", _flower, "write an app for Flower, which `flwr run` runs",
        "fedminimax deploy flower heart-app/ experiments/heart_codasca.toml \\\n"
        "    --sites cleveland,hungary,switzerland,va --home /srv/fedminimax",
    )  # fmt: skip
    command.add_argument(
        "--sites", required=True, help="the names under which their SuperNodes' keys are registered"
    )
    command.add_argument(
        "--home", type=Path, required=True, help="a folder at the SuperLink, for the run's folder"
    )
    _add_run(command, timeout=300.0)


def _action(
    actions: Any, name: str, function: Callable[..., int], told: str, example: str
) -> argparse.ArgumentParser:
    command = actions.add_parser(
        name, help=told, description=f"{told[0].upper()}{told[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    command.add_argument("folder", type=Path, help="of the consortium, the site or the app")
    command.set_defaults(command=function)
    return command


def _add_run(command: argparse.ArgumentParser, timeout: float) -> None:
    command.add_argument("config", type=Path, help="a TOML file; its [data] is left to the sites")
    command.add_argument("changes", nargs="*", metavar="key=value", help="such as method.lr=0.05")
    command.add_argument("--name", help="of the run (default: that of the file)")
    command.add_argument(
        "--policy", default="wait", choices=("wait", "skip", "fail"),
        help="what to do about a site that does not answer (default: wait)",
    )  # fmt: skip
    command.add_argument("--timeout", type=float, default=timeout, help="seconds for an answer")
    command.add_argument("--least-replies", type=int, default=1, help="sites that a round needs")
    command.add_argument(
        "--norm-factor", type=float, metavar="N",
        help="refuse replies N times longer than the median (default: 10; 0: take any)",
    )  # fmt: skip
    command.add_argument(
        "--largest-share", type=float, default=0.9, help="of the weight, for a site (default: 0.9)"
    )


def _asked(options: argparse.Namespace, home: Path) -> tuple[str, Experiment, Faults]:
    """The run's name, and what is asked for; `home` is the folder that says what is allowed."""
    name = options.name or options.config.stem
    if not RUN_NAME.fullmatch(name):
        raise ConfigError(f"the run is called {name!r}; use letters, digits, . - and _")
    register_allowed(home)
    experiment = Experiment.from_file(options.config, options.changes, tell_note)
    faults = Faults(
        policy=options.policy,
        timeout=options.timeout,
        least_replies=options.least_replies,
        norm_factor=options.norm_factor,
        largest_share=options.largest_share,
    )
    return name, experiment, faults


def _red(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"WARNING: {text}", style="bold red", markup=False)


def _sites(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(name.strip() for name in options.sites.split(","))


def _init(options: argparse.Namespace) -> int:
    sites, folder = _sites(options), options.folder
    made = init(folder, sites, options.host, options.port, not options.plain)
    print(f"authority and server of {', '.join(sites)} are in {folder}")
    print(f"its authority's certificate: {made.fingerprint}")
    if options.plain:
        _red(PLAIN)
    if not options.central:
        print(f"give each site {folder / INVITATION}, and tell it the line above by telephone")
        return 0
    for name in sites:
        enrol(folder, folder / "sites" / name, name)
        print(f"the folder of {name}: {folder / 'sites' / name}")
    _red(CENTRAL)
    return 0


def _join(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    if (options.invitation is None) == (options.approved is None):
        raise ConfigError(
            "give --invitation to make a request, or --approved to install the answer"
        )
    if options.invitation is not None:
        name = options.name or folder.resolve().name
        request = join(folder, options.invitation, name)
        known = Consortium.read(folder, INVITATION)
        print(f"the key of {name} is in {folder / 'request'} and stays there")
        print(f"send {request} to the consortium, and say in {folder / 'site.toml'} where rows are")
        print(f"compare by telephone: {known.fingerprint}")
        print(f"and tell them the hash of your key: {_key_hash(request)}")
        own = spoken(Identity.read(folder).fingerprint)
        print(f"for masked messages, tell the other sites: {own}")
        return 0
    name = install(folder, Consortium.read(folder, INVITATION), options.approved)
    print(f"{name} can take part: fedminimax deploy site {folder}")
    return 0


def _approve(options: argparse.Namespace) -> int:
    signed = approve(options.folder, options.request)
    print(f"compare by telephone, before you send it: {_key_hash(options.request)}")
    print(f"send {signed} back to the site; there is no key in it")
    return 0


def _key_hash(request: Path) -> str:
    return f"SHA256:{read_request(request)['public_key_sha256']}"


def _peers(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    for name, told in options.pin:
        _pin(folder, name, told)
    site, identity = SiteFile.read(folder), Identity.made(folder)
    names = [*site.peers]
    if (folder / INVITATION).exists():  # there is none on Flower
        others = [n for n in Consortium.read(folder, INVITATION).sites if n != site.name]
        if strange := [name for name in names if name not in others]:
            raise ConfigError(
                f"{folder / FILE} pins {', '.join(strange)}, and the other sites of the consortium "
                f"are {', '.join(others)}: correct [peers]"
            )
        names = others
    print(f"this is {site.name}: {spoken(identity.fingerprint)}")
    for name in names:
        pinned = site.peers.get(name)
        print(f"{name}: {spoken(pinned) if pinned else 'not pinned'}")
        if pinned == identity.fingerprint:
            raise ConfigError(f"{name!r} is pinned with the fingerprint of this site: ask it again")
    return 0 if names and {*names} == {*site.peers} else 1


def _pin(folder: Path, name: str, told: str) -> None:
    site = SiteFile.read(folder)
    (fingerprint,) = checked_peers(folder / FILE, site.name, {name: told}).values()
    before = site.peers.get(name)
    if before is None:
        checked_peers(folder / FILE, site.name, {**site.peers, name: fingerprint})
        pin(folder / FILE, name, fingerprint)
    elif before != fingerprint:
        raise ConfigError(
            f"{name!r} is pinned as {spoken(before)}, and this is another: if the site has a new "
            f"identity, and has said so by telephone, delete its line in {folder / FILE} first"
        )


def _until_stopped() -> threading.Event:
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    return over


def _server(options: argparse.Namespace) -> int:
    known = Consortium.read(options.folder)
    if not known.encrypted:
        _red(PLAIN)
    print(f"serving {', '.join(known.sites)} at {known.host}:{known.port}", flush=True)
    keep_server(options.folder, _until_stopped())
    return 0


def _site(options: argparse.Namespace) -> int:
    file = SiteFile.read(options.folder)
    _check_rows(file)
    known = Consortium.read(options.folder, INVITATION)
    if not known.encrypted:
        _red(PLAIN)
    print(f"site {file.name} of the consortium at {known.host}:{known.port}", flush=True)
    keep_site(options.folder, file.name, _until_stopped())
    return 0


def _check_rows(file: SiteFile) -> None:
    """What a run would stumble over is said where the site is started, not in the log of a job."""
    register(file.allow)
    held = holding(file.name, file.folder, file.data)
    held.outline()
    if isinstance(held, PartOfTables):
        held.site(held.reading.schema)


def _run(options: argparse.Namespace) -> int:
    name, experiment, faults = _asked(options, options.folder)
    served = Served(options.folder, name)
    if (ended := served.ended()).get("good"):
        print(f"{ended['outcome']}\nrun folder: {served.path}")
        return 0
    served.ask_for(experiment, faults, Consortium.read(options.folder).sites)
    shown = len(RunFolder(served.path).read_history())

    def look() -> None:
        nonlocal shown
        records = RunFolder(served.path).read_history()
        for record in records[shown:]:
            print(line_of(record, experiment.run.rounds), flush=True)
        shown = len(records)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        ended = Supervisor(options.folder, served, say, look).watch()
    except KeyboardInterrupt:
        say(
            f"{name} is no longer watched; what has begun goes on by itself. Run the same command "
            f"to watch it again, or stop it: fedminimax deploy stop {options.folder} {name}"
        )
        return 130
    look()
    print(f"{ended['outcome']}\nrun folder: {served.path}")
    return 0 if ended["good"] else 1


def _status(options: argparse.Namespace) -> int:
    if options.web:
        return _watch(options)
    if not _requests(options) or (options.folder / FOLDER).exists():  # on Flower there is none
        known = Consortium.read(options.folder)
        print(f"{', '.join(known.sites)} at {known.host}:{known.port}")
    for path in _requests(options):
        served = Served(options.folder, path.parent.name)
        print(f"{served.name}: {served.state()}")
    return 0


def _requests(options: argparse.Namespace) -> list[Path]:
    return sorted((options.folder / "runs").glob("*/request.json"))


def _watch(options: argparse.Namespace) -> int:
    def look() -> list[Going]:
        runs = [Served(options.folder, path.parent.name) for path in _requests(options)]
        return [Going(r.name, r.path, r.state(), r.heard(), r.faults()) for r in runs]

    look()  # what cannot be read is said here
    over = _until_stopped()
    with served_page(f"Runs of {options.folder.resolve().name}", look) as address:
        print(f"watch them at {address}\nCtrl-C ends it; the runs go on", flush=True)
        over.wait()
    return 0


def _ledger(options: argparse.Namespace) -> int:
    site, ledger = SiteFile.read(options.folder), Ledger(options.folder)
    if options.confirm:
        ledger.confirm(options.confirm)
        print(f"the ledger goes on: {options.confirm}")
    limits, found = site.limits, ledger.spent()
    for own in found:
        spent = privacy_text({"epsilon": epsilon_of(own.mu2, limits.delta), "delta": limits.delta})
        most = "no limit" if limits.epsilon is None else f"limit epsilon {limits.epsilon:g}"
        print(f"{own.data or '(no rows)'}: {spent}; {most}; {own.runs} runs, {own.calls} calls")
    if not found:
        print("nothing was released yet")
    return 0


def _digest(options: argparse.Namespace) -> int:
    register_allowed(options.folder)
    asked = Experiment.from_file(options.config, options.changes, tell_note)
    every = recipes_of(asked) if is_auto(asked) else {options.config.stem: asked}
    for name, experiment in every.items():
        print(f'{name} = "{digest_of_experiment(sent_experiment(experiment))}"')
    return 0


def _log(options: argparse.Namespace) -> int:
    if not options.folder.is_dir():
        raise ConfigError(f"there is no folder {str(options.folder)!r}; give that of a site")
    entries = AuditLog(options.folder).entries()
    told = [e for e in entries if options.run is None or e.get("run") == options.run]
    for line in summary(told):
        print(line)
    print(f"{len(entries)} lines, none edited or lost" if entries else "nothing was asked yet")
    return 0


def _measure(options: argparse.Namespace) -> int:
    print(measure(options.folder), end="")
    return 0


def _flower(options: argparse.Namespace) -> int:
    sites, home = _sites(options), options.home.absolute()
    name, experiment, faults = _asked(options, home)
    check_names(sites)
    write_app(options.folder, experiment, faults, sites, home, name)
    print(f"begin or go on with it: flwr run {options.folder} SUPERLINK --stream")
    print(f"its folder at the SuperLink: {Served(home, name).path}")
    return 0


def _stop(options: argparse.Namespace) -> int:
    served = Served(options.folder, options.name)
    if not (served.path / REQUEST).exists():
        raise ConfigError(f"nobody has asked for a run called {options.name!r} in {options.folder}")
    served.stop()
    print(
        f"{options.name} stops after its round, or before it begins; run it again to go on with it"
    )
    return 0
