"""What a store lacks: who gets in, versions, clocks, space and rights, a sentence for each."""

import calendar
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import mlflow
import requests
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from qrl.errors import BadInput, QrlError, first_line
from qrl.process import installed
from qrl.tracking import fetched, keys, store, store_errors
from qrl.workspace import WORK, free_bytes

OK, ADVICE, LACKS = "ok", "advice", "lacks"
TAG = "qrl.doctor"  # that `examine` sets, to see whether it may: the time
SPACE = 4e9  # bytes that the default study needs, rounded up
SKEW_S = 60  # between two clocks
STALE_S = 24 * 3600  # since a folder kept for a retry was used last
_LOCAL = ("localhost", "127.0.0.1", "::1")
_ANYONE = "/api/2.0/mlflow/experiments/search?max_results=1"
_JOB = {"job_name": "optimize_prompts", "params": {}}  # lacks its parameters, so no job begins where jobs are on


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    about: str  # store, auth, network, jobs, versions, clock, space or rights
    level: str  # OK, ADVICE or LACKS
    sentence: str  # what is so and, unless it is well, what to do


def examine(name: str | None = None) -> Iterator[Finding]:
    """Yield what holds and what is lacking for the store that MLFLOW_TRACKING_URI names.

    A tag of the experiment and of the registered model is set, and a file of the experiment written, read and deleted,
    since only an attempt shows a right. A store that does not exist is not made.

    Args:
        name: a registered model whose rights are tried; None: of the experiment alone.
    """
    yield from _packages()
    yield from _space(Path.cwd(), "where qrl works")
    yield from _left()
    if not store.is_there():
        yield Finding("store", OK, "There is no store here yet: the first step makes mlflow.db and mlruns.")
        return
    remote = urlsplit(address := mlflow.get_tracking_uri()).scheme in ("http", "https")
    with suppress(requests.RequestException):  # `prepare` tells that nobody answers
        yield from _server(address.rstrip("/")) if remote else ()
    try:
        address = store.prepare()
    except QrlError as error:
        yield Finding("store", LACKS, str(error))
        return
    yield Finding("store", OK, f"The store {address} answers.")
    if database := store.database_of(address):
        yield from _file(database)
    elif not remote:
        who = "Whoever has this address may change everything: put `mlflow server --app-name basic-auth` before it"
        yield Finding("auth", ADVICE, f"{who}, and give users the server's address.")
    yield from _newest()
    yield from _rights(name)


def _packages() -> Iterator[Finding]:
    pins = keys.pins()
    installed_now = {package: installed(package) for package in pins}
    other = [
        f"{package} {installed_now[package] or 'missing'} instead of {pin}"
        for package, pin in pins.items()
        if (installed_now[package] or "").partition("+")[0] != pin
    ]
    if other:
        yield Finding("versions", ADVICE, f"This environment has {', '.join(other)}: results are of the pinned ones.")
    elif pins:
        yield Finding("versions", OK, f"All {len(pins)} pinned packages are installed.")


def _space(folder: Path, what: str) -> Iterator[Finding]:
    free = free_bytes(folder)
    sentence = f"{free / 1e9:.1f} GB are free at {folder}, {what}"
    if free < SPACE:
        yield Finding("space", LACKS, f"Only {sentence}: the default study needs {SPACE / 1e9:.0f} GB.")
    elif not os.access(folder, os.W_OK):
        yield Finding("space", LACKS, f"{folder}, {what}, cannot be written: go to a folder of your own.")
    else:
        yield Finding("space", OK, f"{sentence}.")


def _left() -> Iterator[Finding]:
    """Yield the folders that stopped steps left to resume from, if nobody did for a day."""
    kept = [path for path in WORK.glob("*") if path.is_dir() and path.name != fetched.FOLDER.name]
    for path in kept:
        with suppress(OSError):  # it is deleted meanwhile
            if time.time() - path.stat().st_mtime > STALE_S:
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                todo = "run its command again to resume, or delete the folder"
                yield Finding("space", ADVICE, f"{path} of a stopped step holds {size / 1e9:.2g} GB: {todo}.")


def _file(database: Path) -> Iterator[Finding]:
    """Yield who may change a database that is a file, and whether its disk fits."""
    import psutil

    if database.stat().st_mode & 0o022:
        yield Finding("auth", ADVICE, f"Other users of this machine may change {database}: chmod go-w it.")
    else:
        yield Finding("auth", OK, f"Only its owner may change {database}; several users need a server.")
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    kind = next((mounts[str(path)] for path in database.parents if str(path) in mounts), "")
    if kind.startswith(("nfs", "cifs", "smb", "fuse.sshfs")):
        yield Finding(
            "store", LACKS, f"{database} is on {kind}, where SQLite's locks fail: use a server or a local disk."
        )
    yield from _space(database.parent, "where the store is")


