"""A real Slurm on this machine, without systemd: munged, slurmctld and two slurmd in a folder of their own."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db")
NODES = ("n1", "n2")
CONF = """
ClusterName=test
SlurmctldHost={host}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
{accounting}
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
ReturnToService=1
KillWait=5
MinJobAge={keep}
MaxJobCount={most}
FirstJobId={first}
SlurmdTimeout={patience}
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,requeue_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PreemptExemptTime=0
{nodes}
PartitionName=cpu Nodes=ALL Default=YES MaxTime=60 PriorityTier=1
PartitionName=gpu Nodes=ALL MaxTime=60 PriorityTier=10
"""
DBD_CONF = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost={host}
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=root
StorageLoc=slurm
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
"""
WITHOUT = "AccountingStorageType=accounting_storage/none"
WITH = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={host}
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket"""


def missing(*, accounting: bool = False) -> str:
    """Return why no Slurm can be started here; empty where one can."""
    wanted = (*PROGRAMS, *ACCOUNTING) if accounting else PROGRAMS
    lost = [name for name in wanted if not shutil.which(name, path=_PATH)]
    if lost:
        return f"{', '.join(lost)} not installed: apt-get install slurm-wlm munge slurmdbd mariadb-server"
    return "" if os.geteuid() == 0 else "slurmd is started as root"


_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


class Slurm:
    """A cluster of two nodes, both this machine, with the partitions cpu and gpu; gpu preempts cpu."""

    def __init__(self, *, keep: int = 300, most: int = 10_000, patience: int = 300, accounting: bool = False) -> None:
        """Start it.

        Args:
            keep: seconds for which the controller remembers a job that ended.
            most: jobs that the controller holds at a time, one less to be exact.
            patience: seconds after which a node that does not answer is down.
            accounting: with slurmdbd, on a MariaDB of its own.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)
        self.processes: dict[str, subprocess.Popen] = {}
        own, host = ports(3 + len(NODES)), socket.gethostname().split(".")[0]
        database, dbd = own[-2:]
        what = f"NodeHostname={host} CPUs={os.cpu_count()} RealMemory=2000 Gres=gpu:1 State=UNKNOWN"
        nodes = "\n".join(f"NodeName={name} Port={port} {what}" for name, port in zip(NODES, own[1:-2], strict=True))
        kept = WITH.format(host=host, port=dbd, folder=self.folder) if accounting else WITHOUT
        # Clusters of other tests run beside this one. No two share a job's id, by which its processes are found, nor
        # its rest by 1000, from which a training over several nodes takes its port.
        first = 1000 * own[0] + own[0] % 500
        limits = {"keep": keep, "most": most, "patience": patience, "first": first}
        conf = CONF.format(host=host, folder=self.folder, port=own[0], nodes=nodes, accounting=kept, **limits)
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "gres.conf").write_text(f"NodeName={','.join(NODES)} Name=gpu File=/dev/null\n")
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _PATH}
        files = {name: self.folder / f"munge.{name}" for name in ("socket", "log", "pid", "seed")}
        self._start(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={files['socket']}",
            f"--log-file={files['log']}", f"--pid-file={files['pid']}", f"--seed-file={files['seed']}",
        )  # fmt: skip
        self._until(files["socket"].exists, "munged")
        if accounting:
            self._account(DBD_CONF.format(host=host, folder=self.folder, port=dbd, database=database), database)
        self._start("slurmctld", "-D")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node, name=node)
        self._until(self._idle, "the nodes")

    def run(self, *words: str) -> str:
        """Return what a command of Slurm prints."""
        environment = os.environ | self.environment
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False).stdout

    def report(self) -> str:
        """Return how nodes and jobs stand, and the last lines of the controller's log."""
        log = (self.folder / "slurmctld.log").read_text(errors="replace")
        return "\n".join(
            (self.run("sinfo", "-N", "-l"), self.run("scontrol", "show", "job", "--oneliner"), log[-2000:])
        )

    def crash(self, node: str) -> None:
        """Kill a node's slurmd and the daemons of its steps, which leaves the jobs' own processes without a parent."""
        daemons = [self.processes[node].pid, *_writers(self.folder / f"slurmd-{node}.log")]
        for pid in daemons:
            os.kill(pid, signal.SIGSTOP)  # else a daemon that lives reports that another has died
        for pid in daemons:
            os.kill(pid, signal.SIGKILL)
        self.processes[node].wait()

    def start_node(self, node: str, *, blind: Path | None = None) -> None:
        """Start a node's slurmd again, once it has been killed or, if it runs, ended.

        Args:
            node: its name.
            blind: a folder in whose place the node has an empty one of its own, as if it did not mount it.
        """
        if (running := self.processes[node]).poll() is None:
            running.terminate()
            running.wait()
        hidden = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(blind))
        self._start(*(hidden if blind else ()), "slurmd", "-D", "-N", node, name=node)
        self._until(lambda: self._idle(node), node)

    def stop(self) -> None:
        """End all daemons and jobs, and delete the folder."""
        self.run("scancel", "--user=root")
        self._until(lambda: not self.run("squeue", "-h").strip(), "the jobs' end", must=False)
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _idle(self, *nodes: str) -> bool:
        """Return whether nodes can take jobs; without names, all."""
        idle = self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", "-p", "cpu", "--responding").split()
        return set(nodes or NODES) <= set(idle)

    def _account(self, settings: str, port: int) -> None:
        data = self.folder / "database"
        self.run("mariadb-install-db", "--user=root", f"--datadir={data}", "--auth-root-authentication-method=normal")
        own = [f"--datadir={data}", f"--socket={data}/socket", f"--pid-file={data}/pid", f"--port={port}"]
        self._start("mariadbd", "--no-defaults", "--user=root", "--bind-address=127.0.0.1", "--skip-grant-tables", *own)
        (self.folder / "slurmdbd.conf").write_text(settings)
        (self.folder / "slurmdbd.conf").chmod(0o600)  # as slurmdbd demands
        self._until((data / "socket").exists, "mariadbd")
        self._start("slurmdbd", "-D")
        self._until(lambda: self.run("sacctmgr", "-i", "add", "cluster", "test"), "slurmdbd")

    def _start(self, *words: str, name: str = "") -> None:
        log = (self.folder / f"{name or words[0]}.out").open("w")
        how = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        self.processes[name or words[0]] = subprocess.Popen(words, env=os.environ | self.environment, **how)

    def _until(self, done, what: str, *, must: bool = True) -> None:
        for _ in range(300):
            if done():
                return
            time.sleep(0.1)
        if must:
            logs = "\n".join(path.read_text()[-800:] for path in self.folder.glob("*.out"))
            self.stop()
            raise RuntimeError(f"Slurm: {what} did not come up in 30 s.\n{logs}")


def _writers(log: Path) -> list[int]:
    """Return the step daemons of the node that has this log; nothing else tells which node they belong to."""
    daemons = [each for each in psutil.process_iter(["name"]) if each.info["name"] == "slurmstepd"]
    return [each.pid for each in daemons if str(log) in {file.path for file in each.open_files()}]


def ports(count: int) -> list[int]:
    """Return ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("", 0))
    found = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return found
