"""What one rank concludes from another's line and process."""

from __future__ import annotations

import dataclasses

import pytest

from pcie_comm import MismatchError, PeerAbortedError, PeerDiedError, PeerTimeoutError
from pcie_comm.watch.cause import Cause, Kind, doubts
from pcie_comm.watch.life_lock import Life, LifeLock
from pcie_comm.watch.peer import EXIT_CODE_GRACE_S, Peer
from pcie_comm.watch.process import PeerProcess, Process
from pcie_comm.watch.roll_call import Line, State

ELSEWHERE = dataclasses.replace(Process.here(), token="another", namespaces="pid:[1]")


class Seen:
    """Rank 1 as rank 0 sees it: `life`, `gone` and `exit_code` are set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, process: Process = ELSEWHERE) -> None:
        self.life, self.gone, self.exit_code = Life.HELD, False, None
        monkeypatch.setattr(LifeLock, "look", lambda lock: self.life)
        monkeypatch.setattr(PeerProcess, "ended", lambda peer: self.gone)
        monkeypatch.setattr(PeerProcess, "exit_code", lambda peer: self.exit_code)
        self.line = Line()
        self.line.say(State.PRESENT)
        self.peer = Peer(1, 0, self.line, process)

    def judged(self, *times: float) -> Cause | None:
        """Return the last of several judgements."""
        return [self.peer.judge(now) for now in times or (1.0,)][-1]


@pytest.fixture
def seen(monkeypatch) -> Seen:
    return Seen(monkeypatch)


def test_a_rank_that_lives_is_no_cause(seen):
    for state in (State.ABSENT, State.PRESENT, State.LEFT):
        seen.line.say(state)
        assert seen.judged() is None
    assert seen.peer.describe() == "its process lives (life lock)"
    assert not seen.peer.let_go()


@pytest.mark.parametrize(
    ("state", "life", "gone"),
    [
        (State.PRESENT, Life.ABANDONED, False),
        (State.PRESENT, Life.FREE, True),
        (State.ABSENT, Life.FREE, True),
        (State.EXITED, Life.HELD, False),
    ],
)
def test_a_death_is_seen_by_lock_by_pidfd_and_by_word(seen, state, life, gone):
    seen.line.say(state)
    seen.life, seen.gone, seen.exit_code = life, gone, -9
    assert seen.judged() == Cause(1, Kind.DIED, "", -9)


def test_a_death_waits_for_its_exit_code_but_not_for_long(seen):
    seen.life = Life.ABANDONED
    assert seen.judged(1.0, 1.0 + EXIT_CODE_GRACE_S / 2) is None
    assert seen.judged(1.0 + EXIT_CODE_GRACE_S) == Cause(1, Kind.DIED, "", None)
    seen.exit_code = -11
    assert seen.judged(2.0) == Cause(1, Kind.DIED, "", -11)


@pytest.mark.parametrize("state", [State.ABORTED, State.LEFT])
def test_who_ends_after_it_left_is_no_death(seen, state):
    seen.line.say(state, "why")
    seen.life, seen.gone, seen.exit_code = Life.ABANDONED, True, 1
    expected = Cause(1, Kind.ABORTED, "why") if state == State.ABORTED else None
    assert seen.judged() == expected
    assert seen.peer.let_go(), "a process that is gone addresses nothing"


@pytest.mark.parametrize("state", [State.ABORTED, State.EXITED])
def test_the_first_cause_is_passed_on_not_its_echo(seen, state):
    """Rank 1 saw rank 2 die, and ended for it before rank 0 looked."""
    seen.line.blame(Cause(2, Kind.DIED, exit_code=-9))
    seen.line.say(state, "its echo")
    seen.exit_code = 1
    assert seen.judged() == Cause(2, Kind.DIED, "as rank 1 saw", -9)


def test_blame_on_oneself_is_an_abort_of_the_other(seen):
    """Rank 0 was stopped; rank 1 gave up, and rank 0 goes on."""
    seen.line.blame(Cause(0, Kind.LATE))
    seen.line.say(State.ABORTED, "it gave up after PeerTimeoutError")
    assert seen.judged() == Cause(1, Kind.ABORTED, "it gave up after PeerTimeoutError")


def test_a_thread_of_the_same_process_does_not_die(monkeypatch):
    seen = Seen(monkeypatch, Process.here())
    seen.life, seen.gone = Life.ABANDONED, True
    assert seen.judged() is None
    assert not seen.peer.foreign
    assert seen.peer.describe() == "a thread of this process"
    seen.line.released = 1
    assert seen.peer.let_go()


def test_a_stopped_process_is_named_as_such_and_is_no_death(seen):
    seen.line.beat = 7
    assert seen.judged(1.0, 2.0, 4.5) is None
    assert seen.peer.describe() == "its process has not run for 3.5 s: stopped, or starved"
    seen.line.beat = 8
    assert seen.judged(5.0) is None
    assert "lives" in seen.peer.describe()


def test_a_peer_that_is_closed_says_nothing(seen):
    seen.peer.close()
    seen.life = Life.ABANDONED
    assert seen.judged() is None
    assert not seen.peer.let_go()


# --- causes as errors ----------------------------------------------------------------------------


def test_causes_are_errors_with_facts():
    died = Cause(2, Kind.DIED, exit_code=-9).error(0, "all_gather_pair", 7)
    assert type(died) is PeerDiedError
    assert (died.rank, died.peer, died.op, died.epoch) == (0, 2, "all_gather_pair", 7)
    assert died.exit_code == -9
    assert "rank 2 died: killed by SIGKILL; close the group" in str(died)
    aborted = Cause(2, Kind.ABORTED, "why").error(0)
    assert type(aborted) is PeerAbortedError
    assert "the group was aborted by rank 2 (why)" in str(aborted)
    own = Cause(0, Kind.ABORTED, "why").error(0)
    assert (own.peer, "aborted by this rank" in str(own)) == (0, True)
    late = Cause(2, Kind.LATE, "as rank 1 saw").error(0)
    assert type(late) is PeerTimeoutError
    assert (late.peer, late.wanted) == (2, None)
    assert not isinstance(late, MismatchError)


def test_an_exit_code_that_becomes_known_later_is_in_later_errors():
    cause = Cause(2, Kind.DIED)
    assert cause.error(0).exit_code is None
    cause.exit_code = 3
    assert cause.error(0).exit_code == 3


def test_doubts_about_a_peer():
    assert doubts("") == "is it alive, and did it make the same call?"
    assert doubts("its process lives") == "its process lives; did it make the same call?"
