"""Kafka's jars: fetched by jgo from Maven Central into the user's cache and checked against `kafka.jars.lock`.
Run as a program (`python -m infra.local.jars`) it resolves the version again and prints a new lock file."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from infra.local.part import PartError, Say

KAFKA = "org.apache.kafka:kafka_2.13:4.3.1"
# Resolved apart: beside Kafka in one request, its dependency management would pull Kafka's own jars down.
LOGGING = "org.slf4j:slf4j-simple:1.7.36"
LOCK_FILE = Path(__file__).with_name("kafka.jars.lock")
_PARALLEL_DOWNLOADS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedJar:
    """A jar by Maven coordinate (`group:artifact:version`) and the hex SHA-256 its bytes must have."""

    coordinate: str
    sha256: str


def read_lock(text: str) -> list[LockedJar]:
    """Parse the lock file: one `<sha256>  <coordinate>` per line. Raises ValueError naming a bad line."""
    jars = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = line.split()
        if len(fields) != 2 or len(fields[0]) != 64 or fields[1].count(":") != 2:
            raise ValueError(f"line {number}: expected '<sha256>  group:artifact:version', got {line!r}")
        jars.append(LockedJar(sha256=fields[0], coordinate=fields[1]))
    return jars


def cache_folder() -> Path:
    """Return the folder that keeps jars across checkouts: `$XDG_CACHE_HOME`, else `~/.cache`."""
    configured = os.environ.get("XDG_CACHE_HOME")
    return (Path(configured) if configured else Path.home() / ".cache") / "inferlog" / "maven"


def fetch(say: Say, *, cache: Path | None = None, lock: Sequence[LockedJar] | None = None) -> list[Path]:
    """Return the paths of all locked jars, each verified; download those the cache lacks.

    Raises PartError naming the jar when one cannot be fetched or its bytes are not the locked ones.
    """
    cache = cache or cache_folder()
    jars = list(lock) if lock is not None else read_lock(LOCK_FILE.read_text())
    paths = {jar: cache / _relative_path(jar.coordinate) for jar in jars}
    missing = [jar for jar, path in paths.items() if _sha256(path) != jar.sha256]
    if missing:
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(cache):
            # Another `up` may have fetched them while this one waited; a wrong or half file is fetched anew.
            missing = [jar for jar in missing if _sha256(paths[jar]) != jar.sha256]
            for jar in missing:
                paths[jar].unlink(missing_ok=True)
            _download(missing, cache, say)
    return list(paths.values())


def _download(jars: Sequence[LockedJar], cache: Path, say: Say) -> None:
    started, size_bytes = time.monotonic(), 0
    say(f"downloading {len(jars)} jars of {KAFKA} into {cache}")
    with ThreadPoolExecutor(_PARALLEL_DOWNLOADS) as pool:
        running = {pool.submit(_download_one, jar, cache): jar for jar in jars}
        for count, done in enumerate(as_completed(running), start=1):
            try:
                size_bytes += done.result()
            except Exception as error:
                pool.shutdown(cancel_futures=True)
                raise PartError(f"cannot fetch {running[done].coordinate}: {error}") from error
            if count % 10 == 0 or count == len(jars):
                took_s = time.monotonic() - started
                say(f"downloaded {count}/{len(jars)} jars, {size_bytes / 1e6:.0f} MB, {took_s:.1f} s")


def _download_one(jar: LockedJar, cache: Path) -> int:
    from jgo.maven import MavenContext

    group, artifact, version = jar.coordinate.split(":")
    context = MavenContext(repo_cache=cache, timeout=30)
    path = Path(context.project(group, artifact).at_version(version).artifact().resolve())
    found = _sha256(path)
    if found != jar.sha256:
        path.unlink()
        raise PartError(f"its SHA-256 is {found}, the lock file says {jar.sha256}")
    return path.stat().st_size


def _relative_path(coordinate: str) -> Path:
    group, artifact, version = coordinate.split(":")
    return Path(*group.split("."), artifact, version, f"{artifact}-{version}.jar")


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _alone(cache: Path) -> Iterator[None]:
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _resolved_lock(cache: Path) -> Iterator[str]:
    import jgo
    from jgo.maven import MavenContext

    context = MavenContext(repo_cache=cache)
    found = {(jar.groupId, jar.artifactId, jar.version) for top in (KAFKA, LOGGING) for jar in jgo.resolve(top)}
    yield "# Apache Kafka 4.3.1 and a logging binding: SHA-256 of each jar and its Maven coordinate.\n"
    yield "# Made by: python -m infra.local.jars > infra/local/kafka.jars.lock\n"
    for group, artifact, version in sorted(found):
        path = context.project(group, artifact).at_version(version).artifact().resolve()
        yield f"{_sha256(Path(path))}  {group}:{artifact}:{version}\n"


if __name__ == "__main__":
    sys.stdout.write("".join(_resolved_lock(cache_folder())))
