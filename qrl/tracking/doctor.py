"""What a store lacks: who gets in, versions, clocks, space and rights, a sentence for each."""

import calendar
import os
import tempfile
import time
from collections.abc import Callable, Iterator
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

from qrl import process, workspace
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
_TIMEOUT_S = 30  # of a request
_SEARCH = "/api/2.0/mlflow/experiments/search?max_results=1"  # which any user may do
_JOB = {"job_name": "optimize_prompts", "params": {}}  # lacks its parameters, so no job begins where jobs are on


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    about: str  # store, auth, network, jobs, versions, clock, space or rights
    level: str  # OK, ADVICE or LACKS
    sentence: str  # the state and, unless it is well, what to do


def examine(name: str | None = None) -> Iterator[Finding]:
    """Yield what holds and what is lacking for the store that MLFLOW_TRACKING_URI names.

    A tag of the experiment and of the registered model is set, and a file of the experiment written, read and deleted,
    since only an attempt shows a right. A store that does not exist is not made.

    Args:
        name: a registered model, to try the rights on it too; None: on the experiment alone.
    """
    yield from _check_packages()
    yield from _check_space(Path.cwd(), "where qrl works")
    yield from _find_stale_work()
    if not store.is_there():
        yield Finding("store", OK, "There is no store here yet: the first step makes mlflow.db and mlruns.")
        return

    address = mlflow.get_tracking_uri()
    is_server = urlsplit(address).scheme in ("http", "https")
    if is_server:
        with suppress(requests.RequestException):  # `prepare` reports a server that does not answer
            yield from _check_server(address.rstrip("/"))
    try:
        address = store.prepare()
    except QrlError as error:
        yield Finding("store", LACKS, str(error))
        return
    yield Finding("store", OK, f"The store {address} answers.")

    database = store.database_of(address)
    if database:
        yield from _check_database_file(database)
    elif not is_server:
        risk = "Whoever has this address may change everything: put `mlflow server --app-name basic-auth` before it"
        yield Finding("auth", ADVICE, f"{risk}, and give users the server's address.")
    yield from _check_newest_run()
    yield from _try_rights(name)


def _check_packages() -> Iterator[Finding]:
    pins = keys.pins()
    differing = []
    for package, pin in pins.items():
        release = installed(package)
        if (release or "").partition("+")[0] != pin:
            differing.append(f"{package} {release or 'missing'} instead of {pin}")
    if differing:
        listed = ", ".join(differing)
        yield Finding("versions", ADVICE, f"This environment has {listed}: results are of the pinned ones.")
    elif pins:
        yield Finding("versions", OK, f"All {len(pins)} pinned packages are installed.")


def _check_space(folder: Path, use: str) -> Iterator[Finding]:
    free = free_bytes(folder)
    sentence = f"{free / 1e9:.1f} GB are free at {folder}, {use}"
    if free < SPACE:
        yield Finding("space", LACKS, f"Only {sentence}: the default study needs {SPACE / 1e9:.0f} GB.")
    elif not os.access(folder, os.W_OK):
        yield Finding("space", LACKS, f"{folder}, {use}, cannot be written: go to a folder of your own.")
    else:
        yield Finding("space", OK, f"{sentence}.")


def _find_stale_work() -> Iterator[Finding]:
    """Yield the folders that stopped steps left to resume from, if nobody did for a day."""
    places = {WORK.resolve(), process.cache_folder().resolve()}  # the latter: of projects that MLflow fetched
    lasting = (fetched.FOLDER.name, workspace.LOCKS)
    folders = [path for place in places for path in place.glob("*") if path.is_dir() and path.name not in lasting]
    for folder in folders:
        with suppress(OSError):  # it is deleted meanwhile
            if time.time() - folder.stat().st_mtime > STALE_S:
                size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                remedy = "run its command again to resume, or delete the folder"
                yield Finding("space", ADVICE, f"{folder} of a stopped step holds {size / 1e9:.2g} GB: {remedy}.")


