"""Who takes part, and how they know each other: certificates of NVIDIA FLARE's distributed
provisioning. Each key is made where it is used, and stays there.

    consortium/   at the server: consortium.json, authority/ (its key signs certificates), server/
                  and admin/ (FLARE's kits), invitation.json, runs/
    SITE/         at a site: site.toml, request/ (its key), identity.key, kit/, runs/ (its states)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedminimax.config import ConfigError, options_for
from fedminimax.engine.state.checkpoint import write_bytes
from fedminimax.remote.identity import Identity
from fedminimax.remote.site_file import EXAMPLE, FILE

FOLDER, INVITATION = "consortium.json", "invitation.json"
# The folders, told to FLARE's processes when they start; those of their jobs inherit it.
CONSORTIUM_VARIABLE, SITE_VARIABLE = "FEDMINIMAX_CONSORTIUM", "FEDMINIMAX_SITE"
HOME_VARIABLE = "FEDMINIMAX_HOME"  # the user's; FLARE is given another
ADMIN = "lead@consortium.local"
SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
FINGERPRINT = re.compile(r"SHA256(:[0-9A-F]{2}){32}")
SERVER_NAME = "server"  # as FLARE calls its own, whatever its host
# All that a job may be made of, at a site and at the server.
CLASSES = {
    "kit": [
        "nvflare.collab.runtime.executor.CollabExecutor",
        "fedminimax.remote.flare.job.RunSite",
    ],
    "server": [
        "nvflare.collab.runtime.controller.CollabController",
        "fedminimax.remote.flare.job.RunServer",
    ],
}
MOST_REQUEST = 100_000  # bytes of request.json
SECONDS_SILENT = 30  # after which FLARE takes a site for gone


@dataclass(frozen=True)
class Consortium:
    """What all partners know."""

    name: str
    sites: tuple[str, ...]  # in this order they are clients 0, 1, ...
    host: str
    port: int
    encrypted: bool
    fingerprint: str = ""  # of the authority's certificate

    @staticmethod
    def read(folder: Path, file: str = FOLDER) -> Consortium:
        try:
            table = json.loads((folder / file).read_text(encoding="utf-8"))
            if not isinstance(table, dict):
                raise TypeError("it is no table of settings")
            known = Consortium(**options_for(Consortium, table, "the consortium"))
            check_port(known.port)
            return known
        except FileNotFoundError:
            raise ConfigError(
                f"there is no {file} in {folder}: make the consortium first, with fedminimax "
                "deploy init"
            ) from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{folder / file} cannot be used: {error}") from error

    def write(self, file: Path) -> None:
        write_bytes(file, (json.dumps(asdict(self), indent=2) + "\n").encode())

    def profile(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "scheme": "grpc",
            "connection_security": "mtls" if self.encrypted else "clear",
            "server": {"host": self.host, "fed_learn_port": self.port},
        }


def init(
    folder: Path, sites: tuple[str, ...], host: str = "localhost", port: int = 8702,
    encrypted: bool = True,
) -> Consortium:  # fmt: skip
    """The authority, the server and the one who submits runs: all on this machine. If that fails,
    what was in the folder before stays, and nothing else."""
    if (folder / FOLDER).exists():
        raise ConfigError(f"{folder} is a consortium already: give another folder")
    if (folder / "authority").exists():
        raise ConfigError(
            f"there is a {folder / 'authority'}, but no {FOLDER}: delete {folder} if it is what is "
            "left of a `deploy init` that was killed, or give another folder"
        )
    check_names(sites, host)
    check_port(port)
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    try:
        return _made(folder, Consortium("consortium", sites, host, port, encrypted))
    except BaseException:
        for path in set(folder.iterdir()) - before:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        if new:
            folder.rmdir()
        raise


def _made(folder: Path, made: Consortium) -> Consortium:
    os.chmod(folder, 0o700)
    profile = folder / "profile.yaml"
    _write_yaml(profile, made.profile())
    authority = folder / "authority"
    _flare(folder, "cert", "init", "--profile", profile, "-o", authority)
    made = replace(made, fingerprint=fingerprint(authority / "rootCA.pem"))
    for name, kind, place in ((made.host, "server", "server"), (ADMIN, "admin", "admin")):
        make_request(folder, made, name, kind)
        signed = _signed(folder, folder / "request" / f"{name}.request.zip", name)
        install(folder, made, signed, place)
        shutil.rmtree(folder / "request")
    made.write(folder / INVITATION)
    made.write(folder / FOLDER)
    return made


def join(folder: Path, invitation: Path, name: str) -> Path:
    """At a site: its key, the request that the authority is to sign, and its identity, unless it
    has one. Returns the request."""
    known = Consortium.read(invitation.parent, invitation.name)
    if not FINGERPRINT.fullmatch(known.fingerprint):
        raise ConfigError(
            f"the fingerprint of the authority in {invitation} is {known.fingerprint!r}; without "
            "one the site could not tell its consortium from another: ask for the invitation.json "
            "that `deploy init` made"
        )
    if name not in known.sites:
        raise ConfigError(
            f"{name!r} is not a site of this consortium; its sites are {', '.join(known.sites)}"
        )
    if (folder / "request").exists() or (folder / "kit").exists():
        raise ConfigError(
            f"{folder} has joined already: give another folder, or delete {folder / 'request'} and "
            f"{folder / 'kit'} to join again with a new key"
        )
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    known.write(folder / INVITATION)
    if not (folder / FILE).exists():
        (folder / FILE).write_text(EXAMPLE.format(name=name), encoding="utf-8")
    Identity.made(folder)
    make_request(folder, known, name, "client")
    return folder / "request" / f"{name}.request.zip"


def make_request(folder: Path, known: Consortium, name: str, kind: str) -> None:
    """Makes a key and a request to certify it, for a site, the server or an administrator."""
    role = {"role": "lead"} if kind == "admin" else {}
    who = {"name": name, "org": "consortium", "type": kind, **role}
    definition = folder / "participant.yaml"
    _write_yaml(definition, {"name": known.name, "participants": [who]})
    _flare(folder, "cert", "request", "-p", definition, "--out", folder / "request")
    definition.unlink()


def approve(folder: Path, request: Path) -> Path:
    """At the authority: a certificate for the key of a site's request. Returns what goes back."""
    known, asked = Consortium.read(folder), read_request(request)
    name = asked["name"]
    # What FLARE signs stands in the request, whatever its file is called.
    if name not in known.sites:
        raise ConfigError(
            f"{request} is of {name!r}, which is not a site of this consortium; its sites "
            f"are {', '.join(known.sites)}"
        )
    if request.name != f"{name}.request.zip":
        raise ConfigError(
            f"{request} is a request of {name!r}: if it came from there, call it "
            f"{name}.request.zip; if not, do not sign it"
        )
    if (asked.get("cert_type"), asked.get("cert_role")) != ("client", None):
        raise ConfigError(
            f"{request} is for a certificate of the type {asked.get('cert_type')!r} and the role "
            f"{asked.get('cert_role')!r}; a site gets one of the type 'client' without a role: do "
            "not sign it, and ask the site how it was made"
        )
    return _signed(folder, request, name)


