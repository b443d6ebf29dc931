"""The stack's decisions, with parts that start in milliseconds instead of servers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.local import processes, programs, stack, watch
from infra.local.addresses import Addresses
from infra.local.part import Command, Part, PartError, Say
from infra.local.stack import Stack, StackError
from tests.conditions import wait_until

# Becomes ready by making a file and leaves a line when it is asked to end.
WORKS = "trap 'echo end $0 >> order; exit 0' TERM; touch \"$0.ready\"; sleep 600 & wait"
DIES = "for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22; do echo trouble $n; done; exit 1"


class Workshop:
    """Makes parts whose behaviour the test sets by name; a part not mentioned works."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.scripts: dict[str, str] = {}
        self.changes: dict[str, dict[str, object]] = {}
        self.lines: list[str] = []
        self.stack = Stack(home)

    def maker(self, name: str) -> Callable[[Path, Addresses], Part]:
        def probe() -> None:
            if not (self.home / f"{name}.ready").exists():
                raise PartError("no file yet")

        def command(say: Say) -> Command:
            (self.home / f"{name}.ready").unlink(missing_ok=True)
            return Command(argv=("/bin/sh", "-c", self.scripts.get(name, WORKS), name), cwd=self.home)

        def make(home: Path, addresses: Addresses) -> Part:
            part = Part(name=name, address=name, ports=(), fingerprint="1", command=command, probe=probe)
            return replace(part, **self.changes.get(name, {}))  # type: ignore[arg-type]

        return make

    def up(self, *, services_only: bool = False) -> None:
        self.lines.clear()
        self.stack.up(services_only=services_only, progress=self.lines.append)

    def pids(self) -> dict[str, int | None]:
        return {part.name: part.pid for part in self.stack.status()}

    def said(self, name: str) -> list[str]:
        return [line.removeprefix(name).strip() for line in self.lines if line.startswith(name)]


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    shop = Workshop(tmp_path / "home")
    monkeypatch.setattr(watch, "_PROBE_PAUSE_S", 0.01)
    monkeypatch.setattr(stack, "SERVICES", tuple(map(shop.maker, ("first", "second"))))
    monkeypatch.setattr(stack, "PROGRAMS", tuple(map(shop.maker, ("api", "worker"))))
    provision = Command(argv=("/bin/sh", "-c", "echo provisioned >> order"), cwd=shop.home)
    monkeypatch.setattr(programs, "provision", lambda: provision)
    yield shop
    shop.stack.down(deadline_s=3)


def test_up_starts_every_part_and_provisions_between_servers_and_programs(workshop: Workshop) -> None:
    workshop.up()
    assert all(part.healthy for part in workshop.stack.status())
    done = next(i for i, line in enumerate(workshop.lines) if line.startswith("provision done"))
    assert all(i < done for i, line in enumerate(workshop.lines) if line.startswith(("first", "second")))
    assert all(i > done for i, line in enumerate(workshop.lines) if line.startswith(("api", "worker")))


def test_services_only_leaves_the_programs_out(workshop: Workshop) -> None:
    workshop.up(services_only=True)
    assert set(workshop.pids()) == {"first", "second"}
    assert not (workshop.home / "order").exists()


def test_a_second_up_changes_nothing(workshop: Workshop) -> None:
    workshop.up()
    before = workshop.pids()
    workshop.up()
    assert workshop.pids() == before
    assert workshop.said("first") == [f"runs already (pid {before['first']})"]


def test_services_only_after_a_full_up_keeps_the_programs(workshop: Workshop) -> None:
    workshop.up()
    before = workshop.pids()
    workshop.up(services_only=True)
    assert workshop.pids() == before


def test_a_dead_part_is_started_again_and_the_others_left(workshop: Workshop) -> None:
    workshop.up()
    before = workshop.pids()
    workshop.stack.stop_part("first", kill=True)
    assert workshop.pids()["first"] is None
    workshop.up()
    after = workshop.pids()
    assert after.pop("first") not in (None, before.pop("first"))
    assert after == before


def test_a_part_that_runs_but_does_not_work_is_restarted(workshop: Workshop) -> None:
    workshop.up(services_only=True)
    before = workshop.pids()["first"]
    (workshop.home / "first.ready").unlink()
    status = {part.name: part for part in workshop.stack.status()}["first"]
    assert (status.healthy, status.pid, status.why) == (False, before, "no file yet")
    os.utime(workshop.home / "pids" / "first.json", (0, 0))  # started long ago: its time to become ready is over
    workshop.up(services_only=True)
    assert workshop.said("first")[0] == "restarting: it does not work (not ready in time (no file yet))"
    assert workshop.pids()["first"] not in (None, before)


def test_a_part_that_is_still_starting_gets_the_rest_of_its_time(workshop: Workshop) -> None:
    """An earlier `up` may have been killed while it waited."""
    workshop.scripts["first"] = 'until [ -e go ]; do sleep 0.02; done; touch "$0.ready"; exec sleep 600'
    workshop.changes["first"] = {"ready_within_s": 0.0}
    with pytest.raises(StackError):
        workshop.up(services_only=True)
    workshop.changes["first"] = {"ready_within_s": 30.0}
    (workshop.home / "go").touch()
    before = workshop.pids()["first"]
    workshop.up(services_only=True)
    assert workshop.said("first") == [f"runs already (pid {before})"]


def test_a_part_with_other_addresses_is_restarted(workshop: Workshop) -> None:
    workshop.up(services_only=True)
    before = workshop.pids()
    workshop.changes["second"] = {"fingerprint": "2"}
    workshop.up(services_only=True)
    after = workshop.pids()
    assert after["first"] == before["first"]
    assert after["second"] != before["second"]
    assert workshop.said("second")[0] == "restarting: its addresses changed"


