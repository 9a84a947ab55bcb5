"""The strategy, from options to every rank and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib.errors import ConfigError
from distrib.strategy import (
    Gradients,
    OuterOptimizer,
    Strategy,
    encode_strategy,
    parse_gradients,
    strategy_from_environment,
    strategy_options,
)
from distrib_launch.arguments import training_options
from distrib_launch.cli import launch


def chosen(*words: str) -> Strategy:
    return training_options.strategy_of(launch.parser().parse_args([*words, "train.py"]))


@pytest.mark.parametrize("text", ["fp32", "fp16", "bf16", "int8", "powersgd:4", "topk:0.01"])
def test_a_format_reads_as_it_prints(text):
    assert str(parse_gradients(text)) == text


@pytest.mark.parametrize(
    "text", ["", "fp64", "powersgd", "powersgd:0", "topk", "topk:0", "topk:2", "topk:e", "topk:.", "bf16:2", "FP32"]
)
def test_no_format(text):
    with pytest.raises(ConfigError, match="unknown format"):
        parse_gradients(text)


def test_options_make_the_strategy():
    assert chosen() == Strategy()
    assert chosen("--mode", "auto") == Strategy()
    assert chosen("--gradients", "topk:0.01", "--bucket", "8MiB", "--all-reduce", "flat") == Strategy(
        gradients=Gradients("topk", fraction=0.01), bucket_bytes=8 << 20, all_reduce="flat"
    )
    assert chosen("--mode", "async", "--servers", "2", "--staleness", "0", "--replicas", "1") == Strategy(
        mode="async", servers=2, staleness=0, replicas=1
    )
    assert chosen("--mode", "async", "--staleness", "unbounded").staleness is None


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("--accumulate 3 --balance --bucket 8MiB --gradients powersgd:3 --all-reduce hierarchical",
         {"accumulate": 3, "balance": True, "bucket_bytes": 8 << 20, "gradients": Gradients("powersgd", rank=3), "all_reduce": "hierarchical"}),
        ("--mode local --inner-steps 7 --outer 0.6:0.5 --fragments 2 --overlap-steps 3 --accumulate 2 --gradients bf16",
         {"mode": "local", "inner_steps": 7, "outer": OuterOptimizer(lr=0.6, momentum=0.5, fragments=2, overlap_steps=3),
          "accumulate": 2, "gradients": Gradients("bf16")}),
        ("--mode local --outer average", {"mode": "local", "outer": OuterOptimizer(lr=1.0, momentum=0.0)}),
        ("--mode local --outer 0.8", {"mode": "local", "outer": OuterOptimizer(lr=0.8, momentum=0.0)}),
        ("--mode local --outer diloco", {"mode": "local", "outer": OuterOptimizer(lr=0.7, momentum=0.9)}),
        ("--mode async --servers 3 --staleness 4 --replicas 1 --no-stale-rate --delay-compensation 0.04",
         {"mode": "async", "servers": 3, "staleness": 4, "replicas": 1, "stale_rate": False, "delay_compensation": 0.04}),
        ("--mode async --no-momentum-correction --no-host-reduction --gradients fp16",
         {"mode": "async", "momentum_correction": False, "host_reduction": False, "gradients": Gradients("fp16")}),
    ],
)  # fmt: skip
def test_every_option_reaches_the_ranks(words, fields):
    strategy = Strategy(**fields)
    assert chosen(*words.split()) == strategy == chosen(*strategy_options(strategy))
    assert strategy_from_environment({"DISTRIB_STRATEGY": encode_strategy(strategy)}) == strategy


def test_rounds_of_mode_local_have_500_steps_without_an_option():
    assert (
        chosen("--mode", "local").steps_per_round == 500
        and chosen("--mode", "local", "--inner-steps", "7").steps_per_round == 7
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--servers", "2"], "--servers does not apply in mode sync"),
        (["--mode", "local", "--staleness", "1"], "--staleness does not apply in mode local"),
        (["--mode", "async", "--inner-steps", "4"], "--inner-steps does not apply in mode async"),
        (["--mode", "auto", "--inner-steps", "4"], "--inner-steps does not apply in mode auto"),
        (["--backend", "horovod", "--gradients", "int8"], "horovod does not support int8"),
        (["--backend", "horovod", "--mode", "local"], "cannot train in mode local"),
        (["--mode", "async", "--staleness", "-1"], "not a valid number of steps"),
        (["--mode", "async", "--staleness", "9" * 5000], "not a valid number of steps"),
        (["--mode", "async", "--gradients", "powersgd:2"], "--mode async does not support powersgd:2"),
        (["--mode", "async", "--servers", "1", "--replicas", "1"], "needs another server"),
        (["--fragments", "2"], "--fragments does not apply in mode sync"),
        (["--overlap-steps", "2"], "--overlap-steps does not apply in mode sync"),
        (["--outer", "average"], "--outer does not apply in mode sync"),
        (
            ["--mode", "local", "--overlap-steps", "500"],
            "--overlap-steps 500, expected less than the 500 steps",
        ),
        (["--mode", "local", "--bucket", "4MiB"], "--bucket does not apply in mode local"),
        (["--mode", "async", "--all-reduce", "flat"], "--all-reduce does not apply in mode async"),
        (["--backend", "horovod", "--bucket", "4MiB"], "--bucket does not apply with --backend horovod"),
        (["--bucket", "0B"], "not a valid size"),
        (["--bucket", "25"], "--bucket 25"),
        (["--accumulate", "0"], "give 1 or more"),
    ],
)
def test_what_does_not_go_together(words, says):
    with pytest.raises(ConfigError, match=says):
        chosen(*words)


@given(
    st.builds(
        Strategy,
        mode=st.just("async"),
        gradients=st.sampled_from([Gradients(), Gradients("bf16")]),
        staleness=st.none() | st.integers(0, 1000),
        servers=st.none() | st.integers(2, 1000),
        replicas=st.sampled_from([0, 1]),
    )
)
def test_ranks_read_what_the_launcher_wrote(strategy):
    assert strategy_from_environment({"DISTRIB_STRATEGY": encode_strategy(strategy)}) == strategy


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"mode":"fast"}', '{"speed":1}', '{"servers":2}', '{"mode":"\udce9"}', "[" * 5000]
)
def test_a_broken_variable_is_named(text):
    with pytest.raises(ConfigError):
        strategy_from_environment({"DISTRIB_STRATEGY": text})