def _server(address: str) -> Iterator[Finding]:
    """Yield who gets in, over which network, what the server runs, its version and its clock."""
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    login = (user, os.environ.get("MLFLOW_TRACKING_PASSWORD", "")) if user else None
    get = partial(requests.get, timeout=30)
    before = time.time()
    response = requests.Session().send(requests.Request("GET", address + _ANYONE).prepare(), timeout=30)  # no netrc
    after = time.time()
    if response.status_code in (401, 403):
        yield Finding("auth", OK, "Nobody gets in without a user.")
    else:
        open_ = "The server answers without a user, so whoever reaches it may change every run and version"
        yield Finding("auth", LACKS, f"{open_}: start it with --app-name basic-auth.")
    if urlsplit(address).scheme == "http" and urlsplit(address).hostname not in _LOCAL:
        plain = "Passwords and models pass the network unencrypted"
        yield Finding("network", LACKS, f"{plain}: put a proxy with TLS before the server and use its https address.")
    forged = get(address + _ANYONE, headers={"Host": "qrl-doctor.invalid"}, auth=login)
    if forged.status_code == 403 and "Host" in forged.text:
        yield Finding("network", OK, "Requests that name another host are refused.")
    else:
        forged_ = "The server answers requests for any host, so a web page that its users open may read it"
        yield Finding("network", LACKS, f"{forged_}: start it with --allowed-hosts {urlsplit(address).netloc}.")
    job = requests.post(f"{address}/ajax-api/3.0/jobs/", json=_JOB, auth=login, timeout=30)
    if job.status_code in (401, 403, 404, 405) or "not enabled" in job.text:
        yield Finding("jobs", OK, "The server runs no jobs for its users.")
    else:
        runs = "The server runs jobs for its users, which qrl does not need"
        yield Finding("jobs", LACKS, f"{runs}: start it with MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false.")
    version = get(f"{address}/version", auth=login).text.strip()
    if version == mlflow.__version__:
        yield Finding("versions", OK, f"Server and client are MLflow {version}.")
    else:
        both = f"The server is MLflow {version[:20]}, the client {mlflow.__version__}"
        yield Finding("versions", ADVICE, f"{both}: qrl was tried with equal ones.")
    direct = get(f"{address}/api/3.0/mlflow/server-info", auth=login)
    if direct.ok and not direct.json().get("multipart_uploads_enabled"):
        through = "Every file passes through the server's temporary folder"
        yield Finding("space", ADVICE, f"{through}: --artifacts-destination s3://… sends large ones past it.")
    if date := parsedate(response.headers.get("Date", "")):
        there = calendar.timegm(date)
        apart = max(before - there - 1, there - after, 0)
        yield _skew(apart, f"The clocks of this machine and of the server are {apart:.0f} s apart")


def _newest() -> Iterator[Finding]:
    """Yield whether the newest run began in the future."""
    runs = mlflow.search_runs(
        order_by=["start_time DESC"], max_results=1, search_all_experiments=True, output_format="list"
    )
    if runs:
        ahead = runs[0].info.start_time / 1000 - time.time()
        if ahead > SKEW_S:
            yield _skew(ahead, f"The newest run began {ahead:.0f} s in the future, so this clock went back")


def _skew(seconds: float, sentence: str) -> Finding:
    if seconds <= SKEW_S:
        return Finding("clock", OK, f"{sentence}.")
    wrong = "the order of runs and of promotions would be wrong: set the clock, with NTP say"
    return Finding("clock", LACKS, f"{sentence}; {wrong}.")


def _rights(name: str | None) -> Iterator[Finding]:
    """Yield whether the user may write to the experiment, its artifacts and a registered model, by doing so."""
    client, now = mlflow.MlflowClient(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    named = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
    yield _tried(
        "reading", "models of the registry can be listed", lambda: client.search_registered_models(max_results=1)
    )
    try:
        experiment = client.get_experiment_by_name(named)
    except Exception as error:
        yield _denied(f"the experiment {named}", error)
        return
    if experiment is None:
        yield Finding("rights", OK, f"There is no experiment {named} yet: whoever makes it has all rights on it.")
        return
    about = f"the experiment {named}"
    yield _tried("writing", about, lambda: client.set_experiment_tag(experiment.experiment_id, TAG, now))
    yield _tried("writing", f"artifacts of {about}", lambda: _write(str(experiment.artifact_location), now))
    if name:
        about = f"the registered model {name}"
        yield _tried("writing", about, lambda: client.set_registered_model_tag(name, TAG, now))


def _tried(what: str, about: str, attempt) -> Finding:
    try:
        attempt()
    except Exception as error:
        return _denied(about, error)
    return Finding("rights", OK, f"{what.capitalize()} works: {about}.")


def _denied(about: str, error: Exception) -> Finding:
    known = store_errors.explain(error)
    sentence = str(known) if known else f"{first_line(error).rstrip('.')}."
    return Finding("rights", LACKS, f"{about[0].upper()}{about[1:]}: {sentence}")


def _write(location: str, text: str) -> None:
    """Write a small file among an experiment's artifacts, read it back and delete it."""
    if urlsplit(location).scheme == "s3" and find_spec("boto3") is None:
        raise BadInput(f"{location} needs the package boto3: install it here, or let the server pass files on.")
    artifacts, folder = get_artifact_repository(location), f"qrl-doctor-{os.getpid()}"
    with tempfile.TemporaryDirectory() as here:
        (Path(here) / "probe.txt").write_text(text)
        artifacts.log_artifact(f"{here}/probe.txt", folder)
        try:
            if Path(artifacts.download_artifacts(f"{folder}/probe.txt", here)).read_text() != text:
                raise BadInput(f"A file written to {location} came back changed: look at the server's disk or proxy.")
        finally:
            artifacts.delete_artifacts(folder)