def read_request(file: Path) -> dict[str, Any]:
    """What a request says of itself; FLARE compares it with the key when it signs."""
    try:
        with zipfile.ZipFile(file) as opened:
            if (size := opened.getinfo("request.json").file_size) > MOST_REQUEST:
                raise ValueError(f"its request.json unpacks to {size} bytes")
            asked = json.loads(opened.read("request.json"))
        if not isinstance(asked["name"], str):
            raise TypeError("its name is no text")
        return asked
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {file}: give the request that a site has sent"
        ) from None
    except (
        *(zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError),
        *(KeyError, TypeError, ValueError, RuntimeError),
    ) as error:
        raise ConfigError(f"{file} is not a request of `deploy join` ({error})") from error


def _signed(folder: Path, request: Path, name: str) -> Path:
    signed = folder / "approved" / f"{name}.signed.zip"
    signed.parent.mkdir(exist_ok=True)
    signed.unlink(missing_ok=True)  # a site that joins again has a new key
    profile, authority = folder / "profile.yaml", folder / "authority"
    asked = ("cert", "approve", request, "-c", authority, "--profile", profile, "--out", signed)
    _flare(folder, *asked)
    return signed


def install(folder: Path, known: Consortium, signed: Path, place: str = "kit") -> str:
    """Where the request was made: the kit, from what the authority has signed. Returns whose."""
    if not signed.is_file():
        raise ConfigError(f"there is no file {signed}: give what the authority has sent back")
    if (folder / place).exists():
        raise ConfigError(f"there is a {folder / place} already: delete it to install another")
    made_here = next((folder / "request").glob("*.request.zip"), None)
    if made_here is None:
        raise ConfigError(
            f"there is no request in {folder}: install where the request was made, which is where "
            "the key is"
        )
    name = read_request(made_here)["name"]
    work = folder / "packaging"
    shutil.rmtree(work, ignore_errors=True)  # of one that failed
    options = ("--request-dir", folder / "request", "--fingerprint", known.fingerprint)
    _flare(folder, "package", signed, *options, "-w", work)
    (made,) = work.glob(f"*/prod_*/{name}")
    shutil.move(made, folder / place)
    shutil.rmtree(work)
    if place != "admin":
        _restrict(folder, place)
    return name


