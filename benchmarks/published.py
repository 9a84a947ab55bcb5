"""Accuracy of the bandwidth model against published results that it was not fitted to.

    python benchmarks/published.py [--json] [--half tune|held-out] FILE.csv...
    python benchmarks/published.py --markdown FILE.csv... > benchmarks/results/published.md    every row

A file lists scaling efficiencies or NCCL bus bandwidths; tests/data/published/ has some. Constants may be chosen on the
tuning half only: rows 0, 2, 4 and so on of a file. Rows 1, 3, 5 and so on are held out.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec

from distrib.bandwidth_model import collective_cost
from distrib.bandwidth_model.fabric import find_fabric
from distrib.bandwidth_model.network_catalog import estimate_compute_rate, network_arithmetic, published_speeds
from distrib.bandwidth_model.prediction import Prediction
from distrib.bandwidth_model.scaling import predict_step
from distrib.bandwidth_model.workload import Gradient, Workload
from distrib.bandwidth_model.workload_catalog import OPTIMIZERS, catalog_workload
from distrib.cluster.topology import Topology, parse_topology
from distrib.strategy import Gradients, Strategy

VERDICT = 0.9
SIZE_RANGES = (
    ("below 1 MiB", 0, 1 << 20),
    ("1 to 8 MiB", 1 << 20, (8 << 20) + 1),
    ("8 to 16 MiB", (8 << 20) + 1, 16 << 20),
    ("16 MiB and more", 16 << 20, 1 << 60),
)


class Framework(msgspec.Struct, frozen=True):
    """Averaging of gradients in a script."""

    strategy: Strategy = Strategy()
    overlaps: bool = True
    has_half_gradients: bool = False
    """True if parameters, and so gradients, have 16 bits in amp."""
    compression: Gradients = Gradients()
    """The format on the network in amp."""
    optimizer: Literal["adam", "lamb"] = "adam"


LAMB_STEP_BYTES = 52
"""Bytes that LAMB reads and writes per parameter and step in fp32: 4 for the norm of all gradients, 28 for moments and updates, as Adam,
8 for the norms of parameters and updates, 12 to apply them (NVIDIA/DeepLearningExamples@729963dd PyTorch/LanguageModeling/BERT/lamb_amp_opt).
"""
FRAMEWORKS = {
    "": Framework(),
    "horovod": Framework(Strategy(bucket_bytes=64 << 20)),  # default of HOROVOD_FUSION_THRESHOLD
    "byteps": Framework(Strategy(bucket_bytes=4 << 20, all_reduce="hierarchical", gradients=Gradients("fp16"))),
    "after-backward": Framework(overlaps=False, has_half_gradients=True),
    "fsdp": Framework(Strategy(shard="all")),
    "fsdp-16-bit": Framework(Strategy(shard="all", gradients=Gradients("bf16"))),
    "fsdp-zero2": Framework(Strategy(shard="grads")),
    "horovod-after-backward": Framework(Strategy(bucket_bytes=64 << 20), overlaps=False, compression=Gradients("fp16")),
}
FRAMEWORKS |= {f"{name}, lamb": msgspec.structs.replace(one, optimizer="lamb") for name, one in FRAMEWORKS.items()}
"""Frameworks by the optional column `framework`."""
FRAMEWORK_OF_SOURCE = {
    ("PyTorch/LanguageModeling/BERT", ", acc "): "after-backward, lamb",
    ("TensorFlow2/LanguageModeling/BERT", ", acc "): "horovod-after-backward, lamb",
    ("PyTorch/LanguageModeling/BERT", "BERT"): "after-backward",
    ("lambdal/deeplearning-benchmark", "BERT"): "after-backward",
    ("TensorFlow2/LanguageModeling/BERT", "BERT"): "horovod-after-backward",
    ("TensorFlow/Classification", "ResNet"): "horovod",
    ("MxNet/Classification", "ResNet"): "horovod",
    ("mosaicml/llm-foundry", "A100"): "fsdp-16-bit",
    ("mosaicml/llm-foundry", "32 x 8 H100"): "fsdp-zero2",
    ("mosaicml/llm-foundry", "H100"): "fsdp",
}
"""Frameworks of rows without the column, by parts of the source and of the description or network.