def _check_database_file(database: Path) -> Iterator[Finding]:
    """Yield who may change a database that is a file, and whether its disk fits."""
    if database.stat().st_mode & 0o022:
        yield Finding("auth", ADVICE, f"Other users of this machine may change {database}: chmod go-w it.")
    else:
        yield Finding("auth", OK, f"Only its owner may change {database}; several users need a server.")
    file_system = _file_system(database)
    if file_system.startswith(("nfs", "cifs", "smb", "fuse.sshfs")):
        message = f"{database} is on {file_system}, where SQLite's locks fail: use a server or a local disk."
        yield Finding("store", LACKS, message)
    yield from _check_space(database.parent, "where the store is")


def _file_system(path: Path) -> str:
    """Return the type of the file system that holds a path, such as `ext4`; empty if that is unknown."""
    import psutil

    type_by_mount = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    for parent in path.parents:  # the nearest first
        if str(parent) in type_by_mount:
            return type_by_mount[str(parent)]
    return ""


def _check_server(address: str) -> Iterator[Finding]:
    """Yield who gets in, over which network, what the server runs, its version and its clock."""
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    login = (user, os.environ.get("MLFLOW_TRACKING_PASSWORD", "")) if user else None
    get = partial(requests.get, timeout=_TIMEOUT_S)

    sent_at = time.time()
    # The time before and after bounds the moment at which the server read its clock.
    anonymous = requests.Request("GET", address + _SEARCH).prepare()
    response = requests.Session().send(anonymous, timeout=_TIMEOUT_S)  # `get` would read a login from .netrc
    received_at = time.time()
    yield _check_login(response)
    if urlsplit(address).scheme == "http" and urlsplit(address).hostname not in _LOCAL:
        risk = "Passwords and models pass the network unencrypted"
        yield Finding("network", LACKS, f"{risk}: put a proxy with TLS before the server and use its https address.")
    yield _check_hosts(get(address + _SEARCH, headers={"Host": "qrl-doctor.invalid"}, auth=login), address)
    yield _check_jobs(requests.post(f"{address}/ajax-api/3.0/jobs/", json=_JOB, auth=login, timeout=_TIMEOUT_S))
    yield _check_version(get(f"{address}/version", auth=login).text.strip())

    server_info = get(f"{address}/api/3.0/mlflow/server-info", auth=login)
    if server_info.ok and not server_info.json().get("multipart_uploads_enabled"):
        limit = "Every file passes through the server's temporary folder"
        yield Finding("space", ADVICE, f"{limit}: --artifacts-destination s3://… sends large ones past it.")

    date = parsedate(response.headers.get("Date", ""))
    if date:
        server_time = calendar.timegm(date)  # in whole seconds, so up to one second too early
        skew_s = max(sent_at - server_time - 1, server_time - received_at, 0)
        yield _check_skew(skew_s, f"The clocks of this machine and of the server are {skew_s:.0f} s apart")


def _check_login(response: requests.Response) -> Finding:
    """Return whether the server let a request without a user in."""
    if response.status_code in (401, 403):
        return Finding("auth", OK, "Nobody gets in without a user.")
    risk = "The server answers without a user, so whoever reaches it may change every run and version"
    return Finding("auth", LACKS, f"{risk}: start it with --app-name basic-auth.")


def _check_hosts(response: requests.Response, address: str) -> Finding:
    """Return whether the server refused a request that names another host, as a rebound DNS name would."""
    if response.status_code == 403 and "Host" in response.text:
        return Finding("network", OK, "Requests that name another host are refused.")
    risk = "The server answers requests for any host, so a web page that its users open may read it"
    return Finding("network", LACKS, f"{risk}: start it with --allowed-hosts {urlsplit(address).netloc}.")


