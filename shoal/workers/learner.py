"""Learning: batches from the store become new weights."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any

import numpy as np
import torch

from shoal import envs
from shoal.core.errors import Fatal
from shoal.core.randomness import derive, seed_everything
from shoal.core.rights import calls
from shoal.core.settings import at
from shoal.core.tree import flat, map_tree, not_finite, to_numpy
from shoal.core.types import Batch, Loss, Work
from shoal.workers.graph import Captured, step
from shoal.workers.policy import pick_device, to_batch
from shoal.workers.snapshot import capture, load_weights, restore

LONGEST = 300.0  # seconds between checkpoints, however slow the steps come
ASK = 0.2  # seconds between questions whether to stop, while there is nothing to learn from
LOOKS = 10  # sets of weights that a run without a learner publishes between two evaluations, so that none comes late
TELL = 0.02  # seconds between reports, since each may be a call to another process
ROW = 10  # updates in a row that may make no sense before the run ends


@dataclass
class Progress:
    """How far a learner has come; this is what a checkpoint keeps of it beside the arrays."""

    steps: int = 0
    updates: int = 0
    version: int = 0
    period: int = 0  # scheduled checkpoints so far under lockstep; each begins everyone's randomness anew


@calls(
    store=("status", "get", "update", "settle", "restore", "refused"),
    parameters=("publish",),
    journal=("learned", "went_back", "state", "saved", "report"),
    checkpoints=("load", "save", "save_batch"),
)
def learn(experiment: Any, store: Any, parameters: Any, journal: Any, checkpoints: Any) -> Work:
    """Update the network until the steps are used up or the journal says stop; one unit of work is one batch."""
    algorithm, lockstep = experiment.algorithm, experiment.lockstep
    torch.set_num_threads(experiment.learner_threads)
    own = int(np.random.randint(2**31))
    model = Model(algorithm, envs.spec_of(experiment.environment), pick_device(experiment.device))
    saved = checkpoints.load(lockstep)
    now = go_on(model, store, saved, journal)
    if lockstep:
        seed_everything(derive(own, now.period))
    saver = Saver(experiment, now.steps, None if saved is None else now.steps)
    reports = Reports(journal, lockstep)
    count, health = Count(store, now.steps), Health(checkpoints, saver)
    every = experiment.replay.publish if experiment.replay else 1
    sent = parameters.publish(now.version, now.steps, now.period, False, model.weights())
    if saved is None:
        saver.begin(checkpoints, journal, now, model)
    yield True
    stop, asked, published, refused = False, time.monotonic(), now.version, 0
    done = now.steps >= experiment.steps
    while not (done or stop):
        status = store.status()
        tree = draw(experiment, store, now)
        if status["refused"] != refused:
            refused = status["refused"]
            for problem in store.refused():
                journal.report(problem)
        if tree is None:
            now.steps = count.came(status, now.steps)
            done = now.steps >= experiment.steps
            if lockstep or time.monotonic() - asked > ASK:  # the clock must not decide what lockstep learns
                stop, asked = journal.learned(now.steps, now.updates, {}), time.monotonic()
            yield False
            continue
        torch.set_num_threads(experiment.learner_threads)
        batch = to_batch(tree, model.device)
        present = at(algorithm, now.steps / experiment.steps)
        metrics = {
            "lag": float((now.version - batch.version).mean()),
            **{name: store.status()[name] for name in ("age_of_weights", "age_of_data")},
            "lr": present.lr.now,
            "queue": status["filled"] / status["capacity"],
            "weights_mb": sent / 1e6,
        }
        priority, updates, numbers = model.update(present, batch, now.updates)
        if problem := health.look(numbers, model.net, batch, now.updates):
            journal.report(problem)
        now.steps = count.learned(status, now.steps, batch)
        now.updates, now.version = now.updates + updates, now.version + 1
        if priority is not None:
            store.update(batch.key, priority)
        done, due = now.steps >= experiment.steps, saver.due(now.steps)
        stop = reports.learned(now, {**metrics, **numbers}, done or due)
        if due and not done and not stop:
            saver.save(checkpoints, store, journal, now, model, scheduled=True)
            if lockstep:
                seed_everything(derive(own, now.period))
                published = now.version - every
        if now.version - published >= every and not done and not stop:
            sent = parameters.publish(now.version, now.steps, now.period, False, model.weights())
            published = now.version
        yield True
    saver.save(checkpoints, store, journal, now, model, scheduled=False)
    parameters.publish(now.version + 1, now.steps, now.period, True, model.weights())


def draw(experiment: Any, store: Any, now: Progress) -> Any:
    """A batch to learn from, or None."""
    beta = experiment.replay.beta.at(now.steps / experiment.steps).now if experiment.replay else 1.0
    return store.get(experiment.batch_size, now.version, beta)


class Count:
    """Counts environment steps: a replay tells those that came in, a queue's are counted as they are learned from."""

    def __init__(self, store: Any, steps: int) -> None:
        """Go on from these steps."""
        self.before = steps - store.status().get("steps", 0)

    def came(self, status: Mapping[str, int], steps: int) -> int:
        """The steps so far, when there was nothing to learn from."""
        return self.before + status["steps"] if "steps" in status else steps

    def learned(self, status: Mapping[str, int], steps: int, batch: Batch) -> int:
        """The steps so far, after a batch."""
        return self.came(status, steps) if "steps" in status else steps + int(batch.mask.sum())


