"""What a foreman passes on, to whom, and when; and rank 0 of a tree, who has one before the coordinator."""

from __future__ import annotations

import pytest

from coordd.negotiation.aggregator import Foreman, Root, hub
from coordd.negotiation.channel import LOST
from coordd.negotiation.coordinator import Coordinator
from coordd.negotiation.tree import NOBODY, post
from coordd.negotiation.wire import mask
from coordd.ops.messages import (
    Abort,
    Account,
    Announcement,
    Blocked,
    Failure,
    Flushed,
    Goodbye,
    Hello,
    Inquiry,
    Kind,
    Loss,
    Message,
    Muster,
    Overdue,
    Plan,
    Recording,
    Refused,
    Report,
    Request,
    Response,
    StallReport,
    Traffic,
    Waiting,
    Welcome,
)
from tests.star import allreduce

HOSTS = "aabbbb"
"""With a fan-in of 2, rank 2 stands between rank 0 and the ranks 3 and 4; rank 4 speaks for rank 5, too."""
ABOVE, HERE, BELOW, OTHER = 0, 2, 3, 4
CHILDREN = (BELOW, OTHER)
MINE = mask(0b111100)
FAILURE = Failure(5, "raised ValueError", "Traceback")
RECORDING = Recording(1, "folder")


def hello(rank: int) -> Hello:
    return Hello("1", "d", 100 + rank, f"h{rank}")


def muster(ranks: range) -> Muster:
    return Muster(mask(sum(1 << rank for rank in ranks)), tuple(map(hello, ranks)))


def announced(*names: str, ranks: int = 0) -> Report:
    return Report(0, fresh=tuple(Announcement(allreduce(name, 2)) for name in names), ranks=mask(ranks))


class Stand:
    """A foreman or a root, and the time."""

    def __init__(self, rank: int = HERE, coordinator: Coordinator | None = None) -> None:
        self.hub = Foreman(post(rank, HOSTS, 2))
        if coordinator is not None:
            self.hub = Root(self.hub, coordinator)
        self.now = 0.0

    def hear(self, sender: int, message: Message) -> list[tuple[int, Message]]:
        self.hub.hear(sender, message, now=self.now)
        return self.turn()

    def turn(self) -> list[tuple[int, Message]]:
        return self.hub.turn(self.now)

    def moment(self) -> list[tuple[int, Message]]:
        """Lets pass what a foreman waits for company."""
        assert self.hub.deadline is not None
        self.now = self.hub.deadline
        return self.turn()


def to_all(message: Message) -> list[tuple[int, Message]]:
    return [(BELOW, message), (OTHER, message), (HERE, message)]


# Upwards


def test_all_arrive_in_one_message():
    stand = Stand()
    assert stand.hear(OTHER, muster(range(4, 6))) == []
    assert stand.hear(HERE, hello(2)) == []
    assert stand.hear(BELOW, hello(3)) == [(ABOVE, muster(range(2, 6)))]


def test_what_all_have_announced_goes_up_at_once():
    stand = Stand()
    assert stand.hear(HERE, announced("w")) == []
    assert stand.hear(OTHER, announced("w")) == []
    [(to, report)] = stand.hear(BELOW, announced("w"))
    assert (to, report.fresh, report.ranks) == (ABOVE, announced("w").fresh, b"")
    assert stand.hub.deadline is None


def test_what_some_have_announced_goes_up_after_a_moment():
    stand = Stand()
    stand.hear(HERE, announced("w"))
    stand.now = 0.05
    assert stand.hear(OTHER, announced("w")) == []
    assert stand.hub.deadline == pytest.approx(0.1)
    [(to, report)] = stand.moment()
    assert (to, report.ranks) == (ABOVE, mask(0b110100))
    assert stand.hub.deadline is None
    [(to, report)] = stand.hear(BELOW, announced("w"))
    assert (to, report.ranks) == (ABOVE, mask(0b001000))


