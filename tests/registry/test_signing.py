"""Signatures of versions: made with real keys, verified at the gate, at load and at serve."""

import subprocess
import sys
import tomllib
from pathlib import Path

import mlflow
import pytest
from mlflow.artifacts import list_artifacts

import qrl
from qrl import recipe, registry
from qrl.errors import BadInput, GateRefused
from qrl.registry import signing, versions
from qrl.steps import promote as promoting
from qrl.steps import serve
from tests.registry.made import NAME

ROOT = Path(qrl.__file__).parents[1]


@pytest.fixture
def keys(tmp_path):
    """Return a folder with two private keys and their public ones, and a certificate of an authority for the first."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=tmp_path, check=True, capture_output=True)

    for name in ("team", "other"):
        openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.pem")
        openssl("ec", "-in", f"{name}.pem", "-pubout", "-out", f"{name}.pub")
        made = (
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-subj",
            f"/CN={name}",
        )
        openssl(*made, "-subj", f"/CN={name}", "-keyout", f"{name}-ca.pem", "-out", f"{name}-ca.crt")
    openssl("req", "-new", "-key", "team.pem", "-subj", "/CN=release", "-out", "request")
    (tmp_path / "uses").write_text("keyUsage=digitalSignature\n")
    signed_by = ("-CA", "team-ca.crt", "-CAkey", "team-ca.pem", "-CAcreateserial", "-extfile", "uses")
    openssl("x509", "-req", "-in", "request", *signed_by, "-out", "team.crt")
    return tmp_path


def promote(run_id: str, **fields: object) -> versions.Version:
    overrides = {"registered_name": NAME} | {f"promote.{key}": str(value) for key, value in fields.items()}
    promoting.promote(recipe.load(overrides=overrides), ["base"], [run_id], {"registered_name"})
    return registry.resolve(NAME, "base")


@pytest.mark.slow
@pytest.mark.process
def test_a_signed_version_is_loaded_and_any_other_is_refused(model_signing, keys, evaluated, capsys):
    run_id, _ = evaluated("base:full")
    with pytest.raises(GateRefused, match="has no signature"):
        promote(run_id, require_signature=keys / "team.pub")
    with pytest.raises(GateRefused, match="Key mismatch"):
        promote(run_id, require_signature=keys / "team.pub", sign_with=keys / "other.pem")
    with pytest.raises(BadInput, match="no version"):
        registry.resolve(NAME, "base")
    version = promote(run_id, sign_with=keys / "team.pem")
    address = mlflow.MlflowClient().get_model_version(NAME, "1").source
    assert signing.SIGNATURE in [file.path for file in list_artifacts(address)]
    folder = versions.verify(version)  # with the key that the decision records
    assert versions.verify(version, signing.load_public_key(str(keys / "team.pub"))) == folder
    with pytest.raises(GateRefused, match="Key mismatch"):
        versions.verify(version, signing.load_public_key(str(keys / "other.pub")))
    with pytest.raises(GateRefused, match="does not verify"):
        versions.verify(version, signing.load_public_key(str(keys / "team-ca.crt")))
    promote(run_id, require_signature=keys / "team.pub")  # it is signed already
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(folder)]  # as somebody else would use it
    command += ["--public_key", str(keys / "team.pub"), "--signature", str(folder.parent / signing.SIGNATURE)]
    environment = {"PYTHONPATH": sys.path[-1]}
    own = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert own.returncode == 0, own.stderr
    settings = recipe.load(overrides={"registered_name": NAME, "promote.require_signature": str(keys / "other.pub")})
    _, served = serve.check_stage(settings, "base", host="127.0.0.1", port=0)
    with pytest.raises(GateRefused, match="Key mismatch"):
        served.verify()
    (folder / "README.md").write_text("outside the digest, but signed")
    with pytest.raises(GateRefused, match="Signature mismatch"):
        qrl.load(NAME, "base", device="cpu")
    (folder / "README.md").unlink()
    (folder.parent / signing.SIGNATURE).write_text("[" * 100_000)
    with pytest.raises(GateRefused, match="does not verify"):
        versions.verify(version)
    (folder.parent / signing.SIGNATURE).unlink()
    with pytest.raises(GateRefused, match="has no signature"):
        versions.verify(version)


@pytest.mark.slow
@pytest.mark.process
def test_a_certificate_signs_for_its_authority(model_signing, keys, evaluated):
    run_id, _ = evaluated("base:full")
    chain = ",".join(str(keys / name) for name in ("team.pem", "team.crt", "team-ca.crt"))
    version = promote(run_id, sign_with=chain, require_signature=keys / "team-ca.crt")
    versions.verify(version)
    with pytest.raises(GateRefused, match="does not verify"):
        versions.verify(version, signing.load_public_key(str(keys / "other-ca.crt")))
    promote(evaluated("base:full", changed="again")[0], sign_with=chain)
    with pytest.raises(GateRefused, match="does not verify"):
        registry.rollback(NAME, "base", signing.load_public_key(str(keys / "other-ca.crt")))
    assert registry.rollback(NAME, "base").version == 1


@pytest.mark.process
@pytest.mark.parametrize(
    "wrong", ["sign_with=team.pub", "sign_with=no", "sign_with=/dev/zero", "require_signature=team.pem"]
)
def test_a_wrong_key_is_bad_input(model_signing, keys, wrong):
    field, _, file = wrong.partition("=")
    settings = recipe.load(overrides={f"promote.{field}": str(keys / file)})
    with pytest.raises(BadInput, match=rf"{file}.*give"):
        signing.load_keys(settings.promote)


def test_without_the_library_a_sentence_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "key.pub").write_text("any")
    monkeypatch.setitem(sys.modules, "model_signing.verifying", None)
    with pytest.raises(BadInput, match=r"uv pip install .* model-signing==1\.1\.1 pyopenssl"):
        signing.load_public_key(str(tmp_path / "key.pub"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tuple(project["optional-dependencies"]["signing"]) == signing.PACKAGES
