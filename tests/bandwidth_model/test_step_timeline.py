"""Timeline of a training step: buckets, overlap, exposed communication."""

from __future__ import annotations

import pytest

from distrib.bandwidth_model import bucketing, step_timeline
from distrib.bandwidth_model.bucketing import AllReduceCost
from distrib.bandwidth_model.step_timeline import Transfer
from distrib.strategy import Strategy
from tests.support.predicted_jobs import MB, job


def test_predicted_buckets_equal_those_of_ddp():
    """DDP fills 1 MiB, then 25 MiB. The gradient that fills a bucket closes it (torch/nn/parallel/distributed.py)."""
    found = bucketing.ddp_buckets(job(megabytes=100, tensors=20).gradients)
    assert [part.size_bytes / MB for part in found] == [5, 30, 30, 30, 5]
    assert [round(part.ready_seconds, 6) for part in found] == [0.005, 0.035, 0.065, 0.095, 0.1]
    assert len(bucketing.ddp_buckets(job(tensors=20).gradients, 1)) == 20


def test_buckets_of_distrib_cover_all_gradients_in_ready_order():
    gradients = job(megabytes=50, tensors=7).gradients
    wire = AllReduceCost(overhead_seconds=1e-3, seconds_per_byte=1e-8)
    for strategy in (Strategy(), Strategy(bucket_bytes=3 << 20)):
        for found in (bucketing.hook_buckets(gradients, strategy, known, ranks_per_host=2) for known in (wire, None)):
            assert sum(piece.size_bytes for piece in found) == sum(gradient.size_bytes for gradient in gradients)
            assert sum(piece.elements for piece in found) == pytest.approx(sum(g.elements for g in gradients))
            ready = [piece.ready_seconds for piece in found]
            assert ready == sorted(ready)
            assert ready[-1] == gradients[-1].ready_seconds


def transfers(*network_seconds_at: tuple[float, float]) -> list[Transfer]:
    return [Transfer(ready_seconds=at, network_seconds=seconds) for at, seconds in network_seconds_at]


def test_the_last_bucket_is_exposed():
    step = step_timeline.synchronous_step(job(), transfers((0.02, 0.03), (0.1, 0.03)), spans=True)
    # forward 0.05, backward 0.1 beside the first bucket, 0.03 for the last bucket, optimizer 0.002
    assert step.seconds == pytest.approx(0.182)
    assert (step.communication_seconds, step.exposed_seconds) == (pytest.approx(0.06), pytest.approx(0.03))
    assert {span.phase for span in step.spans} == {"forward", "backward", "communication", "wait", "optimizer"}
    assert max(span.end_seconds for span in step.spans) == pytest.approx(step.seconds)


def test_a_bucket_waits_for_the_one_before():
    step = step_timeline.synchronous_step(job(), transfers((0.02, 0.2), (0.1, 0.2)))
    assert step.seconds == pytest.approx(0.05 + 0.02 + 0.2 + 0.2 + 0.002)


def test_packing_extends_backward_and_unpacking_follows_the_transfer():
    parts = [Transfer(ready_seconds=0.1, network_seconds=0.03, pack_seconds=0.01, unpack_seconds=0.005)]
    assert step_timeline.synchronous_step(job(), parts).seconds == pytest.approx(
        0.05 + 0.1 + 0.01 + 0.03 + 0.005 + 0.002
    )


def test_backward_is_slower_beside_communication():
    step = step_timeline.synchronous_step(job(), transfers((0.02, 0.055)), overlap_slowdown=0.1)
    # At a slowdown of 0.1, 0.055 s beside communication complete 0.05 s of backward.
    assert step.seconds == pytest.approx(0.05 + 0.1 + 0.005 + 0.002)


def test_the_slowest_of_many_ranks_is_the_expected_maximum():
    assert step_timeline.slowest_of(1, 0.1) == 1.0
    assert step_timeline.slowest_of(100, 0.0) == 1.0
    # the expected largest of 100 normal errors is 2.51 standard deviations
    assert step_timeline.slowest_of(100, 0.1) == pytest.approx(1.251, abs=0.01)