def test_all_leave_in_one_message():
    stand = Stand()
    assert stand.hear(HERE, Goodbye()) == []
    assert stand.hear(OTHER, Goodbye()) == []
    assert stand.hear(BELOW, Goodbye()) == [(ABOVE, Goodbye(MINE))]


def test_who_leaves_early_is_told_after_all_that_he_has_announced():
    stand = Stand()
    stand.hear(BELOW, announced("w"))
    stand.hear(BELOW, Goodbye())
    said = [message for to, message in stand.moment() if to == ABOVE]
    assert [type(message) for message in said] == [Report, Goodbye]
    assert said[1] == Goodbye(mask(0b001000))
    stand.hear(OTHER, Goodbye(mask(0b100000)))
    assert stand.moment() == [(ABOVE, Goodbye(mask(0b100000)))]


def test_blocked_ranks_are_added_up_and_come_after_what_they_have_announced():
    stand = Stand()
    stand.hear(BELOW, announced("w"))
    stand.hear(BELOW, Blocked("w", 3))
    stand.hear(OTHER, Blocked("w", 4, mask(0b110000)))
    stand.hear(HERE, Blocked("v", 4))
    report, *blocked = [message for to, message in stand.moment() if to == ABOVE]
    assert isinstance(report, Report)
    assert blocked == [Blocked("w", 0, mask(0b111000)), Blocked("v", 0, mask(0b000100))]


def test_what_blocked_ranks_have_sent_is_told_with_them():
    """The coordinator looks whether it has come."""
    stand = Stand()
    stand.hear(BELOW, Blocked("w", 3, sent=((BELOW, 0, 1),)))
    stand.hear(OTHER, Blocked("w", 3, mask(0b110000), sent=((4, 0, 2), (5, 4, 1))))
    stand.hear(HERE, Blocked("w", 3, peer=BELOW, sent=((HERE, 9, 1),)))
    blocked = [message for to, message in stand.moment() if to == ABOVE]
    assert blocked == [
        Blocked("w", 0, mask(0b111000), sent=((BELOW, 0, 1), (4, 0, 2), (5, 4, 1))),
        Blocked("w", 0, mask(0b000100), peer=BELOW, sent=((HERE, 9, 1),)),
    ]


def test_who_leaves_having_sent_messages_is_told_apart():
    stand = Stand()
    stand.hear(HERE, Goodbye())
    stand.hear(OTHER, Goodbye(traffic=Traffic(((1, 2),))))
    assert stand.hear(BELOW, Goodbye()) == [
        (ABOVE, Goodbye(mask(0b110000), Traffic(((1, 2),)))),
        (ABOVE, Goodbye(mask(0b001100))),
    ]


@pytest.mark.parametrize("said", [Refused(BELOW, "7", "bad"), Flushed(BELOW, 7)])
def test_what_dates_announcements_stays_between_those_from_before_and_after(said):
    """A join that came before a refusal would complete the call that is refused."""
    stand = Stand()
    join = Report(0, fresh=(Announcement(Request(Kind.JOIN, "join.noname.0", transient=True)),))
    stand.hub.hear(BELOW, announced("w"), now=0.0)
    stand.hub.hear(BELOW, said, now=0.0)
    stand.hub.hear(BELOW, join, now=0.0)
    before, told, after = [message for to, message in stand.turn() if to == ABOVE]
    assert (before.fresh, told, after.fresh) == (announced("w").fresh, said, join.fresh)


def test_a_rank_that_is_blocked_no_more_is_told_before_what_it_announces():
    stand = Stand()
    stand.hear(BELOW, Blocked("w", 3))
    stand.hub.hear(BELOW, Blocked(seen=3), now=0.0)
    stand.hub.hear(BELOW, Report(0, unlock=1), now=0.0)
    free, report = [message for to, message in stand.turn() if to == ABOVE]
    assert free == Blocked(ranks=mask(0b001000))
    assert isinstance(report, Report)
    assert stand.hub.deadline is None


