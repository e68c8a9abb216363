"""The page on which ranks say how they fare."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from leaks import own_files, own_mappings

from pcie_comm import InvalidArgumentError, UnsupportedError
from pcie_comm.watch.cause import Cause, Kind
from pcie_comm.watch.life_lock import Life, LifeLock
from pcie_comm.watch.roll_call import Line, RollCall, State

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture(params=[True, False], ids=["one process", "file"])
def pages(request):
    """The pages of two ranks, as one of them made it and the other found it."""
    made = RollCall.create(one_process=request.param)
    found = RollCall.attach(made.name, 0)
    yield made, found
    found.unlink()
    made.unlink()
    for page in (made, found):
        page.close()
        page.close()


def test_what_a_rank_says_is_heard_by_the_others(pages):
    mine, theirs = pages[0].line(1), pages[1].line(1)
    assert State(theirs.state) is State.ABSENT
    mine.say(State.PRESENT)
    mine.say(State.ABORTED, "disk on fire: größer als 0")
    assert State(theirs.state) is State.ABORTED
    assert theirs.heard() == "disk on fire: größer als 0"
    assert State(pages[1].line(0).state) is State.ABSENT
    del mine, theirs


def test_a_long_reason_is_cut_and_damage_is_shown(pages):
    line = pages[0].line(0)
    line.say(State.ABORTED, "x" * 1000)
    assert line.heard() == "x" * 159
    line.say(State.ABORTED, "ü" * 1000)
    assert line.heard().startswith("ü" * 79)
    assert (pages[1].line(1).state, pages[1].line(1).reason) == (State.ABSENT, b"")
    del line


@pytest.mark.parametrize("exit_code", [-9, 0, 3, None])
def test_a_rank_is_blamed_with_all_that_is_known(pages, exit_code):
    pages[0].line(2).blame(Cause(5, Kind.DIED, exit_code=exit_code))
    line = pages[1].line(2)
    assert (line.blamed, Kind(line.blamed_kind)) == (6, Kind.DIED)
    assert (line.exit_code if line.exit_known else None) == exit_code
    del line


def test_the_name_goes_and_the_page_stays():
    made = RollCall.create(one_process=False)
    found = RollCall.attach(made.name, 0)
    assert own_files() == [made.name]
    found.unlink()
    made.unlink()
    assert own_files() == []
    found.line(3).say(State.LEFT)
    assert made.line(3).state == State.LEFT
    with pytest.raises(InvalidArgumentError, match="--ipc=host"):
        RollCall.attach(made.name, 0)
    made.close()
    found.close()
    assert own_mappings() == []


def test_a_page_of_one_process_is_no_file_and_goes_with_its_users():
    made = RollCall.create(one_process=True)
    name = made.name
    assert own_files() == own_mappings() == []
    found = RollCall.attach(name, 0)
    found.line(0).say(State.PRESENT)
    assert made.line(0).state == State.PRESENT
    del made, found
    with pytest.raises(InvalidArgumentError):
        RollCall.attach(name, 0)


def test_new_lines_have_locks_that_nobody_holds():
    page = RollCall.create(one_process=False)
    assert {page.line(rank).life_lock().look() for rank in range(16)} == {Life.FREE}
    page.unlink()
    page.close()


def test_a_c_library_without_robust_mutexes_is_named(monkeypatch):
    def fail(lock: LifeLock) -> None:
        raise OSError(errno.EINVAL, "cannot make a robust mutex")

    monkeypatch.setattr(LifeLock, "initialise", fail)
    with pytest.raises(UnsupportedError, match="robust mutex"):
        RollCall.create(one_process=False)
    assert own_files() == own_mappings() == []


def test_a_line_is_one_of_sixteen_on_a_page():
    """Processes of one group run one version; still, the size is what docs/failure.md says."""
    import ctypes

    assert ctypes.sizeof(Line) == 256
    assert Line.lock.offset % 16 == 0
    assert Path("/dev/shm").is_dir()
