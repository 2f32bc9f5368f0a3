"""Learning with others: several learners, each from its own share of a batch, make the updates of one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from shoal import envs
from shoal.core.algorithm import Algorithm
from shoal.core.doing import span
from shoal.core.errors import Fatal
from shoal.core.randomness import derive, seed_everything
from shoal.core.rights import calls
from shoal.core.settings import at
from shoal.core.types import Array, Batch, Loss, Store, Work
from shoal.workers.model import Model, Optimizes, Updated, descend, differentiated, pick_device
from shoal.workers.prefetch import Batches
from shoal.workers.progress import Count, Progress
from shoal.workers.saving import contents, from_contents

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.services.journal import Journal
    from shoal.services.reduction import Reduction


class Joint:
    """This learner's part in the updates that all learners make together."""

    def __init__(self, reduction: Reduction, model: Model, members: int, store: Store | None) -> None:
        """Take part from the first round; `store` takes new priorities, None where there are none."""
        if [*model.net.buffers()]:
            raise Fatal(
                "learners: several learners do not share the running statistics of a network: "
                "set learners to 1, or switch off its normalisation"
            )
        self.reduction, self.members, self.store, self.round = reduction, members, store, 0
        self.parts = [part for part in model.net.parameters() if part.requires_grad]
        self.own = 0  # steps of this learner so far, which it reports with its gradient
        self.steps = 0  # the sum of what all learners reported in the last round

    def begin(self, model: Model, now: Progress) -> None:
        """As the leader: give every learner what to begin with."""
        opening = {**contents(model), "state": asdict(now)}
        self.reduction.begin(sum(part.numel() for part in self.parts), opening)

    def step(
        self, algorithm: Algorithm[Any], net: nn.Module, target: nn.Module, optimizer: Optimizes, batch: Batch
    ) -> Generator[bool, None, Loss]:
        """A step of the optimizer down the mean of all learners' gradients; metrics are means too."""
        try:
            with span("update"):
                loss, total = differentiated(algorithm, net, target, optimizer, batch, 1)
        except torch.OutOfMemoryError as error:
            raise Fatal(
                "a learner's share of a batch does not fit into the GPU's memory, and with several learners it is not "
                f"cut: raise learners, or lower algorithm.batch or algorithm.unroll; {str(error).splitlines()[0]}"
            ) from None
        numbers = {name: float(value.detach()) for name, value in loss.metrics.items()}
        if self.store is not None and total.isfinite():  # before the leader can save what this round leads to
            self.store.update(batch.key, loss.priority.detach().cpu().numpy())
        beside = {**numbers, "total": float(total), "steps": float(self.own)}
        self.reduction.put(self.round, flat(self.parts), beside)
        while (mean := self.reduction.take(self.round)) is None:
            yield False
        self.round += 1
        self.steps = round(mean["numbers"]["steps"] * self.members)
        for name in numbers:
            loss.metrics[name] = torch.tensor(mean["numbers"].get(name, float("nan")), device=total.device)
        if "vector" in mean and "total" in mean["numbers"]:
            spread(mean["vector"], self.parts)
            descend(algorithm, net, optimizer, loss, total)
        else:
            loss.metrics["finite"] = torch.zeros((), device=total.device)
        return loss


def unless(over: Callable[[], bool], work: Generator[bool, None, Updated]) -> Generator[bool, None, Updated | None]:
    """An update, asking each time it waits for other learners whether it is `over`; None: it was, and is given up.

    The steps that were taken so far stay, since nothing says that the others will ever come.
    """
    while True:
        try:
            waits = next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if over():
            work.close()
            return None
        yield waits


def flat(parts: list[nn.Parameter]) -> Array:
    """The gradients of parameters as one vector; that of a parameter without a part in the loss is zero."""
    gradients = [torch.zeros_like(part) if part.grad is None else part.grad for part in parts]
    vector: Array = torch.cat([gradient.reshape(-1) for gradient in gradients]).cpu().numpy()
    return vector


def spread(vector: Array, parts: list[nn.Parameter]) -> None:
    """Make a vector the gradients of parameters; one without a part in the loss keeps none."""
    pieces = torch.split(torch.tensor(vector), [part.numel() for part in parts])
    for part, piece in zip(parts, pieces, strict=True):
        if part.grad is not None:
            part.grad.copy_(piece.view_as(part))


class Stores:
    """The stores of all learners, as far as a checkpoint is concerned."""

    def __init__(self, stores: Sequence[Store]) -> None:
        """Take them in the order of the learners."""
        self.stores = stores

    def settle(self) -> Mapping[str, Array]:
        """Everything in every store, by its number."""
        return {
            f"{index}/{name}": array
            for index, store in enumerate(self.stores)
            for name, array in store.settle().items()
        }

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Put back what `settle` returned."""
        if not saved:
            return
        count = 1 + max(int(name.partition("/")[0]) if "/" in name else 0 for name in saved)
        if count != len(self.stores) or any("/" not in name for name in saved):
            raise Fatal(f"the checkpoint holds the replay of another number of learners than {len(self.stores)}")
        for index, store in enumerate(self.stores):
            start = f"{index}/"
            store.restore({key.removeprefix(start): value for key, value in saved.items() if key.startswith(start)})


@calls(store=("status", "get", "update", "refused"), reduction=("state", "put", "take"), journal=("report",))
def assist(experiment: Experiment, store: Store, reduction: Reduction, journal: Journal) -> Work:
    """Be a learner that does not lead: bring gradients of its own share, and make the same updates as all."""
    algorithm, lockstep = experiment.algorithm, experiment.lockstep
    torch.set_num_threads(experiment.learner_threads)
    own = int(np.random.randint(2**31))
    model = Model(algorithm, envs.spec_of(experiment.environment), pick_device(experiment.device), lockstep)
    while (opening := reduction.state()) is None:
        yield False
    from_contents(model, opening)
    now = Progress.of(opening)
    joint = Joint(reduction, model, experiment.learners, store if experiment.prioritized else None)
    count, last, reported = Count(store, now.steps), now.steps, 0.0
    if lockstep:
        seed_everything(derive(own, now.period))
    yield True
    with Batches(experiment, store, model, now) as batches:
        while True:
            torch.set_num_threads(experiment.learner_threads)
            status = store.status()
            drawn = batches.take(now)
            if status["refused"] != reported:
                reported = status["refused"]
                for problem in store.refused():
                    journal.report(problem)
            if drawn is None:
                yield False
                continue
            batch, present = drawn.batch, at(algorithm, now.steps, experiment.steps)
            joint.own = count.learned(status, batch)
            _, updates, _ = yield from model.updating(present, batch, now.updates, joint.step)
            now.steps = count.begin + joint.steps
            now.updates, now.version = now.updates + updates, now.version + 1
            if lockstep and now.steps - last >= experiment.checkpoint_interval:  # the leader saves a checkpoint now
                now.period, last = now.period + 1, now.steps
                seed_everything(derive(own, now.period))
            yield True