def test_blocked_ranks_have_to_say_so_anew_after_a_lock():
    stand = Stand()
    stand.hear(BELOW, Blocked("w", 4))
    stand.hear(ABOVE, Plan(5, responses=(Response(allreduce("l", 2), slot=0),), lock=((0,),)))
    stand.hear(OTHER, Blocked("w", 4))
    assert stand.hub.deadline is None
    stand.hear(OTHER, Blocked("w", 5))
    assert stand.moment() == [(ABOVE, Blocked("w", 5, mask(0b110000)))]


def test_complaints_about_the_same_are_one():
    stand, matched = Stand(), (Waiting("m", "recv", (0,)),)
    stand.hear(BELOW, Overdue(5.0, ("w",)))
    stand.hear(OTHER, Overdue(6.0, ("w",)))
    stand.hear(HERE, Overdue(5.5, (), matched))
    assert stand.moment() == [
        (ABOVE, Overdue(6.0, ("w",), ranks=mask(0b111000))),
        (ABOVE, Overdue(5.5, (), matched, mask(0b000100))),
    ]


def test_answers_and_losses_go_up_as_they_come():
    stand, account = Stand(), Account(5, "stack", "w")
    assert stand.hear(OTHER, account) == [(ABOVE, account)]
    assert stand.hear(BELOW, LOST) == [(ABOVE, Loss(3))]
    assert stand.hear(OTHER, Loss(5)) == [(ABOVE, Loss(5))]
    assert stand.hear(OTHER, RECORDING) == [(ABOVE, RECORDING)]


def test_a_failure_goes_both_ways_at_once():
    """For this process may end before the word comes back from above."""
    assert Stand().hear(OTHER, Abort(FAILURE)) == [(ABOVE, Abort(FAILURE)), *to_all(Abort(FAILURE))]


# Downwards


@pytest.mark.parametrize("message", [Plan(1), Welcome(), Abort(FAILURE), StallReport(1.0, (), ()), RECORDING])
def test_what_concerns_all_goes_to_all_and_to_this_rank_last(message):
    assert Stand().hear(ABOVE, message) == to_all(message)


def test_a_question_goes_to_those_who_are_asked():
    stand = Stand()
    assert stand.hear(ABOVE, Inquiry((0, 5))) == [(OTHER, Inquiry((0, 5)))]
    assert stand.hear(ABOVE, Inquiry((2, 3))) == [(BELOW, Inquiry((2, 3))), (HERE, Inquiry((2, 3)))]


def test_an_answer_goes_down_to_the_rank_that_has_asked():
    stand, answer = Stand(), Account(0, number=7, asker=5, answer=b"{}")
    assert stand.hear(ABOVE, answer) == [(OTHER, answer)]
    assert stand.hear(ABOVE, Account(0, number=7, asker=2, answer=b"{}"))[0][0] == HERE


def test_a_question_of_a_rank_goes_up():
    stand, question = Stand(), Inquiry((0, 5), number=7, asker=3)
    assert stand.hear(BELOW, question) == [(ABOVE, question)]


def test_the_loss_of_the_parent_is_a_failure_of_its_rank():
    stand = Stand()
    lost = Abort(Failure(0, "(not yet arrived) died: its connection closed without a goodbye"))
    assert stand.hear(ABOVE, LOST) == to_all(lost)
    stand = Stand()
    stand.hear(ABOVE, Welcome(tuple(range(100, 106)), tuple(HOSTS)))
    [(_, abort), *_] = stand.hear(ABOVE, LOST)
    assert abort.failure.reason.startswith("(pid 100 on a) died")


def test_connections_close_when_all_have_stopped():
    stand = Stand()
    stand.hear(ABOVE, Plan(1, stop=True))
    assert stand.hear(BELOW, LOST) == []
    assert stand.hear(ABOVE, LOST) == []


# Rank 0


def root() -> Stand:
    made = Coordinator(6, cache_capacity=8, fusion_bytes=64, voices=[0b111111])
    stand = Stand(0, made)
    for rank in (0, 1):
        stand.hear(rank, hello(rank))
    return stand