def test_a_part_that_dies_is_named_with_the_end_of_its_log(workshop: Workshop) -> None:
    workshop.scripts["second"] = DIES
    with pytest.raises(StackError) as caught:
        workshop.up()
    assert list(caught.value.failures) == ["second"]
    reason = caught.value.failures["second"]
    assert reason.startswith("its process ended (no file yet)")
    assert str(workshop.home / "logs" / "second.log") in reason
    assert reason.endswith("trouble 22")
    assert "trouble 3\n" in reason
    assert "trouble 2\n" not in reason  # twenty lines
    status = {part.name: part for part in workshop.stack.status()}
    assert status["first"].healthy
    assert "is gone" in status["second"].why
    assert status["api"].why == "not started"


def test_a_part_that_is_never_ready_ends_the_wait_at_its_deadline(workshop: Workshop) -> None:
    workshop.scripts["first"] = "exec sleep 600"
    workshop.changes["first"] = {"ready_within_s": 0.2}
    with pytest.raises(StackError, match=r"first: not ready in time \(no file yet\)"):
        workshop.up()
    running = processes.read_pid_file(workshop.home / "pids" / "first.json")
    assert processes.is_alive(running)


def test_a_failed_provision_is_shown(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Command(argv=("/bin/sh", "-c", "echo no room; exit 1"), cwd=workshop.home)
    monkeypatch.setattr(programs, "provision", lambda: failing)
    with pytest.raises(StackError, match=r"provision: ended with status 1\n.*\nno room"):
        workshop.up()


def test_drift_is_told_and_does_not_stop_the_start(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    drifting = Command(argv=("/bin/sh", "-c", "exit 3"), cwd=workshop.home)
    monkeypatch.setattr(programs, "provision", lambda: drifting)
    workshop.up()
    assert any("differences" in line for line in workshop.said("provision"))


def test_down_ends_the_programs_before_the_servers(workshop: Workshop) -> None:
    workshop.up()
    assert workshop.stack.down(deadline_s=10) == []
    order = (workshop.home / "order").read_text().splitlines()
    assert set(order[1:3]) == {"end api", "end worker"}
    assert set(order[3:]) == {"end first", "end second"}
    assert processes.strays(workshop.home) == []
    assert not list((workshop.home / "pids").iterdir())


def test_down_kills_what_does_not_listen(workshop: Workshop) -> None:
    workshop.scripts["first"] = 'trap "" TERM; touch "$0.ready"; while :; do sleep 600; done'
    workshop.up(services_only=True)
    assert workshop.stack.down(deadline_s=1.5) == ["first"]
    assert processes.strays(workshop.home) == []


def test_down_without_anything_to_stop_is_fine(workshop: Workshop) -> None:
    assert workshop.stack.down() == []
    workshop.up(services_only=True)
    workshop.stack.down()
    assert workshop.stack.down() == []


def test_wipe_removes_data_and_keeps_the_credentials(workshop: Workshop) -> None:
    workshop.up(services_only=True)
    (workshop.home / "data" / "first").mkdir()
    settings = (workshop.home / "stack.env").read_text()
    workshop.stack.down(wipe=True)
    assert not (workshop.home / "data").exists()
    assert (workshop.home / "stack.env").read_text() == settings


def test_a_paused_part_does_not_end_and_goes_on(workshop: Workshop) -> None:
    workshop.up(services_only=True)
    running = processes.read_pid_file(workshop.home / "pids" / "first.json")
    assert running is not None
    workshop.stack.pause_part("first")
    assert processes.is_alive(running)
    workshop.stack.resume_part("first")
    workshop.stack.stop_part("first")
    assert (workshop.home / "order").read_text() == "end first\n"


def test_unknown_and_stopped_parts_are_named(workshop: Workshop) -> None:
    workshop.up(services_only=True)
    with pytest.raises(KeyError, match=r"no part 'third' .* there are: first, second, api, worker"):
        workshop.stack.start_part("third")
    workshop.stack.stop_part("second")
    with pytest.raises(PartError, match="second does not run"):
        workshop.stack.pause_part("second")


def test_two_commands_take_turns(workshop: Workshop) -> None:
    workshop.scripts["first"] = 'until [ -e go ]; do sleep 0.02; done; touch "$0.ready"; exec sleep 600'
    one = threading.Thread(target=lambda: workshop.stack.up(services_only=True))
    one.start()
    wait_until(lambda: (workshop.home / "second.ready").exists())
    waiting: list[str] = []
    two = threading.Thread(target=lambda: Stack(workshop.home).down(progress=waiting.append))
    two.start()
    wait_until(lambda: waiting)
    assert waiting[0].startswith("waiting for process")
    assert processes.is_alive(processes.read_pid_file(workshop.home / "pids" / "second.json"))
    (workshop.home / "go").touch()
    one.join(20)
    two.join(20)
    assert processes.strays(workshop.home) == []


def test_the_stop_signal_is_the_parts_own(workshop: Workshop) -> None:
    # Not SIGINT: whoever starts the tests in the background of a script has it ignored, and a shell cannot undo that.
    workshop.changes["first"] = {"stop_signal": signal.SIGUSR1}
    workshop.scripts["first"] = 'trap "echo fast >> order; exit 0" USR1; touch "$0.ready"; sleep 600 & wait'
    workshop.up(services_only=True)
    workshop.stack.down(deadline_s=120)  # a busy machine may take its time before the script hears of the signal
    assert "fast" in (workshop.home / "order").read_text()
