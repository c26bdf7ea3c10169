"""A team's store on this machine: MLflow's server with basic auth, on PostgreSQL and an S3 server.

PostgreSQL is the machine's own; the S3 server is moto's, in a process of its own. uv installs both servers' packages.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import requests

from tests.ports import free_port

ADMIN = ("admin", "only-for-tests-1234")
BUCKET = "team"
DRIVER = "psycopg2-binary==2.9.12"
SERVER = ("--from", "mlflow==3.17.2", "--with", "Flask-WTF==1.3.0", "--with", DRIVER)
SERVER += ("--with", "boto3==1.44.5")
S3 = ("--from", "moto[server]==5.2.5")
S3_ACCOUNT = {"AWS_ACCESS_KEY_ID": "S3RVER", "AWS_SECRET_ACCESS_KEY": "S3RVER"}  # s3rver's; moto takes any
WAIT_S = 180
# Of every server that we start: no process of its own for jobs, and nothing in an artifact is executed.
SAFE = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}


def postgres() -> Path | None:
    """Return the folder of PostgreSQL's programs, or None where it is not installed."""
    found = [path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))]
    on_path = shutil.which("initdb")
    return found[-1] if found else Path(on_path).resolve().parent if on_path else None


@contextlib.contextmanager
def serving(
    folder: Path, *, auth: bool = True, jobs: bool = False, allowed: bool = True, s3: str = ""
) -> Iterator[str]:
    """Yield the address of a server on a database and a bucket of its own; all end with the block.

    Args:
        folder: for logs and MLflow's own files.
        auth: users and passwords; MLflow then gives a user no right that nobody granted.
        jobs: leave MLflow's job execution on, as it is by default.
        allowed: allow requests to this very address only.
        s3: address of an S3 server that runs already; default: one of its own.
    """
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(database_server())
        if not s3:
            s3 = f"http://127.0.0.1:{(port := free_port())}"
            command = ["uvx", *S3, "moto_server", "-H", "127.0.0.1", "-p", str(port)]
            stack.enter_context(process(folder / "s3.log", command))
        _await(s3)
        requests.put(f"{s3}/{BUCKET}", timeout=30).raise_for_status()
        at = f"127.0.0.1:{(port := free_port())}"
        variables = {"MLFLOW_S3_ENDPOINT_URL": s3, **S3_ACCOUNT}
        variables |= SAFE | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": str(jobs).lower(), "AWS_DEFAULT_REGION": "us-east-1"}
        command = ["uvx", *SERVER, "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        command += ["--backend-store-uri", f"{database}/mlflow", "--artifacts-destination", f"s3://{BUCKET}"]
        if auth:
            settings = {"default_permission": "NO_PERMISSIONS", "database_uri": f"{database}/auth"}
            settings |= {"admin_username": ADMIN[0], "admin_password": ADMIN[1]}
            settings["auth_cache_ttl_seconds"] = "60"  # else every request hashes a password
            settings["authorization_function"] = "mlflow.server.auth:authenticate_request_basic_auth"
            lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
            (folder / "auth.ini").write_text(f"[mlflow]\n{lines}")
            variables |= {"MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"), "MLFLOW_FLASK_SERVER_SECRET_KEY": "s"}
            command += ["--app-name", "basic-auth"]
        command += ["--allowed-hosts", at if allowed else "*"]
        stack.enter_context(process(folder / "server.log", command, variables, cwd=folder))
        _await(f"http://{at}/health")
        yield f"http://{at}"


def add_user(server: str, name: str, password: str) -> None:
    """Make a user without any right."""
    body = {"username": name, "password": password}
    requests.post(f"{server}/api/2.0/mlflow/users/create", json=body, auth=ADMIN, timeout=60).raise_for_status()


def grant(server: str, by: tuple[str, str], name: str, right: str, kind: str, resource: str) -> None:
    """Give a user a right, READ or EDIT, on an `experiment` by id or on a `registered_model` by name."""
    body = {"username": name, "permission": right, "resource_type": kind, "resource_id": resource}
    address = f"{server}/api/3.0/mlflow/users/permissions/grant"
    requests.post(address, json=body, auth=by, timeout=60).raise_for_status()


def experiment(server: str, who: tuple[str, str], name: str) -> str:
    """Return the id of an experiment."""
    address = f"{server}/api/2.0/mlflow/experiments/get-by-name"
    answer = requests.get(address, params={"experiment_name": name}, auth=who, timeout=60)
    return answer.json()["experiment"]["experiment_id"]


def login(server: str, name: str = "", password: str = "") -> dict[str, str]:
    """Return the environment variables with which a user reaches the server."""
    who = {"MLFLOW_TRACKING_USERNAME": name, "MLFLOW_TRACKING_PASSWORD": password} if name else {}
    return {"MLFLOW_TRACKING_URI": server} | who


@contextlib.contextmanager
def database_server() -> Iterator[str]:
    """Yield the address of a PostgreSQL server of its own; root runs it as the user postgres, as it demands."""
    programs, port = postgres(), free_port()
    user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if user:
            shutil.chown(folder, "postgres")

        def run(program: str, *options: str) -> None:
            subprocess.run([*user, programs / program, *options], check=True, cwd=folder, stdout=subprocess.DEVNULL)

        run("initdb", "-D", f"{folder}/data", "-A", "trust", "-U", "team", "--no-sync")
        listen = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        run("pg_ctl", "-D", f"{folder}/data", "-w", "-l", f"{folder}/log", "-o", listen, "start")
        try:
            for name in ("mlflow", "auth"):
                run("createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "team", name)
            yield f"postgresql+psycopg2://team@127.0.0.1:{port}"
        finally:
            run("pg_ctl", "-D", f"{folder}/data", "-m", "immediate", "stop")


@contextlib.contextmanager
def process(log: Path, command: list[str], more: Mapping[str, str] | None = None, cwd: Path | None = None) -> Iterator:
    """Yield a process that writes to a log and ends with the block, its children too."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW")} | dict(more or {})
    with log.open("w") as output:
        running = subprocess.Popen(
            command, env=environment, cwd=cwd, stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield running
        finally:
            os.killpg(running.pid, 15)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, 9)


def _await(address: str) -> None:
    until = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(requests.RequestException):
            if requests.get(address, timeout=5).status_code < 500:
                return
        if time.monotonic() > until:
            raise TimeoutError(f"{address} does not answer; see the logs beside it.")
        time.sleep(0.3)