def enrol(consortium: Path, folder: Path, name: str) -> None:
    """A site joins, is approved and gets its kit, where it is on the authority's machine."""
    signed = approve(consortium, join(folder, consortium / INVITATION, name))
    install(folder, Consortium.read(consortium), signed)


def _restrict(folder: Path, place: str) -> None:
    """No code comes with a job, jobs are signed, and FLARE writes nothing outside the folder."""
    local, startup = folder / place / "local", folder / place / "startup"
    resources = json.loads((local / "resources.json.default").read_text())
    resources |= {"class_list_enforcement_mode": "enforce", "class_allow_list": CLASSES[place]}
    # What goes wrong at a site is for the site to read.
    resources["allow_log_streaming"] = False
    if place == "server":
        resources["servers"][0]["heart_beat_timeout"] = SECONDS_SILENT
        store = folder.resolve() / place
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(
            store / "snapshots"
        )
        for component in resources["components"]:
            if component["id"] == "job_manager":
                component["args"]["uri_root"] = str(store / "jobs")
            if component["id"] == "job_scheduler":
                component["args"]["max_jobs"] = 100  # a job whose server died counts for ever
    _write_json(local / "resources.json", resources)
    rights = json.loads((local / "authorization.json.default").read_text())
    for role, given in rights["permissions"].items():
        if given == "any" or role == "project_admin":
            rights["permissions"][role] = {"view": "any"}
        elif isinstance(given, dict):
            given |= {"byoc": "none"} if "byoc" in given else {}
            given |= {"shell_commands": "none"} if "shell_commands" in given else {}
    _write_json(local / "authorization.json", rights)
    (config,) = startup.glob("fed_*.json")
    _write_json(config, {**json.loads(config.read_text()), "require_signed_jobs": True})