class Reports:
    """Tells the journal of updates: of each under lockstep, else now and then of all since."""

    def __init__(self, journal: Any, exact: bool) -> None:
        """Begin with nothing to tell."""
        self.journal, self.exact = journal, exact
        self.waiting: dict[str, list[float]] = {}
        self.told = 0.0

    def learned(self, now: Progress, metrics: Mapping[str, float], urgent: bool) -> bool:
        """Take an update; True: end the run."""
        for name, value in metrics.items():
            self.waiting.setdefault(name, []).append(value)
        if not (self.exact or urgent or time.monotonic() - self.told >= TELL):
            return False
        means = {name: fmean(values) for name, values in self.waiting.items()}
        self.waiting.clear()
        self.told = time.monotonic()
        return bool(self.journal.learned(now.steps, now.updates, means))


class Health:
    """Counts updates that were left out because a number in them was not finite; too many in a row end the run."""

    def __init__(self, checkpoints: Any, saver: Saver | None = None) -> None:
        """Begin healthy; the batch that ends a run is saved with the checkpoints, where these are."""
        self.checkpoints, self.saver = checkpoints, saver
        self.row = self.total = 0

    def look(self, metrics: dict[str, float], net: Any, batch: Batch, updates: int) -> str:
        """Look at the metrics of an update, and return what to report of it, if anything."""
        skipped = metrics.pop("skipped", 0.0)
        self.row = self.row + 1 if skipped else 0
        self.total += bool(skipped)
        if self.total:
            metrics["skipped"] = float(self.total)
        if not skipped:
            return ""
        where = f"update {updates + 1:,}: loss or gradient is not finite"
        if self.row >= ROW:
            raise Fatal(self._last_words(where, net, batch))
        if self.total != 10 ** (len(str(self.total)) - 1):  # the first, the tenth, the hundredth …
            return ""
        return f"{where}; it was skipped ({self.total:,} so far): {wrong_in(net, batch)}"

    def _last_words(self, where: str, net: Any, batch: Batch) -> str:
        words = [f"{where}, {self.row} times in a row: {wrong_in(net, batch)}"]
        if self.checkpoints is not None:
            arrays = {
                name: value.cpu().numpy() if isinstance(value, torch.Tensor) else value
                for name, value in flat(batch._asdict())
            }
            words.append(f"its batch is in {self.checkpoints.save_batch(arrays)}")
        if self.saver is not None and self.saver.good is not None:
            words.append(f"the last good checkpoint is step_{self.saver.good}")
        return "; ".join(words)


