"""Replacement of batch normalization by its synchronous form."""

from __future__ import annotations

import pytest
from torch import nn

from distrib.errors import TrainingError
from distrib.training.sync_batchnorm import convert_batchnorm


class Activated(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


def test_a_batchnorm_subclass_with_more_operations_is_refused():
    plain = convert_batchnorm(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm2d(2)))
    assert [type(layer).__name__ for layer in plain] == ["SyncBatchNorm"] * 2
    with pytest.raises(TrainingError, match=r"sync_batchnorm: body\.0 is a Activated"):
        convert_batchnorm(nn.ModuleDict({"body": nn.Sequential(Activated(2))}))
