"""Saving and restoring of a job's checkpoints: the main rank writes, and all ranks restore the newest valid file.

A restartable job has replicas on its other hosts (`replicas`). The content of the file is in `checkpoint_format`.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler

from distrib import units
from distrib.errors import TrainingError
from distrib.training.checkpoint import checkpoint_format, replicas
from distrib.training.checkpoint.rank_states import RankStates, plain_values, resumes_training
from distrib.training.collectives import JobCollectives, gather_objects
from distrib.training.strategies.base import ElasticStrategy
from distrib.training.to_device import move_to_device
from distrib.training.training_state import TrainingState
from distrib.utils.log import PLAIN, get_logger

log = get_logger("checkpoint")


class Checkpoints:
    """Checkpoints of a job: written by the main rank and by replica writers, restored by all ranks."""

    def __init__(self, run: replicas.Run, state: TrainingState, collectives: JobCollectives) -> None:
        """Create the manager.

        Args:
            run: The run of this start of the job.
            state: The training, whose strategy has a state that is saved too.
            collectives: The job's collectives.
        """
        strategy = state.strategy
        self._run, self._strategy, self._world, self._device = run, strategy, strategy.world, strategy.device
        self._state, self._collectives, self._elastic = state, collectives, isinstance(strategy, ElasticStrategy)
        self._rank_states = RankStates(strategy, collectives)
        self._earlier_steps = 0
        """Steps before the checkpoint that was restored."""
        self._saves: Counter[str] = Counter()
        self._has_warned = self._has_warned_of_schedules = False

    def save(
        self,
        path: str | os.PathLike[str],
        objects: dict[str, Any],
        per_rank: dict[str, Any] | None = None,
        *,
        keep: int,
        is_main: bool,
    ) -> None:
        """Write a checkpoint if this rank is the main rank or writes a replica; see `Job.save`.

        Args:
            path: The file.
            objects: Objects with a `state_dict`, and plain values, by name.
            per_rank: The same of this rank alone; None for nothing.
            keep: Number of checkpoints to keep, with this one.
            is_main: True on the main rank.

        Raises:
            TrainingError: A value could not be loaded with `weights_only=True`. Replica writers warn instead.
        """
        if type(keep) is not int or keep < 1:
            raise TrainingError(f"job.save: keep is {keep!r}, expected 1 or more", code="checkpoint-unsavable")
        place = os.path.realpath(path)
        self._saves[place] += 1
        stamp = self._run.stamp(self._saves[place])
        is_replica = not is_main and self._writes_replica(path)
        states = self._rank_states.gather(objects, per_rank, is_writer=is_main or is_replica)
        if is_main:
            if self._strategy.replicas_differ and any(isinstance(thing, nn.Module) for thing in objects.values()):
                self._warn_replicas_differ()
            checkpoint_format.write(path, objects, self._backend_state(states), stamp, keep=keep)
        elif is_replica:
            try:
                checkpoint_format.write(path, objects, self._backend_state(states), stamp, keep=keep)
            # A full disk, or a state that only the main rank has. The main rank's checkpoint exists in any case.
            except Exception as error:
                warnings.warn(f"no copy of {os.fspath(path)} on this host: {error}", stacklevel=3)

    def _backend_state(self, states: list[Any]) -> dict[str, Any]:
        """Return the state of the strategy, the ranks' own states, and the numbers on which schedules depend."""
        job = {
            "ranks": self._world.size,
            "batches": self._world.size * self._state.accumulate,
            "steps": self._earlier_steps + self._state.fewest_steps,
            "states": states,
        }
        return {**self._strategy.state_dict(), "job": job}

    def _warn_replicas_differ(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.info(
                "the checkpoint has only the main rank's parameters: ranks differ within a round of --mode local\n"
                "  call job.settle() on every rank before job.save, or save at the end of an epoch"
            )

    def restore(
        self, path: str | os.PathLike[str], objects: dict[str, Any], per_rank: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Load the newest complete and valid checkpoint on all ranks; see `Job.restore`. Collective.

        Args:
            path: The file.
            objects: Objects to load, and defaults of plain values, by name.
            per_rank: The same of this rank alone.

        Returns:
            The plain values by name.

        Raises:
            TrainingError: No file is a valid checkpoint, or the newest one does not match the objects.
        """
        place = Path(path).absolute()
        found = self._read_newest(place, objects)
        if found is None:
            if self._world.rank == 0:
                how = "warning: the job was restarted, but there is" if self._run.restarts else "note:"
                log.info(f"{how} no file {place}: nothing is restored", extra=PLAIN)
            return plain_values(objects) | ({} if per_rank is None else {"per_rank": plain_values(per_rank)})
        values, state, number = found
        job = state.pop("job", {"ranks": self._world.size, "batches": 0, "steps": 0, "states": []})
        if resumes_training(objects):
            self._earlier_steps = job["steps"] - self._state.fewest_steps
        else:
            state = {}  # only weights are restored, perhaps from a job with other optimizers
        if any(map(checkpoint_format.has_state, objects.values())):
            self._strategy.load_state_dict(move_to_device(state, self._device))
        own = self._rank_states.restore(job["states"], objects, per_rank, source=os.fspath(path))
        if own or per_rank is not None:
            values["per_rank"] = own
        if self._world.rank == 0:
            numbers = "".join(f", {name} {value}" for name, value in values.items() if isinstance(value, int))
            log.info(f"restored {os.fspath(path)}{number}{numbers}", extra=PLAIN)
            self._warn_of_schedules(os.fspath(path), job, objects)
        return values

    def _warn_of_schedules(self, path: str, job: dict[str, Any], objects: dict[str, Any]) -> None:
        """Warn once of schedules that have counted the steps of another number of ranks."""
        ranks, size = job["ranks"], self._world.size
        counting = [name for name, thing in objects.items() if 2 * _count_calls(thing) > job["steps"] > 0]
        if (
            not counting
            or ranks == size
            or job["batches"] == size * self._state.accumulate
            or self._has_warned_of_schedules
        ):
            return
        self._has_warned_of_schedules = True
        effect = "does not reach its end"
        if size < ranks:
            effect = "ends too early: a cosine rises again, OneCycleLR raises ValueError"
        log.warning(
            f"{path} is of {units.count_text(ranks, 'rank')}, this job has {size}: an epoch has other steps than "
            f"{', '.join(counting)} was made for, which {effect}\n"
            "  count epochs in it, or create it again from the epoch and leave it out of job.restore"
        )

    def _read_newest(self, path: Path, objects: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str] | None:
        """Load the newest valid copy of a checkpoint. Collective.

        Returns:
            The plain values, the strategy's state, and the end of the file's name after `path`; None if no file exists.
        """
        copies = self._copies(path)
        failures: list[Exception] = []
        while any(copies):
            source = replicas.newest(_first_stamps(copies), self._run)
            chosen = copies[source][0]
            try:
                read = functools.partial(checkpoint_format.content, chosen.path)
                data = self._collectives.broadcast_content(source, read)
                if data is not None:
                    self._strategy.finish_rounds()  # objects that are not restored continue from common parameters
                    values, state = checkpoint_format.read(data, objects, self._device, source=chosen.path)
                    if source and self._world.rank == source:
                        log.info(f"rank {source} reads {chosen.path}: the newest copy")
                    if self._world.rank == 0:
                        _warn_of_others(copies, source, failures)
                    return values, state, chosen.path.removeprefix(str(path))
            except (OSError, TrainingError) as error:
                if isinstance(error, TrainingError) and error.code == "checkpoint-mismatch":
                    raise
                failures.append(error)
            copies = [[copy for copy in own if copy.identity != chosen.identity] for own in copies]
        if failures:
            raise failures[0]
        return None

    def _writes_replica(self, path: str | os.PathLike[str]) -> bool:
        """Test if this rank writes a replica for its host."""
        one_of_its_host = self._world.local_rank == 0 and self._world.local_size < self._world.size
        return bool(self._run.max_restarts) and one_of_its_host and not self._elastic and not replicas.is_shared(path)

    def _copies(self, path: Path) -> list[list[replicas.Copy]]:
        """Find the copies of a checkpoint by rank in a restartable job, else those of the main rank. Collective."""
        if self._elastic or self._world.size == 1 or not self._run.max_restarts:
            return [self._collectives.from_main(lambda: replicas.copies_of(path))]
        return gather_objects(replicas.copies_of(path))


def _count_calls(thing: Any) -> int:
    """Count the calls of a schedule's `step()`; 0 for anything else."""
    if isinstance(thing, ChainedScheduler):
        return max(map(_count_calls, thing._schedulers))
    return thing.last_epoch if isinstance(thing, LRScheduler) else 0


def _first_stamps(copies: list[list[replicas.Copy]]) -> list[replicas.Stamp | None]:
    return [own[0].stamp if own else None for own in copies]


def _warn_of_others(copies: list[list[replicas.Copy]], source: int, failures: list[Exception]) -> None:
    """Warn of files that were skipped because they are damaged, and of a later checkpoint of another run."""
    chosen = copies[source][0]
    skipped = [str(error) for error in failures]
    if chosen.stamp != replicas.NO_STAMP:
        unreadable = {
            own[0].identity: rank for rank, own in enumerate(copies) if own and own[0].stamp == replicas.NO_STAMP
        }
        skipped += [
            f"{copies[rank][0].path} of rank {rank} is not a complete checkpoint" for rank in unreadable.values()
        ]
    for what in skipped:
        log.warning(f"checkpoint skipped: {what}\n  restored instead: {chosen.path} of rank {source}")
    if later := replicas.later(_first_stamps(copies), source):
        rank, own_stamp, later_stamp = later
        log.warning(
            f"restored {chosen.path} of rank {source}, written {_when(own_stamp)}: rank {rank} has a later one of another run, "
            f"written {_when(later_stamp)}\n  to continue from the later one, remove the older file before the next checkpoint"
        )


def _when(stamp: replicas.Stamp) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(stamp.time))
