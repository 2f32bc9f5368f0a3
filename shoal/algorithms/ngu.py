"""Never Give Up: R2D2 that also looks for what is new, with a bandit that says how much (arXiv:2002.06038).

Intrinsic and extrinsic values are separate networks and a meta-controller picks the arm, as in Agent57
(arXiv:2003.13350).
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.bandit import Bandit
from shoal.core.settings import Replaying, Schedule, Settings
from shoal.core.tree import map_tree
from shoal.core.types import Act, Batch, Loss, Sequence, Spec, Step
from shoal.losses.masking import masked_mean, time_mean
from shoal.losses.novelty import betas, gammas
from shoal.losses.q_values import mixed_priority, pick, rescale, retrace_targets, unscale
from shoal.nets.memory import all_previous, previous
from shoal.nets.novelty import Novelty, nothing_seen, recall
from shoal.nets.optimizers import make_optimizer
from shoal.nets.q_network import QNetwork, check_overlap, epsilon_greedy, ladder, lasts, trained, unroll
from shoal.nets.torsos import Architecture

PARTS = ("extrinsic", "intrinsic")
# The paper sums a sequence's loss over its 80 steps. Here it is a mean, so what it compares with the size of a gradient
# (the bound of its norm, Adam's epsilon) is divided by their number.
SUMMED = 80


class NguNetwork(nn.Module):
    """Two networks of action values, and one that measures how new a state is."""

    def __init__(self, settings: Ngu, spec: Spec) -> None:
        super().__init__()
        extra = spec.action.size + 2 + settings.arms  # last action and reward, novelty, arm
        for part in PARTS:
            self.add_module(part, QNetwork(settings.network, spec, settings.dueling, 1, settings.head, extra))
        self.novelty = Novelty(settings.network.model_copy(update={"lstm": 0}), spec, settings.embedding)
        self.actions = spec.action.size

    def q(self, part: str) -> QNetwork:
        """The network of one of the values."""
        found = getattr(self, part)
        assert isinstance(found, QNetwork)
        return found


class Ngu(Settings):
    """Never Give Up with separate values and a meta-controller; defaults are the papers' where they can be."""

    lr: Schedule = Field(Schedule(start=1e-4, shape="constant"), description="Learning rate.")
    batch: int | None = Field(64, ge=1, description="Sequences per update.")
    arms: int = Field(32, ge=1, description="Policies, from one that only exploits to one that explores most.")
    beta: float = Field(0.3, ge=0, description="Weight of the intrinsic reward for the most exploring arm.")
    gamma: float = Field(0.997, gt=0, lt=1, description="Discount of the first arm.")
    gamma_last: float = Field(0.99, gt=0, lt=1, description="Discount of the last arm.")
    window: int = Field(160, ge=1, description="Episodes that the bandit remembers.")
    bandit_epsilon: float = Field(0.5, ge=0, le=1, description="Chance that the bandit pulls a random arm.")
    bonus: float = Field(1.0, ge=0, description="Weight of the bandit's uncertainty.")
    memory: int = Field(30_000, ge=1, description="States of an episode that are remembered; the oldest give way.")
    embedding: int = Field(32, ge=1, description="Numbers to which a state is embedded.")
    lambda_: float = Field(0.95, ge=0, le=1, description="Decay of Retrace's traces.")
    unroll: int = Field(80, ge=1, description="Steps of a sequence that are learned from.")
    burn_in: int = Field(40, ge=0, description="Steps before them that only warm the memory up.")
    # Sequences begin every 40 steps: half of the 80 are shared, and the burn-in before them.
    overlap: int = Field(80, ge=0, description="Steps that a sequence shares with the previous one, at least burn_in.")
    dueling: bool = Field(True, description="Whether value and advantage are separate streams.")
    eta: float = Field(0.9, ge=0, le=1, description="Share of the largest error in a sequence's priority.")
    epsilon: float = Field(0.4, gt=0, le=1, description="Chance of a random action of the boldest environment.")
    epsilon_spread: float = Field(7.0, ge=0, description="Exponent by which the chance falls from first to last.")
    target_every: int = Field(1_500, ge=1, description="Updates between copies to the target network.")
    replay: Replaying = Field(
        Replaying(capacity=100_000, minimum=5_000, alpha=0.9, beta=Schedule(start=0.6, shape="constant"), refresh=5),
        description="How experience is kept and drawn again.",
    )
    actor_priorities: bool = Field(
        True, description="Whether actors compute the priority of new items; else it is the highest so far."
    )
    clip_norm: float | None = Field(
        40 / SUMMED, gt=0, description="Largest gradient norm of each of the three networks; null: unlimited."
    )
    optimizer_epsilon: float = Field(1e-4 / SUMMED, gt=0, description="Added to Adam's denominator.")
    head: int = Field(512, ge=0, description="Units between the memory and each stream of values; 0: none.")
    network: Architecture = Field(
        Architecture(activation="relu", lstm=512), description="The network; it needs an lstm."
    )

    sees_reward: ClassVar[bool] = True

    @model_validator(mode="after")
    def _overlaps(self) -> Self:
        check_overlap(self.burn_in, self.unroll, self.overlap)
        return self

    @property
    def experience(self) -> Sequence:
        """Sequences within episodes, which have one arm, with the recurrent states before the first step."""
        initial = (*(f"core_{part}" for part in PARTS), "previous", "arm")
        return Sequence(self.burn_in + self.unroll, self.overlap, across=False, initial=initial)

    def build(self, spec: Spec) -> NguNetwork:
        """Make the networks."""
        return NguNetwork(self, spec)

    def optimizer(self, net: NguNetwork) -> Optimizer:
        """Make the optimizer; the parts share no parameter, so one serves them all."""
        return make_optimizer("adam", net, self.lr.now, self.optimizer_epsilon)

    def parts(self, net: NguNetwork) -> list[nn.Module]:
        """Both values and the novelty: else a bound on the norm of all would let the large intrinsic values decide."""
        return [*(net.q(part) for part in PARTS), net.novelty]

    def begin(self, net: NguNetwork, size: int) -> dict[str, Any]:
        """LSTM states, bandits and the score of this episode so far."""
        carry: dict[str, Any] = {f"core_{part}": net.q(part).begin(size)["core"] for part in PARTS}
        device = carry["core_extrinsic"].device
        return carry | {
            "action": torch.zeros(size, dtype=torch.int64, device=device),
            "arm": torch.zeros(size, dtype=torch.int64, device=device),
            "bandits": [Bandit(self.arms, self.window, self.bandit_epsilon, self.bonus) for _ in range(size)],
            "played": False,
            "pulls": [],
            "score": torch.zeros(size, device=device),
            **nothing_seen(size, self.embedding, device),
        }

    def act(self, net: NguNetwork, step: Step, carry: dict[str, Any], rank: Tensor | None) -> Act:
        """Take the best action under the arm's mix of values."""
        carry = dict(carry)
        if rank is not None:
            self._episodes(step, carry)
        carry |= recall(carry, net.novelty.embedding(step.observation), step.first, self.memory)
        novelty = carry.pop("novelty") * net.novelty.lasting(step.observation)
        seen = previous(carry["action"], step.reward, step.first, [net.actions])
        extra = torch.cat([seen, self._asked(novelty, carry["arm"])], -1)
        observation = map_tree(lambda x: x.unsqueeze(0), step.observation)
        record = {"previous": seen, "arm": carry["arm"], "novelty": novelty}
        values = {}
        for part in PARTS:
            record[f"core_{part}"] = carry[f"core_{part}"]
            q, core = net.q(part)(observation, step.first.unsqueeze(0), carry[f"core_{part}"], extra.unsqueeze(0))
            values[part], carry[f"core_{part}"] = q[0, :, :, 0], core
        epsilon = 0.0 if rank is None else ladder(rank, self.epsilon, self.epsilon_spread)
        mixed = self._mix(values["extrinsic"], values["intrinsic"], carry["arm"].unsqueeze(-1))
        carry["action"] = epsilon_greedy(mixed, epsilon)
        if rank is None:  # for recordings of episodes
            record |= {"q_extrinsic": values["extrinsic"], "q_intrinsic": values["intrinsic"]}
        return Act(carry["action"], record, carry)

    def informed(self, carry: dict[str, Any], pulls: Sequence_[list[float]]) -> dict[str, Any]:
        """Return a first carry that knows earlier pulls; an evaluation plays the arm that earned most."""
        for bandit in carry["bandits"]:
            for arm, score in pulls:
                bandit.reward(int(arm) % self.arms, score)
        return carry | {"arm": torch.full_like(carry["arm"], carry["bandits"][0].best())}

    def choices(self, carry: dict[str, Any]) -> list[list[float]]:
        """Return the bandits' pulls since the last call: the arm, and the score of its episode."""
        pulls = [*carry["pulls"]]
        carry["pulls"].clear()
        return pulls

    def _episodes(self, step: Step, carry: dict[str, Any]) -> None:
        """Where an episode begins, report the previous one's score to the bandit, and let it pick the next arm."""
        carry["score"] = carry["score"] + step.reward
        opened = step.first.nonzero().flatten().tolist()
        if opened:
            carry["arm"] = carry["arm"].clone()  # the packer still reads the previous one
        for index in opened:
            bandit = carry["bandits"][index]
            if carry["played"]:
                arm, score = int(carry["arm"][index]), float(carry["score"][index])
                bandit.reward(arm, score)
                carry["pulls"].append([arm, score])
            carry["arm"][index] = bandit.choose()
        carry["score"] = carry["score"] * ~step.first
        carry["played"] = True

    def _asked(self, novelty: Tensor, arm: Tensor) -> Tensor:
        """What the networks see beside the previous step: the novelty, which may be hundreds, and the arm."""
        return torch.cat([rescale(novelty).unsqueeze(-1), nn.functional.one_hot(arm, self.arms).to(novelty.dtype)], -1)

    def _mix(self, extrinsic: Tensor, intrinsic: Tensor, arm: Tensor) -> Tensor:
        """h(h⁻¹(Qe) + β h⁻¹(Qi)) (arXiv:2003.13350, section 3.1)."""
        return rescale(unscale(extrinsic) + betas(self.arms, self.beta).to(arm.device)[arm] * unscale(intrinsic))

    def prepare(self, net: NguNetwork, batch: Batch) -> Batch:
        """Update running statistics."""
        for part in PARTS:
            net.q(part).observe(batch)
        net.novelty.observe(batch)
        return batch

    def loss(self, net: NguNetwork, target: NguNetwork, batch: Batch) -> Loss:
        """Return Retrace's double Q errors of both values on the scale of h, inverse dynamics and distillation."""
        arm = batch.record["arm"][0]
        novelty = batch.record["novelty"]  # of the state at which the action was chosen
        asked = self._asked(torch.cat([novelty, torch.zeros_like(novelty[:1])]), arm.expand(len(batch.first), -1))
        extra = torch.cat([all_previous(batch, [net.actions]), asked], -1)
        # How new the last observation is, is not known here but in the next sequence: neither what led to it nor its
        # own values, which depend on it, can be learned from.
        rewards = {"extrinsic": batch.reward, "intrinsic": torch.cat([novelty[1:], torch.zeros_like(novelty[:1])])}
        mask = trained(batch, self.burn_in)
        mask = torch.cat([mask[:-1], torch.zeros_like(mask[:1])])
        cores = {part: batch.record[f"core_{part}"][0] for part in PARTS}
        values = {part: unroll(net.q(part), batch, cores[part], extra, self.burn_in)[..., 0] for part in PARTS}
        with torch.no_grad():
            goals = {part: unroll(target.q(part), batch, cores[part], extra, self.burn_in)[..., 0] for part in PARTS}
            best = self._mix(values["extrinsic"], values["intrinsic"], arm.view(1, -1, 1)).argmax(-1)
            gamma = gammas(self.arms, self.gamma, self.gamma_last).to(arm.device)[arm].expand_as(batch.discount)
            # Novelty goes on in the next episode, where the memory is empty again (for RND: arXiv:1810.12894, section
            # 2.3), so its return bootstraps at an end as at a cut; with a value of 0 there, the bold arms would learn
            # to avoid it.
            discounts = {"extrinsic": gamma * batch.discount, "intrinsic": gamma}
            ends = lasts(batch)
            ends[-2:] = True
            # The target policy is the greedy one, so an action that is not its choice cuts the trace.
            ratio = (best[:-1] == batch.action).float()
        each, priority, metrics = [], torch.zeros_like(mask), {}
        weights = {"extrinsic": torch.ones_like(mask[0]), "intrinsic": betas(self.arms, self.beta).to(arm.device)[arm]}
        for part in PARTS:
            with torch.no_grad():
                future = unscale(pick(goals[part].unsqueeze(-1), best)[..., 0])
                taken = unscale(pick(goals[part][:-1].unsqueeze(-1), batch.action)[..., 0])
                goal = retrace_targets(rewards[part], discounts[part], taken, future, ratio, ends, self.lambda_)
            error = rescale(goal) - pick(values[part][:-1].unsqueeze(-1), batch.action)[..., 0]
            each.append(time_mean(0.5 * error.square(), mask))
            priority = priority + weights[part] * error.detach().abs() * mask
            metrics[f"{part}_loss"] = masked_mean(0.5 * error.square(), mask)
            metrics[f"{part}_q"] = masked_mean(values[part][:-1].amax(-1), mask)
        inverse, distillation = net.novelty.loss(batch)
        metrics |= {
            "inverse_loss": inverse.mean(),
            "distillation_loss": distillation.mean(),
            "novelty": masked_mean(novelty, batch.mask),
            "arm": arm.float().mean(),
        }
        total = torch.stack([*each, inverse, distillation]).sum(0)
        return Loss(total, mixed_priority(priority, mask, self.eta), metrics)