NVIDIA/DeepLearningExamples@729963dd. PyTorch BERT: run_pretraining.py has one DDP bucket of all gradients and 16-bit parameters;
pretraining uses LAMB.
run_squad.py, which Lambda runs too, has apex's DistributedDataParallel and amp O2. Lambda's logs of bert_base_squad, which is in no
row, show no overlap: two GPUs lose time in proportion to the bytes, 6.6 to 6.8 GB/s on RTX 4090 and 7.8 to 9.0 GB/s on V100.
TensorFlow 2 BERT: model_training_utils.py calls `hvd.allreduce` after accumulation, with `Compression.fp16` in amp. Fine-tuning
(squad_config.sh) compiles backward by XLA into clusters, which end before Horovod's operations.
mosaicml/llm-foundry@8c8dd48f scripts/train/benchmarking/README.md: FULL_SHARD with 16-bit gradients (PURE) on A100; on H100 DEFAULT, which
reduces in 32 bits (get_mixed_precision of mosaicml/composer), FULL_SHARD on 64 GPUs and SHARD_GRAD_OP from 128. No activation checkpointing.
"""
NODE_OF_SOURCE = {
    ("lambdal/deeplearning-benchmark", "V100"): "gpus: {kind: V100-SXM2-16GB, count: 8}, links: {peer_to_peer: no}",
    ("(P2P)", "4090"): "gpus: {kind: RTX-4090, count: 8}, links: {peer_to_peer: yes}",
}
"""Hosts that differ from the row's `node`, by parts of the source and of the hardware.

Lambda's V100 are virtual machines (`LambdaCloud`, results/LambdaCloud_2xV100_16GB_v1/sys_pytorch.txt). Their GPUs do not exchange data
over NVLink, by bert_base_squad as above, and NCCL copies through host memory (`ncclTopoCheckP2p` in src/graph/paths.cc of
NVIDIA/nccl@5067397: no peer-to-peer access across host bridges). `(P2P)` names a driver with peer-to-peer access.
"""
ACCUMULATE_OF_SOURCE = {("TensorFlow2/LanguageModeling/BERT", "16 x DGX-2H, BERT-512"): "12"}
"""Accumulated batches that differ from the row's `accumulate`, by parts of the source and of the description.

NVIDIA/DeepLearningExamples@729963dd TensorFlow2/LanguageModeling/BERT/scripts/configs/configurations.yml, DGX2_n16p2. The README's 24
contradicts its own global batch, 30,720.
"""

HOST_OVERHEAD_SECONDS = {"stas00/ml-engineering": 25e-6}
"""Time of a call on the host in measurements that include it, by a part of the source.

`timed_allreduce` in network/benchmarks/all_reduce_bench.py of stas00/ml-engineering@3b2d999 times one call on an idle GPU. A later
version states 20 to 30 us a call for it, and hides them.
"""

NAMED_FAULTS = {
    "NVIDIA/nccl#209": "Did you set CUDA_VISIBLE_DEVICES=0,1,3,2,7,6,4,5 on GCP ? If you didn't, that would explain the poor performance",
    "NVIDIA/nccl#495": "you are using NCCL 2.7. NCCL 2.8 or later may be able to give better performance on Ampere multi-node platforms",
}
"""Sources in which a maintainer of NCCL names what makes the bus bandwidth low, with the words. The rows stay in all other figures."""


@dataclass(frozen=True)
class Result:
    """A published figure and its prediction."""

    what: str
    source: str
    published: float
    predicted: float
    number: int
    """Place in the file, from 0."""
    size_bytes: int | None = None

    @property
    def error(self) -> float:
        """Relative error with its sign."""
        return self.predicted / self.published - 1

    @property
    def half(self) -> str:
        return "held-out" if self.number % 2 else "tune"


def read_results(path: Path) -> list[Result]:
    """Predict every row of a file.

    Args:
        path: A CSV file of scaling efficiencies or bus bandwidths.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row, before in zip(rows[1:], rows, strict=False):
        if row["source"].startswith("same"):  # the source of the row before, another place
            row["above"] = before.get("above") or before["source"]
    predict = _bus_bandwidth if rows and "busbw_GBps" in rows[0] else _scaling
    return [predict(row, number) for number, row in enumerate(rows)]


