"""The interface of a run for methods: items, predictions, updates, and statistics over all ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor, nn

from fluvial.core.random import Key, fold_in, uniform
from fluvial.engines.data.records import Prompt, model_inputs
from fluvial.engines.engine.engine import UpdateInfo
from fluvial.engines.engine.items import micro_batches, split
from fluvial.engines.run.declared import BySource, Loss
from fluvial.engines.run.method import EpochsConfig
from fluvial.engines.run.rollouts import Rollouts
from fluvial.engines.sampling.batch import (
    Batch,
    Items,
    noise_samples,
    record_steps,
    renoise,
    return_to,
    row_keys,
)
from fluvial.engines.sampling.items import Pairs, Rows, rebalance, select
from fluvial.engines.sampling.noising import NoisingConfig
from fluvial.engines.scoring.runner import weighted_sum
from fluvial.engines.scoring.signature import Samples
from fluvial.engines.streams import Stream
from fluvial.kernels.dispatch import prefer
from fluvial.models import Cond, decode_samples, host_values
from fluvial.models.guidance import Guided, guided_velocity, is_classifier_free, predict_halves, scale_at
from fluvial.models.host_values import to_device
from fluvial.models.lora import copy_adapter

Edit = Callable[[Prompt], Prompt]


def keep_prompt(prompt: Prompt) -> Prompt:
    """Return the prompt unchanged."""
    return prompt


class Run(Rollouts):
    """Interface of a run for its method. Every function is collective: all ranks call it.

    `Rollouts` has the first half: `sample`, `read`, `score`, `grade`, `log`, and `clock`, the number of updates so far. Its
    attributes are `config` (settings of the run), `job` (model, prompts, data), `networks` (the policy and the declared
    ones), `engine` and `world` (of the policy), `rewards`, `notes` (for the batch's record) and `pairs` (chosen micro-batch
    sizes).
    """

    # items, implemented in `sampling/batch.py`

    record_steps = staticmethod(record_steps)
    renoise = staticmethod(renoise)
    row_keys = staticmethod(row_keys)
    return_to = staticmethod(return_to)

    def noise_samples(
        self,
        batch: Batch,
        noising: NoisingConfig,
        key: Key,
        signal: Tensor | None = None,
        *,
        keep: Tensor | None = None,
        skip_zero: bool = False,
    ) -> Items:
        """Noise the clean samples, or pairs, of a batch, see `batch.noise_samples`."""
        noising = noising.choose_levels(on_schedule=self._on_schedule)
        return noise_samples(batch, noising, key, signal, keep=keep, skip_zero=skip_zero)

    def minibatches(self, items: Items, key: Key, passes: EpochsConfig) -> Iterator[Items]:
        """Yield the items of each optimizer update, spread evenly over the ranks.

        There are `passes.epochs` epochs over the samples; each shuffles them into `passes.minibatches` updates. A network
        declared as `Before()` is the policy before the first update on this batch; it is evaluated here if there are
        several updates.

        Args:
            passes: epochs and minibatches over the batch; these are not forward passes.
        """
        epochs, minibatches, total = passes.epochs, passes.minibatches, items.batch.share.batch
        if self._routed and items.rows.timestep is not None:
            host_values.read(items.rows.timestep)  # one copy to the host for all updates, if levels are on the device
        if epochs * minibatches > 1:  # with a single update v_old is v, and needs no forward pass
            for name in self.networks.before:
                with self.engine.inference() as module:
                    items = items.with_predictions(**{name: self._predict_in_passes(module, items, items.cond)})
        for epoch in range(epochs):
            if minibatches == 1:
                yield self._deal(items, items.used, items.count)
                continue
            drawn = uniform(fold_in(fold_in(key, Stream.MINIBATCH), epoch), (max(total, 1),))
            position = drawn.argsort().argsort()[:total]  # of each sample in a random permutation
            part = position * minibatches // max(total, 1)
            for minibatch in range(minibatches):
                yield self._deal(items, items.used * (part == minibatch)[:, None], items.count / minibatches)  # equal shares

    # networks

    def predict(self, items: Items, *names: str) -> Items:
        """Return items with the predictions of networks, by default all declared ones; undeclared names are skipped.

        Teachers per prompt source give one prediction together: each predicts the rows of its prompts.
        """
        declared, known = self.config.method.networks(), {*items.rows.predictions, *self.networks.before}
        todo = [name for name in names or declared if name in declared and name not in known]
        # Separate modules come first, so that they and the policy are never gathered at the same time.
        for name in sorted(todo, key=lambda name: name not in self.networks.separate):
            network = declared[name]
            by_source = network.name_members(name) if isinstance(network, BySource) else None
            v = self._predict_with(name, items) if by_source is None else self._predict_by_source(by_source, items)
            items = items.with_predictions(**{name: v})
        return items

    def measure(self, items: Items, function: Callable[[Tensor, Any], Any]) -> Any:
        """Apply a function to the policy's prediction at each row, without gradient, and return the results, `[P, ...]`.

        Args:
            function: `(v, rows) -> tensors`, each `[p, ...]` for a micro-batch of p rows.
        """
        results = []
        with self.engine.inference() as module, prefer(self.config.engine.implementation):
            for rows in self._split(items):
                v = self._predict(module, rows, items.cond)
                before = {name: v for name in self.networks.before if name not in rows.predictions}
                # Copied, because the function may reuse one buffer.
                results.append(optree.tree_map(lambda tensor: tensor.clone(), function(v, _add_predictions(rows, before))))
        return optree.tree_map(lambda *parts: torch.cat(parts)[: len(items.rows.level)], *results)

    def vjp(self, items: Items, name: str, cotangent: Tensor) -> Tensor:
        """Return J^T c for the Jacobian J of a network's prediction with respect to x at each row, float32 `[P, *event]`.

        Args:
            name: a declared network, or policy.
            cotangent: c, `[P, *event]`.
        """
        cond, products = self.networks.condition(name, items.cond), list[Tensor]()
        with self.networks.open(name) as module:
            for rows, c in self._split(items, cotangent):
                with torch.enable_grad():
                    x = rows.x.requires_grad_()
                    v = self._predict(module, rows._replace(x=x), cond)
                    products.append(torch.autograd.grad(v, x, c.to(v.dtype))[0].float())
        return torch.cat(products)[: len(items.rows.level)]

    def differentiate(self, items: Items, name: str, function: Callable[[Tensor, Any], Tensor]) -> tuple[Tensor, Tensor]:
        """Return a function of a network at each row, `[P]`, and its gradient with respect to x, float32 `[P, *event]`.

        Args:
            name: a declared network, or policy.
            function: `(v, rows) -> [P]`; a head's output is `rows.predictions["head"]`.
        """
        cond, values, gradients = self.networks.condition(name, items.cond), list[Tensor](), list[Tensor]()
        with self.networks.open(name) as module:
            for rows in self._split(items):
                with torch.enable_grad():
                    x = rows.x.requires_grad_()
                    value = function(*self._predict_with_head(name, module, rows._replace(x=x), cond))
                    gradients.append(torch.autograd.grad(value.sum(), x)[0].float())
                    values.append(value.detach())
        real = len(items.rows.level)
        return torch.cat(values)[:real], torch.cat(gradients)[:real]

    def gather(self, items: Items, values: Tensor) -> Tensor:
        """Gather a number per row into a table over all ranks, `[P] -> [B, M]`, 0 for items that are not used."""
        table = values.new_zeros(items.used.numel() + 1)  # repeats write to the last entry
        table[items.rows.place[: items.real]] = values[: items.real]
        return self.world.gather_data(table[None, :-1].contiguous()).sum(0).view(items.used.shape)

    def mean(self, items: Items, values: Tensor) -> Tensor:
        """Return the mean of a number per row over the used items of all ranks, 0-d; 0 if none is used."""
        used = to_device(items.used, values.device).to(values.dtype)
        return (self.gather(items, values) * used).sum() / used.sum().clamp(min=1)

    def update(self, items: Items, loss: Loss, *, network: str = "policy", split_guidance: bool = False) -> UpdateInfo:
        """Make one optimizer update of a network: a step on the mean of a loss over the items of all ranks.

        Args:
            items: items from `minibatches`, with the predictions that the loss reads.
            loss: `(v, rows) -> (loss [P], diagnostics)`.
            network: trained network that is updated, and that predicts `v`. `learn` yields updates of the policy only;
                updates of other networks are logged under their names.
            split_guidance: with guidance, pass the conditional prediction as v, the unconditional one as
                `rows.predictions["uncond"]` and the scale as `rows.guidance`.
        """
        items = items if items.dealt else self._deal(items, items.used, items.count)
        with self.networks.train(network) as engine:
            terms, options = self._prepare_update(engine.module, network, items, loss, split_guidance=split_guidance)
            parts = items.rows.find_parts(items.batch.spec.sampling.schedule.levels)
            info = engine.update(*terms, **options, parts=parts)
        if engine is not self.engine:
            record = {"loss": info.loss, "grad_norm": info.grad_norm, "lr": info.lr, "objective": info.mean}
            self.log(networks={**self.notes.get("networks", {}), network: record})
        return info

    def accumulate(self, items: Items, loss: Loss) -> None:
        """Add the gradient of the mean of a loss over the items of all ranks to the next update of the policy.

        Call `update` directly afterwards: the two make one step on the sum of the losses. Make predictions before both.
        """
        items = items if items.dealt else self._deal(items, items.used, items.count)
        terms, options = self._prepare_update(self.engine.module, "policy", items, loss)
        self.engine.accumulate(*terms, **options)

    def copy_policy(self, name: str) -> None:
        """Copy the policy's weights to a follower."""
        copy_adapter(self.engine.module, "default", name)

    def forward(self, items: Items, rows: Rows, network: str = "policy") -> Tensor:
        """Return a trained network's prediction at rows of items, with gradient, for a loss with several forward passes."""
        module = self.networks.trained.get(network, self.engine).module
        return self._predict(module, rows, self.networks.condition(network, items.cond))

    def predict_head(self, items: Items, rows: Rows, network: str) -> Tensor:
        """Return the output of a trained network's head at rows of items, `[P]`, with gradient."""
        module, cond = self.networks.trained[network].module, self.networks.condition(network, items.cond)
        output: Tensor = self._predict_with_head(network, module, rows, cond)[1].predictions["head"]
        return output

    def differentiate_rewards(self, batch: Batch) -> Tensor:
        """Return the gradient of the weighted sum of the rewards at this rank's samples, float32 `[slots, *event]`."""
        final, gradients, size = batch.trajectory.final, list[Tensor](), batch.spec.per_pass
        for start in range(0, len(final), size):
            part, prompts = final[start : start + size].detach().clone(), batch.prompts[start : start + size]
            with torch.enable_grad():
                total = self._compute_rewards(part.requires_grad_(), prompts)[0].sum()
            gradients.append(torch.autograd.grad(total, part)[0].float())
        return torch.cat(gradients)

    def compute_rewards(
        self, items: Items, rows: Rows, final: Tensor, edits: Sequence[Edit] = (keep_prompt,)
    ) -> list[Tensor]:
        """Return the weighted sum of the rewards of clean samples, with gradient: `[P]` for each edit of their prompts.

        Args:
            items: items of an update.
            rows: P rows of these items.
            final: clean sample of each row, `[P, *event]`.
            edits: functions from a prompt to the prompt that the rewards get.
        """
        batch, each, last = items.batch, items.used.shape[1], items.used.numel() - 1
        assert rows.place is not None
        prompts = [batch.prompt(place // each) for place in host_values.read(rows.place).clamp(max=last).tolist()]
        return self._compute_rewards(final, prompts, edits)

    # private: not for methods

    def _compute_rewards(
        self, final: Tensor, prompts: Sequence[Prompt], edits: Sequence[Edit] = (keep_prompt,)
    ) -> list[Tensor]:
        images, name = decode_samples(self.job.model, final, model_inputs(prompts)), self.config.method.method_name
        edited = [Samples(images, [edit(prompt) for prompt in prompts], final) for edit in edits]
        return [weighted_sum(self.rewards, samples, objective=name) for samples in edited]

    def _predict_with(self, network: str, items: Items) -> Tensor:
        """Return a network's prediction at each row, `[P, ...]`."""
        with self.networks.open(network) as module:
            return self._predict_in_passes(module, items, self.networks.condition(network, items.cond))

    def _predict_by_source(self, networks: Mapping[str, str], items: Items) -> Tensor:
        """Return the prediction at each row by the network of its prompt's source, `[P, ...]`.

        If any rank has rows of a source, all ranks run that network, because its forward pass is collective.
        """
        batch, sources = items.batch, [*networks]
        number = torch.tensor([sources.index(batch.prompt(place).source) for place in range(batch.share.batch)])
        sample = (host_values.read(items.rows.place) // items.used.shape[1]).clamp(max=batch.share.batch - 1)
        row_source = number[sample]
        counts = torch.tensor(self.world.gather_items(torch.bincount(row_source, minlength=len(sources)).tolist()))
        index, predictions = list[Tensor](), list[Tensor]()
        for source, most in enumerate(counts.amax(0).tolist()):
            if most:
                rows = select(items.rows, row_source == source)
                part = replace(items, rows=rows if len(rows.level) else _take_first_row(items.rows), pad_to=most)
                index.append(torch.nonzero(row_source == source).flatten())
                predictions.append(self._predict_with(networks[sources[source]], part)[: len(index[-1])])
        return torch.cat(predictions)[to_device(torch.cat(index).argsort(), self.world.device)]

    def _deal(self, items: Items, used: Tensor, count: float) -> Items:
        """Return items with only this rank's used rows, moved between ranks if it saves the busiest rank a forward pass."""
        share, ranks = items.batch.share, self.world.data_size
        repeats = used.new_zeros((ranks * share.slots - len(used), used.shape[1]))
        by_rank = torch.cat([used, repeats]).unflatten(0, (ranks, share.slots))
        counts = [int(number) for number in (by_rank != 0).sum((1, 2))]
        rows, cond = select(items.rows, by_rank[self.world.data_rank].T.flatten()), items.cond
        longest, balanced = max(counts), -(-sum(counts) // len(counts))
        computed, at_least = (
            sum(split(most, self.config.choose_pass_sizes(most, self.pairs))) for most in (longest, balanced)
        )
        if computed > at_least:  # rows with padding; moving some costs a collective
            rows, cond = rebalance(rows, cond, counts, self.world)
            longest = balanced
        real = len(rows.level)
        if not real:  # a rank without items still joins the collectives
            rows = _take_first_row(items.rows)
        return replace(items, rows=rows, cond=cond, used=used, count=count, pad_to=max(longest, 1), real=real, dealt=True)

    def _prepare_update(
        self, module: nn.Module, network: str, items: Items, loss: Loss, *, split_guidance: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of `Engine.update` for the mean of a loss over the items of all ranks."""
        cond, sizes = self.networks.condition(network, items.cond), self.config.choose_pass_sizes(items.pad_to, self.pairs)
        loss = loss if self.check_loss is None else self.check_loss(loss)
        options = {"count": max(items.count, 1), "micro_batch": sizes, "pad_to": items.pad_to, "inputs": cond}
        row_loss = partial(self._compute_loss, module, network=network, cond=cond, loss=loss, split_guidance=split_guidance)
        return (items.rows, row_loss, items.rows.weight), options

    def _compute_loss(
        self, module: nn.Module, rows: Any, *, network: str, cond: Cond, loss: Loss, split_guidance: bool
    ) -> tuple[Tensor, Any]:
        """Return the loss of each row of a micro-batch, and diagnostics."""
        model, update = self.job.model, self.config.method.sampling.guidance.update
        if split_guidance and update == "guided" and isinstance(cond, Guided) and is_classifier_free(model):
            inputs, options = self._prepare_inputs(rows, cond)
            v, v_uncond = predict_halves(model, module, *inputs, **options)
            scale = scale_at(model, inputs[-1], rows.level, rows.timestep)
            rows = _add_predictions(rows, {"uncond": v_uncond})._replace(guidance=scale)
        elif network in self.networks.heads:
            v, rows = self._predict_with_head(network, module, rows, cond)
        else:
            v = self._predict(module, rows, cond)
        before = {name: v.detach() for name in self.networks.before if name not in rows.predictions}
        with prefer(self.config.engine.implementation):
            return loss(v, _add_predictions(rows, before))

    def _predict(self, module: nn.Module, rows: Rows, cond: Cond) -> Tensor:
        """Return the prediction at each row; the two samples of a pair share a forward pass."""
        inputs, options = self._prepare_inputs(rows, cond)
        v = guided_velocity(self.job.model, module, *inputs, **options)
        return v.unflatten(0, (-1, 2)) if isinstance(rows, Pairs) else v

    def _predict_with_head(self, network: str, module: nn.Module, rows: Any, cond: Cond) -> tuple[Tensor, Any]:
        """Return a network's prediction at each row, and the rows with its head's output, if it has one."""
        if network not in self.networks.heads:
            return self._predict(module, rows, cond), rows
        with self.networks.read_head(network, module) as outputs:
            v = self._predict(module, rows, cond)
        return v, _add_predictions(rows, {"head": outputs[0]})

    def _prepare_inputs(self, rows: Rows, cond: Cond) -> tuple[tuple[Tensor, Tensor, Cond], dict[str, Any]]:
        """Return the model's inputs (x, level, conditioning) for a micro-batch, and the options of its guidance."""
        guidance = self.config.method.sampling.guidance
        if guidance.update == "conditional" and isinstance(cond, Guided):
            cond = cond.cond
        x, level, sample, timestep = rows.x, rows.level, rows.sample, rows.timestep
        if isinstance(rows, Pairs):
            x, level, sample = x.flatten(0, 1), level.repeat_interleave(2), sample.repeat_interleave(2)
            timestep = None if timestep is None else timestep.repeat_interleave(2)
        inputs = x, level, optree.tree_map(lambda table: host_values.select_rows(table, sample), cond)
        forwards = self.config.choose_forwards(len(x))
        return inputs, {"timestep": timestep, "forwards": forwards, "gradient": guidance.gradient}

    def _predict_in_passes(self, module: nn.Module, items: Items, cond: Cond) -> Tensor:
        """Return a network's prediction at each row, `[P, ...]`, computed in the micro-batches of an update."""
        return torch.cat([self._predict(module, rows, cond) for rows in self._split(items)])[: len(items.rows.level)]

    def _split(self, items: Items, *more: Tensor) -> Iterator[Any]:
        """Yield the rows of items in micro-batches, together with rows of further tensors `[P, ...]`."""
        sizes = self.config.choose_pass_sizes(items.pad_to, self.pairs)
        return micro_batches(
            (items.rows, *more) if more else items.rows, micro_batch=sizes, pad_to=items.pad_to, device=self.world.device
        )


def _take_first_row(rows: Rows) -> Rows:
    """Return the first row with weight 0, for a rank without rows."""
    first: Rows = optree.tree_map(lambda tensor: tensor[:1].clone(), rows)
    return first._replace(weight=torch.zeros_like(first.weight))


def _add_predictions(rows: Any, predictions: Mapping[str, Tensor]) -> Any:
    """Return rows with the predictions of further networks."""
    return rows._replace(predictions={**rows.predictions, **predictions})