def _check_jobs(response: requests.Response) -> Finding:
    """Return whether the server refused to run a job."""
    if response.status_code in (401, 403, 404, 405) or "not enabled" in response.text:
        return Finding("jobs", OK, "The server runs no jobs for its users.")
    risk = "The server runs jobs for its users, which qrl does not need"
    return Finding("jobs", LACKS, f"{risk}: start it with MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false.")


def _check_version(server_version: str) -> Finding:
    if server_version == mlflow.__version__:
        return Finding("versions", OK, f"Server and client are MLflow {server_version}.")
    both = f"The server is MLflow {server_version[:20]}, the client {mlflow.__version__}"
    return Finding("versions", ADVICE, f"{both}: qrl was tried with equal ones.")


def _check_newest_run() -> Iterator[Finding]:
    """Yield whether the newest run began in the future."""
    runs = mlflow.search_runs(
        order_by=["start_time DESC"], max_results=1, search_all_experiments=True, output_format="list"
    )
    if runs:
        ahead_s = runs[0].info.start_time / 1000 - time.time()
        if ahead_s > SKEW_S:
            message = f"The newest run began {ahead_s:.0f} s in the future, so this clock went back"
            yield _check_skew(ahead_s, message)


def _check_skew(skew_s: float, sentence: str) -> Finding:
    if skew_s <= SKEW_S:
        return Finding("clock", OK, f"{sentence}.")
    remedy = "the order of runs and of promotions would be wrong: set the clock, with NTP say"
    return Finding("clock", LACKS, f"{sentence}; {remedy}.")


def _try_rights(name: str | None) -> Iterator[Finding]:
    """Yield whether the user may write to the experiment, its artifacts and a registered model, by doing so."""
    client = mlflow.MlflowClient()
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    yield _try(
        "reading", "models of the registry can be listed", partial(client.search_registered_models, max_results=1)
    )

    experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
    label = f"the experiment {experiment_name}"
    try:
        experiment = client.get_experiment_by_name(experiment_name)
    except Exception as error:
        yield _denied(label, error)
        return
    if experiment is None:
        yield Finding(
            "rights", OK, f"There is no experiment {experiment_name} yet: whoever makes it has all rights on it."
        )
        return
    yield _try("writing", label, partial(client.set_experiment_tag, experiment.experiment_id, TAG, now))
    yield _try("writing", f"artifacts of {label}", partial(_write_artifact, str(experiment.artifact_location), now))
    if name:
        set_tag = partial(client.set_registered_model_tag, name, TAG, now)
        yield _try("writing", f"the registered model {name}", set_tag)


def _try(action: str, label: str, attempt: Callable[[], object]) -> Finding:
    try:
        attempt()
    except Exception as error:
        return _denied(label, error)
    return Finding("rights", OK, f"{action.capitalize()} works: {label}.")


def _denied(label: str, error: Exception) -> Finding:
    explained = store_errors.explain(error)
    sentence = str(explained) if explained else f"{first_line(error).rstrip('.')}."
    return Finding("rights", LACKS, f"{label[0].upper()}{label[1:]}: {sentence}")


def _write_artifact(location: str, text: str) -> None:
    """Write a small file among an experiment's artifacts, read it back and delete it."""
    if urlsplit(location).scheme == "s3" and find_spec("boto3") is None:
        raise BadInput(f"{location} needs the package boto3: install it here, or let the server pass files on.")
    repository = get_artifact_repository(location)
    folder = f"qrl-doctor-{os.getpid()}"
    with tempfile.TemporaryDirectory() as temporary:
        probe = Path(temporary) / "probe.txt"
        probe.write_text(text)
        repository.log_artifact(str(probe), folder)
        try:
            returned = Path(repository.download_artifacts(f"{folder}/probe.txt", temporary))
            if returned.read_text() != text:
                raise BadInput(f"A file written to {location} came back changed: look at the server's disk or proxy.")
        finally:
            repository.delete_artifacts(folder)