def is_bus_bandwidth(results: Iterable[Result]) -> bool:
    return any(result.size_bytes is not None for result in results)


def summary(results: list[Result]) -> dict[str, Any]:
    """Summarize the relative errors of results.

    Args:
        results: Results of one file, one or more.
    """
    errors = [result.error for result in results]
    found: dict[str, Any] = {
        "mean_absolute_error": statistics.fmean(map(abs, errors)),
        "median_absolute_error": statistics.median(map(abs, errors)),
        "bias": statistics.fmean(errors),
    }
    if not is_bus_bandwidth(results):
        right = sum((result.predicted >= VERDICT) == (result.published >= VERDICT) for result in results)
        found["verdicts_right"] = right / len(results)
    found["rows"] = len(results)
    return found


def report(results: list[Result]) -> dict[str, Any]:
    """Summarize all results, each half and, for bus bandwidths, each range of sizes.

    Args:
        results: Results of one file.
    """
    found = summary(results)
    found["halves"] = _groups(results, {half: lambda one, half=half: one.half == half for half in ("tune", "held-out")})
    if is_bus_bandwidth(results):
        found["sizes"] = _groups(
            results,
            {name: lambda one, a=a, b=b: a <= (one.size_bytes or 0) < b for name, a, b in SIZE_RANGES},
        )
        name, least, _ = SIZE_RANGES[-1]
        found["without_named_faults"] = _groups(
            results,
            {f"{name}, no fault named": lambda one: (one.size_bytes or 0) >= least and one.source not in NAMED_FAULTS},
        )
    return found