def wrong_in(net: Any, batch: Batch) -> str:
    """The arrays of a batch, the weights and the gradients that hold a number which is not finite."""
    gradients = {name: part.grad for name, part in net.named_parameters() if part.grad is not None}
    found = not_finite({"batch": batch._asdict(), "weights": net.state_dict(), "gradient": gradients})
    return ", ".join(found) or "the loss alone"


class Model:
    """The network that learns, the target network that follows it now and then, and the optimizer."""

    def __init__(self, algorithm: Any, spec: Any, device: torch.device) -> None:
        """Build them; without a need for a target network, the network is its own."""
        self.device = device
        self.net = algorithm.build(spec).to(device)
        self.every: int | None = getattr(algorithm, "target_every", None)
        self.target = copy.deepcopy(self.net).requires_grad_(False) if self.every else self.net
        self.optimizer = algorithm.optimizer(self.net)
        captured = device.type == "cuda" and getattr(algorithm, "capturable", False)
        self.step = Captured(self.optimizer) if captured else step
        self.keeper = Keeper(self.net, self.optimizer)

    def update(self, algorithm: Any, batch: Batch, updates: int) -> tuple[Any, int, dict[str, float]]:
        """Learn from a batch, after so many updates; the target network follows after every `target_every`."""
        parts = self.net, self.target, self.optimizer
        priority, count, metrics = update(algorithm, *parts, batch, self.keeper, self.step)
        if self.every and updates // self.every != (updates + count) // self.every:
            self.target.load_state_dict(self.net.state_dict())
        return priority, count, metrics

    def weights(self) -> Any:
        """The network's weights, normalisers among them."""
        return to_numpy(self.net.state_dict())


def go_on(model: Model, store: Any, saved: Mapping[str, Any] | None, journal: Any) -> Progress:
    """Begin, or go on where a checkpoint stands."""
    if saved is None:
        return Progress()
    restore(model.net, model.optimizer, saved)
    if model.every:
        load_weights(model.target, saved.get("target", saved["weights"]))
    store.restore(saved.get("store", {}))
    now = Progress(**{field.name: saved["state"][field.name] for field in fields(Progress)})
    journal.went_back(now.steps)
    return now


class Saver:
    """Knows when a checkpoint is due: after so many steps, and after a while unless the clock must not matter."""

    def __init__(self, experiment: Any, steps: int, good: int | None = None) -> None:
        """Count from these steps; `good` are those of the checkpoint that the run goes on from."""
        self.interval, self.exact = experiment.checkpoint_interval, experiment.lockstep
        self.keep = self.exact or bool(experiment.replay and experiment.replay.save)
        self.last, self.saved = steps, time.monotonic()
        self.good = good  # steps of the newest checkpoint that is there

    def due(self, steps: int) -> bool:
        """Whether it is time."""
        late = not self.exact and time.monotonic() - self.saved > LONGEST
        return late or steps - self.last >= self.interval

    def begin(self, checkpoints: Any, journal: Any, now: Progress, model: Any) -> None:
        """Save a run at its beginning, so that there is something to go on from as soon as there are weights."""
        self._write(checkpoints, None, journal, now, model, scheduled=True)

    def save(self, checkpoints: Any, store: Any, journal: Any, now: Progress, model: Any, scheduled: bool) -> None:
        """Save, unless nothing was learned since the last time; under lockstep a scheduled one opens a new period."""
        if now.steps > self.last:
            now.period += scheduled and self.exact
            self._write(checkpoints, store, journal, now, model, scheduled)
        self.last, self.saved = now.steps, time.monotonic()

    def _write(self, checkpoints: Any, store: Any, journal: Any, now: Progress, model: Any, scheduled: bool) -> None:
        content = capture(model.net, model.optimizer)
        if model.every:
            content["target"] = to_numpy(model.target.state_dict())
        if self.keep and store is not None:
            content["store"] = store.settle()
        state = {**asdict(now), "scheduled": scheduled, "journal": journal.state()}
        problem = checkpoints.save({**content, "state": state})
        journal.saved(now.steps, problem)
        self.good = self.good if problem else now.steps


