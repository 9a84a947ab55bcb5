"""Checkpoints: one file, written whole or not at all, that opens without running code."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from distrib.errors import TrainingError
from distrib.training.synchronous import unwrapped

_FORMAT = 1


def write(path: str | os.PathLike[str], objects: dict[str, Any], backend: dict[str, Any] | None = None) -> None:
    """Writes the states of `objects` and the plain values among them to `path`, in place of what is there.

    Models are named as they were before `prepare` and torch.compile. `backend` is the state of the mode of training.

    The file is complete at every moment: it is written beside `path`, brought to the disk and then renamed.
    Raises TrainingError for a value that `read` could not open safely.
    """
    states = {name: _state(thing) for name, thing in objects.items() if has_state(thing)}
    values = {name: thing for name, thing in objects.items() if not has_state(thing)}
    for name, value in values.items():
        if not _is_plain(value):
            raise TrainingError(
                f"cannot save {name!r}, a {type(value).__name__}",
                hint="save objects with a state_dict, tensors, numbers, strings, or lists and dicts of them",
            )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save({"distrib": _FORMAT, "states": states, "values": values, "backend": backend or {}}, file)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)  # mkstemp's file is for the owner alone
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def content(path: str | os.PathLike[str]) -> bytes | None:
    """The bytes of the file, or None where there is no such file."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return None


def read(data: bytes, objects: dict[str, Any], *, source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gives the states in `data` to `objects`; returns the plain values, over the ones in `objects`, and the backend's state.

    Raises TrainingError when `data` is no checkpoint, or lacks the state of an object.
    """
    try:
        saved = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        states, values = saved["states"], saved["values"]
    except Exception as error:  # torch raises a dozen kinds here
        raise TrainingError(f"{source} is no checkpoint of job.save: {error}") from error
    wanted = {name: thing for name, thing in objects.items() if has_state(thing)}
    if missing := sorted(wanted.keys() - states.keys()):
        raise TrainingError(
            f"{source} holds no state of {', '.join(missing)}", hint=f"it holds {', '.join(sorted(states)) or 'none'}"
        )
    for name, thing in wanted.items():
        try:
            _load(thing, states[name])
        except (RuntimeError, ValueError, KeyError) as error:
            raise TrainingError(f"{source}: the state of {name} does not fit: {error}") from error
    return {**{name: thing for name, thing in objects.items() if name not in wanted}, **values}, saved.get(
        "backend", {}
    )


_COMPILED = "_orig_mod."
"""What torch.compile puts before the names in a module that it compiled inside another one."""


def _state(thing: Any) -> Any:
    state = unwrapped(thing).state_dict()
    if isinstance(thing, torch.nn.Module) and any(_COMPILED in name for name in state):
        return {name.replace(_COMPILED, ""): value for name, value in state.items()}
    return state


def _load(thing: Any, state: Any) -> None:
    thing = unwrapped(thing)
    if isinstance(thing, torch.nn.Module):
        names = {name.replace(_COMPILED, ""): name for name in thing.state_dict()}
        if any(_COMPILED in name for name in names.values()):
            state = {names.get(name, name): value for name, value in state.items()}
    thing.load_state_dict(state)


def has_state(thing: Any) -> bool:
    """Whether `thing` is saved by its state, not as a plain value."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, complex, str, bytes) or isinstance(value, torch.Tensor)


def _sync_folder(folder: Path) -> None:
    """Brings the renaming to the disk too, where the file system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
