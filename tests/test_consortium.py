"""Who is let into a consortium; what FLARE's own commands do is in test_flare.py."""

import json
import zipfile

import pytest

from fedminimax.cli import main
from fedminimax.deploy import consortium as module
from fedminimax.deploy.consortium import FOLDER, INVITATION, Consortium, approve, install, join

KNOWN = Consortium("consortium", ("hull", "york"), "localhost", 8702, True)
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


def test_a_kit_is_installed_where_the_request_was_made_and_once(folder, tmp_path):
    signed = request(folder)
    with pytest.raises(ValueError, match="install where the request was made"):
        install(tmp_path, KNOWN, signed)
    (tmp_path / "kit").mkdir()
    with pytest.raises(ValueError, match="kit already: delete it to install another"):
        install(tmp_path, KNOWN, signed)
