"""Workloads to plan with: those of the catalogue, for any GPU that it has, and profiles in files.

The figures and their sources are in `workloads.yaml`. A measured profile beats all of it.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import os
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from distrib import units
from distrib.bandwidth_model import architectures
from distrib.bandwidth_model.architectures import Network
from distrib.bandwidth_model.workload import Gradient, Workload, checked
from distrib.cluster.hardware_catalog import GpuSpec, catalog, find_gpu, gpu_hint
from distrib.errors import ConfigError
from distrib.utils import files

Precision = Literal["amp", "tf32", "fp32"]
PATH = Path(__file__).with_name("workload_catalog.yaml")

STATE_BYTES = {"sgd": 12, "adam": 16}
"""Of a parameter: itself, its gradient and what the optimizer keeps (a momentum; two moments), 4 bytes each."""
STEP_BYTES = {"sgd": 20, "adam": 28}
"""What an optimizer reads and writes of a parameter in a step: all of that, and back what it changes."""
STREAM = 0.75
"""The part of a GPU's memory bandwidth that such passes reach (BabelStream reports 0.7 to 0.9)."""


class _Source(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    verified: bool = True


class _Other(msgspec.Struct, forbid_unknown_fields=True):
    amp: float
    memory_bandwidth: str
    source: str


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    kind: Literal["resnet", "vgg", "vit", "bert", "gpt2"]
    shape: dict[str, Any]
    batch: int
    optimizer: Literal["sgd", "adam"]
    like: str | None = None


class Speed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A published training speed of one GPU."""

    network: str
    gpu: str
    precision: Precision
    batch: int
    samples_per_second: float
    source: str


class _Errors(msgspec.Struct, forbid_unknown_fields=True):
    published: float
    scaled: float
    borrowed: float


class _File(msgspec.Struct, forbid_unknown_fields=True):
    errors: _Errors
    sources: dict[str, _Source]
    others: dict[str, _Other]
    networks: dict[str, _Entry]
    speeds: tuple[Speed, ...]


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a GPU trains a network: operations a second that it really does, the error to expect, and where from."""

    flop_per_second: float
    expected_error: float
    origin: str


def names() -> tuple[str, ...]:
    """The networks of the catalogue."""
    return tuple(_file().networks)


def network(name: str) -> Network:
    """The arithmetic of a network of the catalogue. Raises ConfigError for any other name."""
    return _network(_named(name))


def workload(name: str, gpu: str, batch: int | None = None, *, precision: Precision | None = None) -> Workload:
    """What a step of `batch` samples of a catalogued network takes on one `gpu`.

    `precision` is amp where the GPU has tensor cores, else fp32. A step's time grows
    with its batch. Raises ConfigError for networks and GPUs that are not in the catalogues.
    """
    key = _named(name)
    spec = find_gpu(gpu)
    if spec is None:
        raise ConfigError(f"GPU {gpu!r} is not in the catalogue", hint=gpu_hint(gpu))
    entry = _file().networks[key]
    samples = entry.batch if batch is None else batch
    if samples < 1:
        raise ConfigError(f"a batch of {samples} samples", hint="give 1 or more")
    chosen: Precision = precision or ("amp" if "fp16" in spec.tflops and not spec.name.startswith("P100") else "fp32")
    arithmetic = _network(key)
    pace = _pace(key, spec.name, chosen)
    optimizer_seconds = (
        arithmetic.elements * STEP_BYTES[entry.optimizer] / (spec.memory_bandwidth_bytes_per_second.value * STREAM)
    )
    # Published speeds are of many samples between two steps of the optimizer, which is little of them; here it adds.
    passes_seconds = samples * arithmetic.training_flop / pace.flop_per_second
    backward_seconds = passes_seconds * 2 / 3
    element_bytes = 2 if chosen == "amp" else 4
    state_bytes = STATE_BYTES[entry.optimizer] + (2 if chosen == "amp" else 0)
    return Workload(
        name=key,
        origin="catalogued",
        device=spec.name,
        batch=samples,
        forward_seconds=passes_seconds / 3,
        backward_seconds=backward_seconds,
        optimizer_seconds=optimizer_seconds,
        gradients=_gradients(arithmetic, backward_seconds),
        parameter_bytes=4 * arithmetic.elements,
        memory_bytes=state_bytes * arithmetic.elements + samples * element_bytes * arithmetic.activation_elements,
        expected_error=pace.expected_error,
        software={"precision": chosen, "speed": pace.origin},
    )


def speeds() -> tuple[Speed, ...]:
    """The published speeds."""
    return _file().speeds


def read_workload(path: str | os.PathLike[str]) -> Workload:
    """A profile that `distrib-launch --profile` wrote. Raises ConfigError, with the path inside, for what is none."""
    shown = os.fspath(path)
    again = "write one with distrib-launch --profile FILE SCRIPT"
    try:
        # Python's reads NaN and infinities too, so that what they stand for can be named.
        found = msgspec.convert(json.loads(Path(path).read_bytes()), Workload)
    except OSError as error:
        raise ConfigError(f"cannot read {shown}: {error.strerror}", hint=again) from None
    except msgspec.ValidationError as error:
        unknown = re.match(r"Object contains unknown field `(.*?)`", str(error))
        fields = [field.name for kind in (Workload, Gradient) for field in msgspec.structs.fields(kind)]
        near = difflib.get_close_matches(unknown[1], fields, n=1) if unknown else []
        raise ConfigError(f"{shown}: {error}", hint=f"did you mean {near[0]}?" if near else again) from None
    except json.JSONDecodeError as error:
        what = f"{shown}:{error.lineno}: is no JSON: {error.msg}"
        raise ConfigError(what, hint=again) from None
    except (ValueError, RecursionError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else "is no JSON in UTF-8"
        raise ConfigError(f"{shown}: {what}", hint=again) from None
    return checked(found, shown)


def is_file(given: str) -> bool:
    """Whether `--workload` names a file, not a network of the catalogue."""
    return files.is_file(given) or "/" in given or given.endswith(".json")


def scaled(workload: Workload, *, batch: int | None = None, gpu: str | None = None) -> Workload:
    """`workload` with another batch or on another GPU.

    Time grows in proportion to the batch. Between two GPUs of the catalogue it goes with the geometric mean of peak
    throughput and memory bandwidth. Raises ConfigError where the workload's device is in no catalogue.
    """
    factor, device, error = 1.0, workload.device, workload.expected_error
    if gpu is not None:
        before, after = find_gpu(workload.device), find_gpu(gpu)
        if after is None:
            raise ConfigError(f"GPU {gpu!r} is not in the catalogue", hint=gpu_hint(gpu))
        if before is None:
            raise ConfigError(
                f"{workload.name} was measured on {workload.device}, from which no GPU's time follows",
                hint="profile the script on a GPU of the catalogue, or leave out --gpu",
            )
        if before is not after:
            factor = times_as_long(before, after)
            device, error = after.name, max(error, scaled_error())
    optimizer = workload.optimizer_seconds * factor
    samples = workload.batch if batch is None else batch
    if samples < 1:
        raise ConfigError(f"--batch {samples}: no samples", hint="give 1 or more")
    factor *= samples / workload.batch
    memory = workload.memory_bytes
    if memory is not None and samples != workload.batch:
        # What is not the state of the parameters grows with the batch.
        state = min(memory, 4 * workload.parameter_bytes)
        memory = state + round((memory - state) * samples / workload.batch)
    return msgspec.structs.replace(
        _slower(workload, factor),
        batch=samples,
        device=device,
        optimizer_seconds=optimizer,
        loader_seconds=workload.loader_seconds * samples / workload.batch,
        loading_processor_seconds=workload.loading_processor_seconds * samples / workload.batch,
        memory_bytes=memory,
        expected_error=error,
    )


def times_as_long(before: GpuSpec, after: GpuSpec) -> float:
    """What a step takes on another GPU for what it took: by the geometric mean of peak throughput and memory bandwidth."""
    precision: Precision = "amp" if "fp16" in before.tflops and "fp16" in after.tflops else "fp32"
    return 1.0 if before is after else _strength(before.name, precision) / _strength(after.name, precision)


def scaled_error() -> float:
    """The relative error to expect of a step that was measured on one GPU and predicted for another."""
    return _file().errors.scaled


def on_processors(workload: Workload, processors: int) -> Workload:
    """`workload` where a rank computes with fewer processors than it was profiled with; with as many or more, itself.

    What kept all of them busy takes longer in proportion, the rest kept one: so far Amdahl, and how much that is follows from
    the share of them that was busy.
    """
    before = workload.processors
    if workload.device != "cpu" or processors >= before:
        return workload
    busy = workload.processor_share * before
    parallel = max(0.0, busy - 1) / (before - 1)
    factor = 1 + parallel * (before / processors - 1)
    return msgspec.structs.replace(
        _slower(workload, factor),
        optimizer_seconds=workload.optimizer_seconds * factor,
        processor_share=min(1.0, busy / factor / processors),
        processors=processors,
    )


def _slower(workload: Workload, factor: float) -> Workload:
    """Its passes, and with them its gradients, take `factor` times as long."""
    return msgspec.structs.replace(
        workload,
        forward_seconds=workload.forward_seconds * factor,
        backward_seconds=workload.backward_seconds * factor,
        gradients=tuple(
            msgspec.structs.replace(gradient, ready_seconds=gradient.ready_seconds * factor)
            for gradient in workload.gradients
        ),
    )


# -- inside -----------------------------------------------------------------------------------------------------------


@functools.cache
def _file() -> _File:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return msgspec.convert(yaml.load(PATH.read_text(encoding="utf-8"), loader), _File)


def _named(name: str) -> str:
    """The catalogue's name of a network, however it is written."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    known = {plain(each): each for each in names()}
    known |= {"gpt2small": "GPT-2", "vitb16": "ViT-B", "vitbase": "ViT-B"}
    if plain(name) in known:
        return known[plain(name)]
    near = difflib.get_close_matches(plain(name), list(known), n=1, cutoff=0.5)
    raise ConfigError(
        f"--workload {name}: no such file, and not in the catalogue",
        hint=(f"did you mean {known[near[0]]}? It" if near else "it") + f" has {', '.join(names())}",
    )


@functools.cache
def _network(key: str) -> Network:
    entry = _file().networks[key]
    build: Any = getattr(architectures, entry.kind)
    built: Network = build(**{field: tuple(v) if isinstance(v, list) else v for field, v in entry.shape.items()})
    return built


def _gradients(arithmetic: Network, backward_seconds: float) -> tuple[Gradient, ...]:
    """Each parameter's gradient is ready when backward has done the work of its layer and of those behind it."""
    total = arithmetic.forward_products
    done = arithmetic.tail_products
    found = []
    for parameter in reversed(arithmetic.parameters):
        done += parameter.products
        found.append(
            Gradient(
                name=parameter.name,
                elements=parameter.elements,
                size_bytes=4 * parameter.elements,
                ready_seconds=backward_seconds * done / total,
            )
        )
    return tuple(found)


def _pace(key: str, gpu: str, precision: Precision, without: Speed | None = None) -> Pace:
    """The pace of a GPU; `without` is left out of what is known, to see what would be said of it."""
    file = _file()
    titles = file.sources
    looked = key
    borrowed = False
    while True:
        known = [s for s in file.speeds if s.network == looked and s.precision == precision and s is not without]
        if known:
            break
        onwards = file.networks[looked].like
        if onwards is None:
            # Nobody has published any in this precision: as part of the peak it is what it is in another.
            known = [s for s in file.speeds if s.network == looked and s is not without]
            borrowed = True
            break
        looked, borrowed = onwards, True
    for speed in known:
        if speed.gpu == gpu and not borrowed:
            flop = speed.samples_per_second * _network(looked).training_flop
            return Pace(
                flop_per_second=flop, expected_error=file.errors.published,
                origin=f"published: {titles[speed.source].title}",
            )  # fmt: skip
    strength = _strength(gpu, precision)
    below = max((s for s in known if _strength_of(s) <= strength), key=_strength_of, default=None)
    above = min((s for s in known if _strength_of(s) > strength), key=_strength_of, default=None)
    nearest = above if below is None or (above and _strength_of(above) * _strength_of(below) < strength**2) else below
    assert nearest is not None
    rate = nearest.samples_per_second * strength / _strength_of(nearest)
    if below and above:  # between two that are known: a straight line, in logarithms
        part = math.log(strength / _strength_of(below)) / math.log(_strength_of(above) / _strength_of(below))
        rate = below.samples_per_second ** (1 - part) * above.samples_per_second**part
    flop = rate * _network(looked).training_flop
    return Pace(
        flop_per_second=flop,
        expected_error=file.errors.borrowed if borrowed else file.errors.scaled,
        origin=f"scaled from {nearest.network} on {nearest.gpu}: {titles[nearest.source].title}",
    )


def _strength_of(speed: Speed) -> float:
    return _strength(speed.gpu, speed.precision)


def _strength(gpu: str, precision: Precision) -> float:
    """The geometric mean of peak operations and bytes a second."""
    other = _file().others.get(gpu)
    bandwidth = (
        units.parse_rate(other.memory_bandwidth) if other else _spec(gpu).memory_bandwidth_bytes_per_second.value
    )
    return math.sqrt(_peak(gpu, precision) * bandwidth)


def _peak(gpu: str, precision: Precision) -> float:
    """Operations a second by data sheet."""
    other = _file().others.get(gpu)
    if other:
        return other.amp * 1e12
    tflops = _spec(gpu).tflops
    kind: Any = "fp16" if precision == "amp" else precision
    return (tflops[kind] if kind in tflops else tflops["fp32"]).value * 1e12


@functools.cache
def _spec(name: str) -> GpuSpec:
    return next(gpu for gpu in catalog().gpus if gpu.name == name)