class Keeper:
    """What an update changes, as it was before, to be put back if the update made no sense.

    On the CPU no optimizer steps down a gradient that is not finite, so only running statistics are kept.
    """

    def __init__(self, net: Any, optimizer: Any) -> None:
        """Keep nothing yet."""
        self.net, self.optimizer = net, optimizer
        self.stepped = any(part.is_cuda for part in net.parameters())
        self.now: list[torch.Tensor] = []
        self.before: list[torch.Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy it."""
        now = [*self.net.buffers()]
        if self.stepped:
            memory = [value for state in self.optimizer.state.values() for value in state.values()]
            now += [*self.net.parameters(), *(value for value in memory if isinstance(value, torch.Tensor))]
        if len(now) != len(self.before):
            self.before = [torch.empty_like(part) for part in now]
        self.now = now
        if now:
            torch._foreach_copy_(self.before, now)

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo the update."""
        if self.now:
            torch._foreach_copy_(self.now, self.before)
        if self.stepped and len(self.now) == len([*self.net.buffers(), *self.net.parameters()]):
            self.optimizer.state.clear()  # it began with this update


def update(
    algorithm: Any,
    net: Any,
    target: Any,
    optimizer: Any,
    batch: Batch,
    keeper: Keeper,
    step: Callable[..., Loss] = step,
) -> tuple[Any, int, dict[str, float]]:
    """Go over a batch in epochs and minibatches; return new priorities, if items can come again, and metrics.

    Where a loss or a gradient was not finite, the update is undone as far as it was not left out, and the metrics are
    only how many pieces of the batch were `skipped`.
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(algorithm.lr.now)
        else:
            group["lr"] = algorithm.lr.now
    keeper.keep()
    prepared = algorithm.prepare(net, batch)
    whole = algorithm.epochs == algorithm.minibatches == 1
    sums: dict[str, torch.Tensor] = {}
    pieces = 0
    for piece in [prepared] if whole else cut(prepared, algorithm.epochs, algorithm.minibatches):
        loss = step(algorithm, net, target, optimizer, piece)
        pieces += 1
        for name, value in loss.metrics.items():
            sums[name] = sums.get(name, 0.0) + value.detach()
    # One copy for all of it: every look at a GPU's number waits for the GPU.
    told = torch.cat([loss.priority.detach(), *(value.reshape(1) for value in sums.values())]).cpu().numpy()
    totals = dict(zip(sums, told[len(loss.priority) :].tolist(), strict=True))
    if (fine := round(totals.pop("finite"))) < pieces:
        keeper.put_back()
        return None, 0 if loss.each.is_cuda else fine, {"skipped": float(pieces - fine)}
    means = {name: total / pieces for name, total in totals.items()}
    return told[: len(loss.priority)] if whole else None, pieces, means


def cut(batch: Batch, epochs: int, minibatches: int) -> Iterator[Batch]:
    """Shuffle the items anew for each epoch, and deal them into minibatches."""
    size = batch.action.shape[1]
    for _ in range(epochs):
        order = torch.randperm(size)
        for piece in order.tensor_split(minibatches):
            index = piece.to(batch.action.device)
            pick = lambda x, index=index: x.index_select(1, index)  # noqa: E731
            yield batch._replace(
                **{name: map_tree(pick, getattr(batch, name)) for name in Batch._fields[:6]},
                weight=batch.weight[index],
                key=batch.key[piece.numpy()],
                version=batch.version[piece.numpy()],
            )
