"""Who is let into a consortium; what FLARE's own commands do is in test_flare.py."""

import json
import zipfile
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

import pytest

from fedminimax.cli import main
from fedminimax.remote import consortium as module
from fedminimax.remote.consortium import (
    FOLDER,
    INVITATION,
    Consortium,
    approve,
    check_date,
    init,
    install,
    join,
)

FINGERPRINT = "SHA256" + ":AB" * 32
KNOWN = Consortium("consortium", ("hull", "york"), "localhost", 8702, True, FINGERPRINT)
HULL = {"name": "hull", "cert_type": "client", "cert_role": None, "public_key_sha256": "ab12"}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "consortium"
    made.mkdir()
    KNOWN.write(made / FOLDER)
    KNOWN.write(made / INVITATION)
    return made


def request(folder, file="hull", **changes):
    path = folder / f"{file}.request.zip"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("request.json", json.dumps(HULL | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "eve"}, "is of 'eve', which is not a site of this consortium"),
        ({"name": "york"}, "is a request of 'york'.*do not sign it"),
        ({"file": "york"}, "is a request of 'hull'.*do not sign it"),
        ({"cert_type": "server"}, "of the type 'server'"),
        ({"cert_type": "project_admin", "cert_role": "project_admin"}, "'project_admin'"),
        ({"cert_role": "lead"}, "the role 'lead'"),
        ({"name": ["hull"]}, "is not a request of `deploy join`"),
    ],
)
def test_only_a_site_s_request_for_its_own_certificate_is_signed(folder, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        approve(folder, request(folder, **changes))
    assert not (folder / "approved").exists()


def test_a_file_that_is_no_request_is_refused(folder):
    with pytest.raises(ValueError, match="there is no file"):
        approve(folder, folder / "hull.request.zip")
    (folder / "hull.request.zip").write_text("nothing")
    with pytest.raises(ValueError, match="is not a request of `deploy join`"):
        approve(folder, folder / "hull.request.zip")
    with zipfile.ZipFile(folder / "hull.request.zip", "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("request.json", " " * 10_000_000)
    with pytest.raises(ValueError, match=r"its request.json unpacks to 10000000 bytes"):
        approve(folder, folder / "hull.request.zip")


def test_the_hash_of_the_key_is_printed_for_the_telephone(folder, monkeypatch, capsys):
    signed = []
    monkeypatch.setattr(module, "_flare", lambda *arguments: signed.append(arguments))
    assert main(["deploy", "approve", str(folder), str(request(folder))]) == 0
    assert len(signed) == 1
    assert "compare by telephone, before you send it: SHA256:ab12" in capsys.readouterr().out


def test_who_has_joined_is_told_what_to_delete_to_join_again(folder, tmp_path):
    (tmp_path / "hull" / "kit").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"delete .*hull/request and .*hull/kit to join again"):
        join(tmp_path / "hull", folder / INVITATION, "hull")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fingerprint": ""}, "the fingerprint of the authority in .* is ''; without one"),
        ({"fingerprint": "SHA256:AB"}, "is 'SHA256:AB'; without one"),
        ({"fingerprint": None}, "cannot be used: the consortium fingerprint is None"),
        ({"sites": "hull"}, "cannot be used: the consortium sites is 'hull'"),
        ({"host": 5}, "cannot be used: the consortium host is 5"),
        ({"port": "8702"}, "cannot be used: the consortium port is '8702'"),
        ({"port": 0}, "cannot be used: the port is 0"),
        ({"encrypted": "no"}, "cannot be used: the consortium encrypted is 'no'"),
        ({"key": "mine"}, "cannot be used: the consortium has no key 'key'"),
    ],
)
def test_an_invitation_that_names_no_authority_or_is_none_is_refused(changes, sentence, tmp_path):
    file = tmp_path / INVITATION
    file.write_text(json.dumps(asdict(KNOWN) | changes))
    with pytest.raises(ValueError, match=sentence):
        join(tmp_path / "hull", file, "hull")
    assert not (tmp_path / "hull").exists()


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff\xfe"])
def test_a_file_that_is_no_invitation_is_refused(content, tmp_path):
    (tmp_path / INVITATION).write_bytes(content)
    with pytest.raises(ValueError, match=r"invitation.json cannot be used: "):
        join(tmp_path / "hull", tmp_path / INVITATION, "hull")


@pytest.mark.parametrize("port", [0, 99999, -1])
def test_a_port_that_is_none_is_refused_before_anything_is_made(port, tmp_path):
    with pytest.raises(ValueError, match=f"the port is {port}; give one from 1 to 65535"):
        init(tmp_path / "consortium", ("hull",), port=port)
    assert not (tmp_path / "consortium").exists()


@pytest.mark.parametrize("name", ["server", "Server", "localhost", "hub"])
def test_no_site_has_a_name_of_the_server(name, tmp_path):
    host = "hub" if name == "hub" else "localhost"
    with pytest.raises(ValueError, match=f"a site is called '{name}', as the server is"):
        init(tmp_path / "consortium", ("hull", name), host)
    assert not (tmp_path / "consortium").exists()


def test_what_a_failed_init_has_made_is_taken_away(tmp_path, monkeypatch):
    def fails(folder, *arguments):
        (folder / "authority").mkdir()
        (folder / "authority" / "rootCA.key").touch()
        raise ValueError("no space left")

    monkeypatch.setattr(module, "_flare", fails)
    new, old = tmp_path / "new", tmp_path / "old"
    old.mkdir()
    (old / "allow.toml").touch()
    for _ in range(2):
        for folder in (new, old):
            with pytest.raises(ValueError, match="no space left"):
                init(folder, ("hull",))
    assert not new.exists()
    assert [path.name for path in old.iterdir()] == ["allow.toml"]


def test_an_init_that_was_killed_is_told_from_a_consortium(tmp_path):
    (tmp_path / "authority").mkdir()
    with pytest.raises(ValueError, match=r"delete .* of a `deploy init` that was killed"):
        init(tmp_path, ("hull",))
    assert (tmp_path / "authority").exists()


def certificate(begins, ends):
    """One that signs itself."""
    x509 = pytest.importorskip("cryptography.x509", reason="pip install 'fedminimax[nvflare]'")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding

    key, name = Ed25519PrivateKey.generate(), x509.Name([])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, begins, ends)
    return made.sign(key, None).public_bytes(Encoding.PEM)


def test_a_certificate_is_not_used_after_its_time_nor_before(tmp_path):
    file, now, day = tmp_path / "client.crt", datetime.now(UTC), timedelta(days=1)
    file.write_bytes(certificate(now - day, now + day))
    check_date(file, "join again")
    for begins, ends in ((now - 9 * day, now - day), (now + day, now + 9 * day)):
        file.write_bytes(certificate(begins, ends))
        told = f"is good from {begins:%Y-%m-%d} .* to {ends:%Y-%m-%d} .* join again"
        with pytest.raises(ValueError, match=told):
            check_date(file, "join again")


def test_a_kit_is_installed_where_the_request_was_made_and_once(folder, tmp_path):
    signed = request(folder)
    with pytest.raises(ValueError, match="install where the request was made"):
        install(tmp_path, KNOWN, signed)
    (tmp_path / "kit").mkdir()
    with pytest.raises(ValueError, match="kit already: delete it to install another"):
        install(tmp_path, KNOWN, signed)
