"""Rules of a parameter server, event by event: the exact effects, and what an owner may ask in between."""

from __future__ import annotations

import json

import pytest

from distrib.training.parameter_server.update_rules import (
    ApplyUpdate,
    DiscardGradient,
    Effect,
    PushReply,
    UpdateController,
    WeightedGradient,
)


def push(
    rules: UpdateController,
    worker: int,
    step: int,
    *,
    chunk: int = 5,
    base: int = 0,
    final: bool = True,
    weight: int = 1,
) -> list[Effect]:
    return rules.push(worker, chunk, step, base, f"{worker}.{step}", final=final, weight=weight)


def gradient(worker: int, step: int, staleness: int = 0, weight: int = 1) -> WeightedGradient:
    return WeightedGradient(worker, step, f"{worker}.{step}", staleness, weight)


def test_each_push_is_applied_and_answered_without_a_bound():
    rules = UpdateController([5, 3], [0, 1], None)
    assert [*rules.chunks] == [3, 5] and rules.version(5) == rules.index == 0
    assert push(rules, 0, 1, weight=2) == [ApplyUpdate(5, (gradient(0, 1, 0, 2),), 1, 1), PushReply(5, 0, 1, True)]
    assert push(rules, 1, 1, chunk=3) == [ApplyUpdate(3, (gradient(1, 1),), 1, 2), PushReply(3, 1, 1, True)]
    assert push(rules, 1, 1) == [ApplyUpdate(5, (gradient(1, 1, 1),), 2, 3), PushReply(5, 1, 1, True)]
    assert push(rules, 0, 2, base=9) == [ApplyUpdate(5, (gradient(0, 2, 0),), 3, 4), PushReply(5, 0, 2, True)]
    assert (rules.version(5), rules.version(3), rules.index) == (3, 1, 4)
    assert WeightedGradient(0, 1, "g", 0).weight == 1
    push(rules, 0, 3, final=False)
    assert rules.commit(0, 3, [5], 0.25)[0].updates[0].scale == 0.25


def test_a_repeated_push_is_answered_and_an_older_one_is_rejected():
    rules = UpdateController([5], [0], None)
    push(rules, 0, 1)
    push(rules, 0, 2)
    assert push(rules, 0, 2) == [DiscardGradient("0.2"), PushReply(5, 0, 2, True)]
    assert push(rules, 0, 1) == [DiscardGradient("0.1"), PushReply(5, 0, 1, False)]


def test_a_pending_push_is_replaced_until_it_is_committed():
    rules = UpdateController([3, 5], [0, 1], None)
    assert push(rules, 0, 4, final=False) == []
    assert push(rules, 0, 4, final=False) == [DiscardGradient("0.4")]
    assert push(rules, 0, 4, chunk=3, final=False) == []
    assert rules.commit(0, 3, [3, 5]) == rules.commit(1, 4, [3, 5]) == rules.commit(0, 4, []) == []
    assert rules.unanswered(5) == [(0, 4)] and rules.last_step() == rules.last_step(0) == 4 and rules.last_step(1) == 0
    assert rules.commit(0, 4, [5, 3]) == [
        ApplyUpdate(5, (gradient(0, 4),), 1, 1), PushReply(5, 0, 4, True),
        ApplyUpdate(3, (gradient(0, 4),), 1, 2), PushReply(3, 0, 4, True),
    ]  # fmt: skip
    assert rules.commit(0, 4, [5]) == [] and rules.unanswered(5) == []


def test_a_synchronous_round_waits_for_all_members():
    rules = UpdateController([5], [0, 1, 2], 0)
    assert rules.complete_round(5) == ()
    assert push(rules, 2, 1) == [] and push(rules, 0, 1, final=False) == []
    assert rules.complete_round(5) == ()
    assert rules.is_blocked_by(5, 1) and rules.is_blocked_by(5, 0) and not rules.is_blocked_by(5, 2)
    assert push(rules, 7, 1, final=False) == []  # not a member
    assert push(rules, 1, 1, weight=3) == []
    assert rules.complete_round(5) == (gradient(0, 1), gradient(1, 1, 0, 3), gradient(2, 1))
    assert not rules.is_blocked_by(5, 1) and rules.is_blocked_by(5, 0) and not rules.is_blocked_by(5, 7)
    assert rules.unanswered(5) == [(0, 1), (1, 1), (2, 1), (7, 1)]
    updates = (gradient(0, 1), gradient(1, 1, 0, 3), gradient(2, 1))
    assert rules.commit(0, 1, [5]) == [ApplyUpdate(5, updates, 1, 1), *(PushReply(5, n, 1, True) for n in range(3))]
    assert not rules.is_blocked_by(5, 0), "no push is final"
    assert rules.commit(7, 1, [5]) == [DiscardGradient("7.1"), PushReply(5, 7, 1, False)]


