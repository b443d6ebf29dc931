from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from infra.local import jars
from infra.local.jars import LOCK_FILE, LockedJar, fetch, read_lock
from infra.local.part import PartError

RIGHT = b"the jar that was locked"
JAR = LockedJar(coordinate="org.example:thing:1.0", sha256=hashlib.sha256(RIGHT).hexdigest())
PLACE = Path("org/example/thing/1.0/thing-1.0.jar")


class FakeMaven:
    """Stands for jgo's context: `served` is what the repository holds, by coordinate."""

    served: dict[str, bytes] = {}  # noqa: RUF012 (set anew by each test)
    fetched: list[str] = []  # noqa: RUF012

    def __init__(self, repo_cache: Path, timeout: int) -> None:
        self.cache = repo_cache

    def project(self, group: str, artifact: str) -> FakeMaven:
        self.name = (group, artifact)
        return self

    def at_version(self, version: str) -> FakeMaven:
        self.version = version
        return self

    def artifact(self) -> FakeMaven:
        return self

    def resolve(self) -> str:
        group, artifact = self.name
        coordinate = f"{group}:{artifact}:{self.version}"
        if coordinate not in self.served:
            raise RuntimeError(f"{coordinate} not found in remote repositories")
        self.fetched.append(coordinate)
        path = self.cache.joinpath(*group.split("."), artifact, self.version, f"{artifact}-{self.version}.jar")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.served[coordinate])
        return str(path)


@pytest.fixture
def maven(monkeypatch: pytest.MonkeyPatch) -> type[FakeMaven]:
    import jgo.maven

    FakeMaven.served, FakeMaven.fetched = {JAR.coordinate: RIGHT}, []
    monkeypatch.setattr(jgo.maven, "MavenContext", FakeMaven)
    return FakeMaven


def quiet(line: str) -> None:
    pass


def test_the_checked_in_lock_names_every_jar_once() -> None:
    locked = read_lock(LOCK_FILE.read_text())
    coordinates = [jar.coordinate for jar in locked]
    assert len(set(coordinates)) == len(coordinates)
    assert {jars.KAFKA, jars.LOGGING} <= set(coordinates)
    assert "org.apache.kafka:kafka-clients:4.3.1" in coordinates


@pytest.mark.parametrize("line", ["abc org.example:thing:1.0", "0" * 64, "0" * 64 + " thing-1.0.jar"])
def test_a_bad_line_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="line 2: expected"):
        read_lock(f"# comment\n{line}\n")


def test_missing_jars_are_fetched_once_and_then_found(maven: type[FakeMaven], tmp_path: Path) -> None:
    lines: list[str] = []
    assert fetch(lines.append, cache=tmp_path, lock=[JAR]) == [tmp_path / PLACE]
    assert fetch(quiet, cache=tmp_path, lock=[JAR]) == [tmp_path / PLACE]
    assert maven.fetched == [JAR.coordinate]
    assert any("1/1 jars" in line for line in lines)


def test_a_jar_damaged_in_the_cache_is_fetched_again(maven: type[FakeMaven], tmp_path: Path) -> None:
    fetch(quiet, cache=tmp_path, lock=[JAR])
    (tmp_path / PLACE).write_bytes(RIGHT[:5])
    fetch(quiet, cache=tmp_path, lock=[JAR])
    assert (tmp_path / PLACE).read_bytes() == RIGHT


def test_other_bytes_than_the_locked_ones_are_refused_and_not_kept(maven: type[FakeMaven], tmp_path: Path) -> None:
    maven.served[JAR.coordinate] = b"something else"
    with pytest.raises(PartError, match=r"org\.example:thing:1\.0: its SHA-256 is .* the lock file says"):
        fetch(quiet, cache=tmp_path, lock=[JAR])
    assert not (tmp_path / PLACE).exists()


def test_a_repository_without_the_jar_is_reported(maven: type[FakeMaven], tmp_path: Path) -> None:
    maven.served.clear()
    with pytest.raises(PartError, match=r"cannot fetch org\.example:thing:1\.0: .* not found"):
        fetch(quiet, cache=tmp_path, lock=[JAR])


def test_the_cache_outlives_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert jars.cache_folder() == tmp_path / ".cache" / "inferlog" / "maven"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert jars.cache_folder() == tmp_path / "elsewhere" / "inferlog" / "maven"


def test_nothing_is_asked_of_maven_when_all_jars_are_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: Any) -> int:
        raise AssertionError("downloaded")

    (tmp_path / PLACE).parent.mkdir(parents=True)
    (tmp_path / PLACE).write_bytes(RIGHT)
    monkeypatch.setattr(jars, "_download_one", refuse)
    assert fetch(quiet, cache=tmp_path, lock=[JAR]) == [tmp_path / PLACE]