def welcomed() -> Stand:
    stand = root()
    stand.hear(2, muster(range(2, 6)))
    return stand


def test_the_coordinator_greets_everybody_at_once():
    welcome = Welcome(tuple(range(100, 106)), tuple(f"h{rank}" for rank in range(6)))
    assert root().hear(2, muster(range(2, 6))) == [(1, welcome), (2, welcome), (0, welcome)]


def test_the_plan_comes_in_the_same_turn():
    stand = welcomed()
    stand.hear(0, announced("w"))
    stand.hear(2, announced("w"))
    said = stand.hear(1, announced("w"))
    assert [(rank, message.responses[0].request.name) for rank, message in said] == [(1, "w"), (2, "w"), (0, "w")]


def test_a_difference_is_told_rank_by_rank():
    stand = welcomed()
    stand.hear(0, announced("w"))
    stand.hear(1, announced("w"))
    other = Report(0, fresh=(Announcement(allreduce("w", 3), "b.py:2"),), ranks=mask(0b010100))
    stand.hear(2, other)
    [(_, plan), *_] = stand.hear(2, announced("w", ranks=0b101000))
    assert plan.responses[0].error.endswith(
        "ranks disagree on the shape of 'w' (ranks 0-1, 3, 5: (2,); ranks 2, 4: (3,) at b.py:2)"
    )
    assert plan.responses[0].recipients == (0, 1, 2, 3, 4, 5)


def test_a_stall_names_the_one_that_is_missing():
    stand = welcomed()
    for rank in (0, 1):
        stand.hear(rank, announced("w"))
    stand.hear(2, announced("w", ranks=0b101100))
    stand.moment()
    stand.hear(0, Overdue(5.0, ("w",)))
    assert stand.moment() == [(2, Inquiry((4,)))]
    [(_, report), *_] = stand.hear(2, Account(4, "stack", "v"))
    assert report == StallReport(5.0, (Waiting("w", "allreduce", (4,)),), (Account(4, "stack", "v"),))


def test_a_question_of_one_rank_to_another_passes_the_root():
    root, question, answer = welcomed(), Inquiry((4,), number=7, asker=3), Account(4, number=7, asker=3, answer=b"{}")
    assert root.hear(2, question) == [(2, question)]
    assert root.hear(2, answer) == [(2, answer)]


def test_a_loss_below_is_told_with_its_place():
    [(_, abort), *_] = welcomed().hear(2, Loss(5))
    assert abort.failure == Failure(5, "(pid 105 on h5) died: its connection closed without a goodbye")


def test_the_last_plan_comes_when_all_have_left():
    stand = welcomed()
    stand.hear(0, Goodbye())
    stand.hear(2, Goodbye(MINE))
    assert [message.stop for _, message in stand.hear(1, Goodbye())] == [True] * 3


def test_who_waits_for_company_and_who_investigates_both_have_a_deadline():
    stand = welcomed()
    assert stand.hub.deadline is None
    stand.hear(0, announced("w"))
    assert stand.hub.deadline == pytest.approx(0.1)
    stand.hear(0, Overdue(5.0, ("w",)))
    stand.moment()
    assert stand.hub.deadline == pytest.approx(1.1)


# Who needs one


def test_only_those_to_whom_others_report_need_a_hub():
    made = []

    def coordinate(voices):
        made.append(voices)
        return Coordinator(6, cache_capacity=8, fusion_bytes=64, voices=voices)

    assert isinstance(hub(post(0, HOSTS, 2), coordinate), Root)
    assert isinstance(hub(post(2, HOSTS, 2), coordinate), Foreman)
    assert hub(post(3, HOSTS, 2), coordinate) is None
    assert isinstance(hub(post(0, "aaaaaa", 2), coordinate), Coordinator)
    assert hub(post(1, "aaaaaa", 2), coordinate) is None
    assert isinstance(hub(post(0, "a", 2), coordinate), Coordinator)
    assert made == [[0b111111], None, None]
    assert post(0, HOSTS, 2).parent == NOBODY