def _parts(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the parts of a report in the order in which they are shown."""
    return {"all": found, **found["halves"], **found.get("sizes", {}), **found.get("without_named_faults", {})}


def table(results: list[Result]) -> str:
    """Format all results as a table of Markdown.

    Args:
        results: Results of one file.
    """
    if is_bus_bandwidth(results):
        head = ["|what|bytes|published GB/s|predicted|error|source|", "|-|-|-|-|-|-|"]
        return "\n".join(head) + "".join(
            f"\n|{one.what}|{one.size_bytes:,}|{one.published:.4g}|{one.predicted:.4g}|{one.error:+.1%}|{one.source}|"
            for one in results
        )
    return "\n".join(["|what|published|predicted|error|source|", "|-|-|-|-|-|"]) + "".join(
        f"\n|{one.what}|{one.published:.1%}|{one.predicted:.1%}|{one.error:+.1%}|{one.source}|" for one in results
    )


def summary_table(found: Mapping[Path, list[Result]]) -> str:
    """Format the figures of each file, of its halves and of its ranges of sizes as a table of Markdown.

    Args:
        found: Results by file.
    """
    lines = ["|file|part|rows|mean error|median|bias|verdicts at 90 %|", "|-|-|-|-|-|-|-|"]
    for path, results in found.items():
        for name, part in _parts(report(results)).items():
            verdict = f"{part['verdicts_right']:.0%}" if "verdicts_right" in part else ""
            lines.append(
                f"|{path.stem}|{name}|{part['rows']}|{part['mean_absolute_error']:.1%}|"
                f"{part['median_absolute_error']:.1%}|{part['bias']:+.1%}|{verdict}|"
            )
    return "\n".join(lines)


def speeds_table() -> str:
    """Format the catalogue's speeds of one GPU, each predicted without itself, as a table of Markdown."""
    lines = ["|network|GPU|precision|batch|published samples/s|predicted without it|error|", "|-|-|-|-|-|-|-|"]
    for speed in published_speeds():
        rate = estimate_compute_rate(speed.network, speed.gpu, speed.precision, excluded=speed)
        predicted = rate.flop_per_second / network_arithmetic(speed.network).training_flop
        lines.append(
            f"|{speed.network}|{speed.gpu}|{speed.precision}|{speed.batch or '-'}|{speed.samples_per_second:g}|{predicted:.4g}|"
            f"{predicted / speed.samples_per_second - 1:+.1%}|"
        )
    return "\n".join(lines)


def _groups(results: list[Result], tests: Mapping[str, Callable[[Result], bool]]) -> dict[str, dict[str, Any]]:
    members = {name: [one for one in results if test(one)] for name, test in tests.items()}
    return {name: summary(some) for name, some in members.items() if some}


def _cluster(row: Mapping[str, str]) -> Topology:
    source, hardware = row["source"], row.get("what") or row["hardware"]
    node = _of_source(NODE_OF_SOURCE, source, hardware) or row["node"]
    node = node.strip().removeprefix("{").removesuffix("}") if node.strip().startswith("{") else node
    return parse_topology(f"nodes:\n  - {{hosts: 'node[1-2]', {node}}}\n", source)


def _gpu(topology: Topology) -> str:
    gpus = topology.nodes[0].gpus
    assert gpus is not None and gpus.spec is not None
    return gpus.spec.name


def _bus_bandwidth(row: Mapping[str, str], number: int) -> Result:
    topology = _cluster(row)
    size, hosts, each = (int(row[name]) for name in ("bytes", "hosts", "gpus_per_host"))
    workload = catalog_workload("ResNet-50", _gpu(topology))
    fabric = find_fabric(topology, workload, min(hosts, 2), each, nodes=hosts)
    source = row.get("above") or row["source"]
    overhead = next((value for part, value in HOST_OVERHEAD_SECONDS.items() if part in source), 0.0)
    seconds = collective_cost.all_reduce(fabric, size) + overhead
    ranks = hosts * each
    return Result(
        what=f"{hosts} x {each} {row['hardware']}",
        source=row["source"],
        published=float(row["busbw_GBps"]),
        predicted=size / seconds * 2 * (ranks - 1) / ranks / 1e9,
        number=number,
        size_bytes=size,
    )


def _scaling(row: Mapping[str, str], number: int) -> Result:
    topology = _cluster(row)
    batch, accumulate = int(row["batch"]), int(row.get("relative_accumulate") or 1)
    found = catalog_workload(row["network"], _gpu(topology), batch, precision=row["precision"])  # type: ignore[arg-type]
    framework = _framework(row)
    if framework.optimizer == "lamb":
        factor = LAMB_STEP_BYTES / OPTIMIZERS["adam"].step_bytes
        found = msgspec.structs.replace(found, optimizer_seconds=factor * found.optimizer_seconds)
    if speed := row["one_gpu_samples_per_second"]:
        found = _at_speed(found, float(speed), accumulate)
    found = msgspec.structs.replace(found, overlaps=framework.overlaps)
    if framework.has_half_gradients and row["precision"] == "amp":
        found = msgspec.structs.replace(found, gradients=tuple(map(_half, found.gradients)))
    if given := _of_source(ACCUMULATE_OF_SOURCE, row["source"], row["what"]):
        row = {**row, "accumulate": given}
    base = _throughput(row, topology, found, "relative_to_hosts", "relative_to_gpus_per_host", "relative_accumulate")
    return Result(
        what=row["what"],
        source=row["source"],
        published=float(row["published_efficiency"]),
        predicted=_throughput(row, topology, found, "hosts", "gpus_per_host", "accumulate") / base,
        number=number,
    )


def _of_source(named: Mapping[tuple[str, str], str], source: str, what: str) -> str:
    """Return the value whose key has a part of the source and of the other text; empty if there is none."""
    return next((value for (one, other), value in named.items() if one in source and other in what), "")


def _framework(row: Mapping[str, str]) -> Framework:
    return FRAMEWORKS[
        row.get("framework") or _of_source(FRAMEWORK_OF_SOURCE, row["source"], f"{row['what']}, {row['network']}")
    ]


def _half(gradient: Gradient) -> Gradient:
    return msgspec.structs.replace(gradient, dtype="float16", size_bytes=2 * gradient.elements)


def _at_speed(workload: Workload, samples_per_second: float, accumulate: int) -> Workload:
    """Scale the passes to a published speed of one GPU; the optimizer stays."""
    wanted = workload.batch / samples_per_second
    passes = wanted - workload.optimizer_seconds / accumulate
    factor = max(passes, 0.5 * wanted) / (workload.forward_seconds + workload.backward_seconds)
    return msgspec.structs.replace(
        workload,
        forward_seconds=workload.forward_seconds * factor,
        backward_seconds=workload.backward_seconds * factor,
        gradients=tuple(
            msgspec.structs.replace(each, ready_seconds=each.ready_seconds * factor) for each in workload.gradients
        ),
    )


def _throughput(
    row: Mapping[str, str], topology: Topology, workload: Workload, hosts: str, each: str, accumulate: str
) -> float:
    """Predict the samples per second and GPU."""
    count, gpus, batches = (int(row.get(name) or 1) for name in (hosts, each, accumulate))
    framework = _framework(row)
    strategy = msgspec.structs.replace(framework.strategy, accumulate=batches)
    if row["precision"] == "amp" and framework.compression.format != "fp32":
        strategy = msgspec.structs.replace(strategy, gradients=framework.compression)
    predicted: Prediction = predict_step(
        topology, workload, strategy, hosts=min(count, 2), nodes=count, ranks_per_host=gpus
    )
    return predicted.samples_per_second / predicted.ranks


def _text(path: Path, results: list[Result]) -> str:
    lines = [f"{path.name}"]
    for name, part in _parts(report(results)).items():
        verdict = f"  verdicts {part['verdicts_right']:6.1%}" if "verdicts_right" in part else ""
        lines.append(
            f"  {name:31} mean {part['mean_absolute_error']:6.1%}  median {part['median_absolute_error']:6.1%}  "
            f"bias {part['bias']:+7.1%}{verdict}  {part['rows']} rows"
        )
    return "\n".join(lines)


def main() -> None:
    """Evaluate files of published results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.csv")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print JSON; one object for one file, else one for each")
    shown.add_argument("--markdown", action="store_true", help="print a table of every row")
    parser.add_argument("--half", choices=["tune", "held-out"], help="evaluate one half only")
    parser.add_argument("--each", action="store_true", help="print every row, largest error first")
    given = parser.parse_args()
    found = {path: [one for one in read_results(path) if given.half in (None, one.half)] for path in given.files}
    if given.json:
        reports = {path.name: report(results) for path, results in found.items()}
        print(json.dumps(reports if len(reports) > 1 else next(iter(reports.values())), indent=1))
    elif given.markdown:
        print(markdown(found), end="")
    else:
        for path, results in found.items():
            print(_text(path, results))
            for one in sorted(results, key=lambda one: -abs(one.error)) if given.each else ():
                size = f"{one.size_bytes:>12,}" if one.size_bytes is not None else ""
                print(f"  {one.half:8} {one.error:+7.1%} {size} {one.published:8.4g} {one.predicted:8.4g}  {one.what}")


def markdown(found: Mapping[Path, list[Result]]) -> str:
    """Format the page with every row.

    Args:
        found: Results by file.
    """
    parts = ["# Published results, predicted from the catalogue\n", summary_table(found) + "\n"]
    parts += [f"## {path.name}\n\n{table(results)}\n" for path, results in found.items()]
    parts += [f"## Speeds of one GPU in the catalogue\n\n{speeds_table()}\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    main()