def test_rounds_follow_each_other_as_soon_as_the_last_worker_is_there():
    rules = UpdateController([5], [0, 1], 0)
    push(rules, 0, 1)
    assert push(rules, 1, 1)[0] == ApplyUpdate(5, (gradient(0, 1), gradient(1, 1)), 1, 1)
    push(rules, 0, 2, base=1)
    assert rules.join(2, 3) == [], "waited for from its third step on"
    assert push(rules, 1, 2) == [
        ApplyUpdate(5, (gradient(0, 2), gradient(1, 2, 1)), 2, 2), PushReply(5, 0, 2, True), PushReply(5, 1, 2, True)
    ]  # fmt: skip
    assert push(rules, 0, 3) == push(rules, 1, 3) == []
    assert rules.is_blocked_by(5, 2) and rules.last_step(2) == 2
    assert [one.worker for one in push(rules, 2, 3)[0].updates] == [0, 1, 2]


def test_without_members_the_oldest_final_pushes_are_applied():
    rules = UpdateController([5], [], 0)
    assert rules.complete_round(5) == ()
    assert push(rules, 0, 2, final=False) == []
    assert push(rules, 1, 5) == [ApplyUpdate(5, (gradient(1, 5),), 1, 1), PushReply(5, 1, 5, True)]
    assert rules.commit(0, 2, [5])[0] == ApplyUpdate(5, (gradient(0, 2, 1),), 2, 2)


def test_a_worker_ahead_of_the_bound_is_answered_when_others_follow():
    rules = UpdateController([5], [0, 1], 1)
    assert push(rules, 0, 1)[1:] == [PushReply(5, 0, 1, True)]
    assert push(rules, 0, 2) == [ApplyUpdate(5, (gradient(0, 2, 1),), 2, 2)]
    assert rules.unanswered(5) == [(0, 2)]
    assert push(rules, 0, 2) == [DiscardGradient("0.2")]
    assert push(rules, 1, 1)[1:] == [PushReply(5, 0, 2, True), PushReply(5, 1, 1, True)]
    assert push(rules, 0, 4)[1:] == []
    assert rules.remove_member(1) == [PushReply(5, 0, 4, True)] and rules.members == {0}
    assert rules.remove_member(1) == []


@pytest.mark.parametrize("keep", [True, False])
def test_pushes_of_a_removed_member_count_if_they_are_committed(keep):
    rules = UpdateController([3, 5], [0, 1], 0)
    push(rules, 0, 1, final=False)
    push(rules, 0, 1, chunk=3)
    push(rules, 1, 1)
    discarded = [] if keep else [DiscardGradient("0.1")]
    assert rules.remove_member(0, keep_pending=keep) == [
        *discarded, ApplyUpdate(5, (gradient(1, 1),), 1, 1), PushReply(5, 1, 1, True)
    ]  # fmt: skip
    assert push(rules, 1, 1, chunk=3)[0] == ApplyUpdate(3, (gradient(0, 1), gradient(1, 1)), 1, 2)
    late = [DiscardGradient("0.1"), PushReply(5, 0, 1, False)] if keep else []
    assert rules.commit(0, 1, [5]) == late


def test_a_removed_member_that_returns_is_waited_for_from_its_step_on():
    rules = UpdateController([5], [0, 1], 0)
    rules.remove_member(1)
    for step in (1, 2):
        push(rules, 0, step)
    assert push(rules, 1, 1) == [DiscardGradient("1.1"), PushReply(5, 1, 1, False)]
    assert rules.join(1, 3) == [] and rules.members == {0, 1}
    assert push(rules, 0, 3) == []
    assert rules.join(1, 2) == [], "never from an earlier step"
    assert push(rules, 1, 3)[0].updates == (gradient(0, 3, 2), gradient(1, 3, 2))


def test_replies_wait_for_the_replica():
    rules = UpdateController([3, 5], [0, 1], None)
    assert rules.set_replicated(0) == []
    assert push(rules, 0, 1) == [ApplyUpdate(5, (gradient(0, 1),), 1, 1)]
    assert push(rules, 1, 1, chunk=3) == [ApplyUpdate(3, (gradient(1, 1),), 1, 2)]
    assert rules.unanswered(5) == [(0, 1)] and rules.unanswered(3) == [(1, 1)]
    assert rules.set_replicated(1) == [PushReply(5, 0, 1, True)]
    assert push(rules, 1, 1, chunk=3) == [DiscardGradient("1.1")]
    assert rules.set_replicated(None) == [PushReply(3, 1, 1, True)] * 2
    assert push(rules, 0, 2)[1:] == [PushReply(5, 0, 2, True)]
    rules.set_replicated(3)
    assert push(rules, 0, 2)[1:] == [PushReply(5, 0, 2, True)]


def test_a_replica_follows_each_entry_once_and_takes_over():
    primary, replica = UpdateController([3, 5], [0, 1], None), UpdateController([3, 5], [], None)
    push(primary, 0, 4)
    assert primary.state() == {"index": 1, "members": [0, 1], "chunks": {3: [0, {}], 5: [1, {0: 4}]}}
    replica.restore(json.loads(json.dumps(primary.state())))
    assert replica.state() == primary.state()
    assert not replica.follow(5, [(0, 4)], 1, 1)
    assert replica.follow(5, [(1, 2), (0, 5)], 2, 2) and not replica.follow(5, [(1, 2), (0, 5)], 2, 2)
    assert replica.state() == {"index": 2, "members": [0, 1], "chunks": {3: [0, {}], 5: [2, {0: 5, 1: 2}]}}
    assert push(replica, 1, 2) == [DiscardGradient("1.2"), PushReply(5, 1, 2, True)]
