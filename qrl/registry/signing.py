"""Signatures of versions by OpenSSF's model-signing: whoever may write to the store, only a key's holder can make one.

`model.sig` is stored next to a version's checkpoint, outside the digest, and covers every file of the checkpoint.
model-signing's own command verifies it too. A gate's decision records the key or certificate that it verified with.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

from qrl.errors import BadInput, GateRefused, first_line
from qrl.files import reading
from qrl.recipe.sections import Promote

SIGNATURE = "model.sig"
PACKAGES = (
    "model-signing==1.1.1",
    "pyopenssl==26.4.0",
)  # the extra `signing`; the first imports the second without declaring it


@dataclass(frozen=True)
class SigningKeys:
    """What signs versions, and what their signatures are verified with."""

    signer: Any | None  # of model-signing; None: nothing is signed
    public_key: str  # text of a public key or certificate; empty: no signature is required


def load_keys(settings: Promote) -> SigningKeys:
    """Return the keys that a recipe names.

    Raises:
        BadInput: a file cannot be read or does not hold what it should, or model-signing is not installed.
    """
    signer, own_key = None, ""
    if settings.sign_with:
        signer, own_key = _signer(*settings.sign_with)
    return SigningKeys(signer, load_public_key(settings.require_signature) or own_key)


def load_public_key(path: str) -> str:
    """Return the text of a file with a public key or certificate; "" without a path. Raises BadInput as `load_keys`."""
    if not path:
        return ""
    text = reading.read_bytes(Path(path), reading.MIB).decode(errors="replace")
    library = _library("verifying")
    try:
        _verifier(library, text)
    except Exception as error:  # of several libraries
        message = f"promote.require_signature is {path}, which cannot verify a signature ({first_line(error)})"
        raise BadInput(f"{message}: give a public key of P-256, P-384 or P-521, or a certificate, as PEM.") from None
    return text


def sign(label: str, uri: str, folder: Path, signer: Any, public_key: str) -> None:
    """Sign a version's checkpoint, and store the signature if it verifies.

    Args:
        label: how errors call the version.
        uri: "models:/name/3".
        folder: that holds its checkpoint.
        signer, public_key: from `load_keys`.

    Raises:
        GateRefused: the key that signs is not the one that is required.
    """
    with TemporaryDirectory() as temporary:
        signature = Path(temporary, SIGNATURE)
        signer.sign(folder, signature)
        _check(label, folder, signature, public_key)
        _artifacts(uri).log_artifact(str(signature))


def verify(label: str, uri: str, folder: Path, public_key: str) -> None:
    """Check that a version's signature verifies with a key or certificate, and covers exactly the files in its folder.

    Arguments are those of `sign`.

    Raises:
        GateRefused: there is no signature, or it does not verify.
        BadInput: model-signing is not installed.
    """
    artifacts = _artifacts(uri)
    if not any(file.path == SIGNATURE for file in artifacts.list_artifacts()):
        raise GateRefused(f"{label} has no signature: promote it again with promote.sign_with.")
    with TemporaryDirectory() as temporary:
        signature = Path(artifacts.download_artifacts(SIGNATURE, temporary))
        _check(label, folder, signature, public_key)


def _check(label: str, folder: Path, signature: Path, public_key: str) -> None:
    library = _library("verifying")
    try:
        reading.check_regular_file(signature, 64 * reading.MIB)
        _verifier(library, public_key).verify(folder, signature)
    except Exception as error:  # of several libraries, on a file that anybody may have written
        reason = first_line(error) if isinstance(error, ValueError) else "another key made it, or it was edited"
        message = f"The signature of {label} does not verify ({reason.rstrip('. ')[:300]})"
        raise GateRefused(f"{message}: promote it again with the key that is required.") from None


def _verifier(library: Any, public_key: str) -> Any:
    """Return what verifies with a public key or a certificate, given as the text of its file."""
    with TemporaryDirectory() as temporary:
        path = Path(temporary, "signer.pem")
        path.write_text(public_key)
        if "BEGIN CERTIFICATE" in public_key:
            return library.Config().use_certificate_verifier(certificate_chain=[path])
        return library.Config().use_elliptic_key_verifier(public_key=path)


def _signer(key: str, *chain: str) -> tuple[Any, str]:
    """Return what signs with a private key, and the text that verifies it: the public key, or the last certificate."""
    from cryptography.hazmat.primitives import serialization as pem

    config = _library("signing").Config()
    try:
        for path in (key, *chain):
            reading.check_regular_file(Path(path), reading.MIB)
        if chain:
            signer = config.use_certificate_signer(
                private_key=key, signing_certificate=chain[0], certificate_chain=chain[1:] or chain
            )
            return signer, Path(chain[-1]).read_text()
        public_key = pem.load_pem_private_key(Path(key).read_bytes(), None).public_key()
        text = public_key.public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo).decode()
        return config.use_elliptic_key_signer(private_key=key), text
    except Exception as error:  # of several libraries
        message = f"promote.sign_with is {','.join((key, *chain))}, which cannot sign ({first_line(error)})"
        kind = "an unencrypted private key of P-256, P-384 or P-521 as PEM"
        raise BadInput(
            f"{message}: give {kind}, or KEY,CERTIFICATE,… with the certificates that vouch for it."
        ) from None


def _artifacts(version_uri: str) -> ArtifactRepository:
    return get_artifact_repository(str(ModelsArtifactRepository.get_underlying_uri(version_uri)))


def _library(name: str) -> Any:
    try:
        return import_module(f"model_signing.{name}")
    except ImportError as error:
        message = f"Signatures need OpenSSF's model-signing, which this environment lacks ({error})"
        raise BadInput(f"{message}: run `uv pip install --python {sys.executable} {' '.join(PACKAGES)}`.") from None