def check_certificate(folder: Path, known: Consortium, name: str) -> None:
    """Refuses to start a site that the server would not let in, or would take for another."""
    startup = folder / "kit" / "startup"
    again = f"delete {folder / 'request'} and {folder / 'kit'}, and join again"
    for file in ("client.crt", "client.key", "rootCA.pem"):
        if not (startup / file).is_file():
            raise ConfigError(
                f"there is no {file} in {startup}: without a certificate of the consortium's "
                f"authority the server lets nobody in; {again}"
            )
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.x509.oid import NameOID

    check_date(startup / "client.crt", again)
    authority = x509.load_pem_x509_certificate((startup / "rootCA.pem").read_bytes())
    own = x509.load_pem_x509_certificate((startup / "client.crt").read_bytes())
    try:
        own.verify_directly_issued_by(authority)
        good = fingerprint(startup / "rootCA.pem") == known.fingerprint
    except (ValueError, TypeError, InvalidSignature):
        good = False
    if not good:
        raise ConfigError(
            f"the certificate in {startup} is not of the authority that the invitation names "
            f"({known.fingerprint}): the server would not let this site in; {again}"
        )
    holder = own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    if holder != name:
        raise ConfigError(
            f"the certificate in {startup} is of {holder!r}, but {folder / FILE} says name = "
            f"{name!r}: correct the file"
        )


def check_date(certificate: Path, remedy: str) -> None:
    """Refuses a certificate that is not valid today; `remedy` says how to get another."""

    from cryptography import x509

    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    begins, now, ends = found.not_valid_before_utc, datetime.now(UTC), found.not_valid_after_utc
    if not begins <= now <= ends:
        raise ConfigError(
            f"the certificate {certificate} is good from {begins:%Y-%m-%d %H:%M} to "
            f"{ends:%Y-%m-%d %H:%M} UTC, and this machine's clock says {now:%Y-%m-%d %H:%M}: "
            f"correct the clock; or, if it is right, {remedy}"
        )


def check_port(port: int) -> None:
    """Refuses what is no port."""
    if not 1 <= port <= 65535:
        raise ConfigError(f"the port is {port}; give one from 1 to 65535, such as 8702")


def check_names(sites: tuple[str, ...], host: str = SERVER_NAME) -> None:
    """Refuses names of sites that cannot be told from each other, from the server, or used in
    paths."""
    for name in sites:
        if name.lower() in (SERVER_NAME, host.lower()):
            raise ConfigError(f"a site is called {name!r}, as the server is: give it another name")
        if not SITE_NAME.fullmatch(name):
            raise ConfigError(
                f"a site is called {name!r}; use letters, digits, - and _, such as va-2"
            )
    if not sites or len(set(sites)) != len(sites):
        raise ConfigError(f"the sites are {list(sites)}; give at least one, each its own name")


def flare_missing() -> str | None:
    """The sentence for who has not installed the extra."""
    try:
        import nvflare  # noqa: F401
    except ImportError:
        return (
            "NVIDIA FLARE is not installed: pip install -c constraints.txt 'fedminimax[nvflare]' "
            "on each machine that takes part"
        )
    return None


def _flare(folder: Path, *arguments: Any) -> None:
    """A command of FLARE, which keeps its records in the folder and not in the user's home."""
    if missing := flare_missing():
        raise ConfigError(missing)
    command = [sys.executable, "-m", "nvflare.cli", *map(str, arguments)]
    home = folder.resolve() / "records"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        command, env={**os.environ, "HOME": str(home)}, capture_output=True, text=True
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ConfigError(f"nvflare {' '.join(command[3:5])}: {' '.join(said[:3])}")


def fingerprint(certificate: Path) -> str:
    """The SHA-256 hash of a certificate, as people compare it."""

    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    found = x509.load_pem_x509_certificate(certificate.read_bytes()).fingerprint(SHA256())
    return "SHA256:" + ":".join(f"{byte:02X}" for byte in found)


def _write_yaml(file: Path, table: dict[str, Any]) -> None:
    file.write_text(json.dumps(table), encoding="utf-8")  # JSON is YAML


def _write_json(file: Path, table: dict[str, Any]) -> None:
    write_bytes(file, (json.dumps(table, indent=2) + "\n").encode())
