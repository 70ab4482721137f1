"""Computes what this project promises to compute, in plain PyTorch: the reference of parity.

It trains an unmodified Hugging Face model with plain autograd and torch.optim.AdamW(fused=True) on FP32 masters, and
with torch.optim.Muon on those of the layers' matrices where asked for. Moments in bf16 are rounded after every step. It
imports nothing of the product but the rounding of a working copy and the seeds of dropout and of the rounding of
moments.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain_ray.engine.layout.split_master import to_working
from megatrain_ray.engine.model.micro_batch import dropout_seed
from tests.support.fp8_linear import with_fp8
from tests.support.kto_losses import Kto, kl_of, kto_backward
from tests.support.pair_losses import Preference, pair_losses, reward_losses
from tests.support.policy_losses import Policy, Rollouts, policy_loss
from tests.support.rounded_moments import round_moments
from tests.support.teacher import Distil, plain_objective

UNDECAYED = re.compile(r"bias$|norm\w*\.weight$")  # names of biases, and of norms, of which some have two dimensions

Named = dict[str, Tensor]
Weighted = tuple[Tensor, Tensor | None]  # targets and their loss weights


class Sequences(Protocol):
    """Describes the sequences of one update: int64 [batch, seq_len] each; a target of -100 is not supervised.

    loss_weights: FP32, how much each target counts, 0 where it is -100; None: each other one counts 1.
    real: bool, which inputs are no pads; None: all.
    """

    @property
    def input_ids(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor | None: ...
    @property
    def loss_weights(self) -> Tensor | None: ...
    @property
    def real(self) -> Tensor | None: ...
    @property
    def num_documents(self) -> int | None: ...
    @property
    def reference_logprobs(self) -> Tensor | None: ...
    @property
    def teacher(self) -> tuple[Tensor, Tensor] | None: ...
    @property
    def num_supervised(self) -> int: ...
    @property
    def columns(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class Own:
    """Gives parameters that the pattern matches a learning rate (its peak), decay or optimizer of their own."""

    match: str
    lr: float | None = None
    weight_decay: float | None = None
    muon: bool | None = None


@dataclass(frozen=True)
class MuonRecipe:
    """Holds the settings of Muon, by torch's names."""

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr: str = "match_rms_adamw"


@dataclass(frozen=True)
class Recipe:
    """Holds the settings of a run that decide its numbers."""

    steps: int
    lr: float = 1e-3
    min_lr: float = 0.0
    schedule: str = "cosine"
    warmup_steps: int = 0
    weight_decay: float = 0.1
    trainable: tuple[str, ...] = ()  # patterns: what none of them matches is frozen
    freeze: tuple[str, ...] = ()
    groups: tuple[Own, ...] = ()  # the first that matches counts
    adapter: Path | None = None  # a folder of peft's: its pairs are trained, and beside them what `trainable` matches
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    muon: MuonRecipe | None = None
    clip: float | None = 1.0
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    preference: Preference | None = None  # of batches of pairs
    policy: Policy | None = None  # of batches of rollouts
    distil: Distil | None = None  # of batches with a teacher's predictions
    kto: Kto | None = None  # of batches of labelled answers
    seed: int = 0
    precision: str = "fp32"
    compute: str | None = None
    moments: str = "fp32"
    grad_dtype: str = "fp32"
    micro_batch_size: int = 1
    loss_chunk_tokens: int | None = None  # null: one chunk a micro-batch
    num_threads: int = 1
    device: str = "cpu"


@dataclass(frozen=True)
class Result:
    """Holds what a run left behind. Losses and the like have an entry for each of its own steps.

    exp_avg: first moments, and Muon's momentum.
    exp_avg_sq: second moments of what AdamW trains.
    """

    step: int
    adam_steps: int
    masters: Named
    exp_avg: Named
    exp_avg_sq: Named
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)  # before clipping
    learning_rates: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)


def train_reference(
    folder: Path,
    batches: Iterable[Sequences],
    recipe: Recipe,
    start: Result | None = None,
    frozen: tuple[str, ...] = (),
) -> Result:
    """Train the model of `folder` on one batch an update; continue from `start` if it is given.

    frozen: prefixes of parameters that a text never reaches.
    """
    with torch_threads(recipe.num_threads):
        dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
        model = _load(folder, dtype, recipe).to(recipe.device).train()
        if recipe.compute == "fp8":
            with_fp8(_layer_list(model, frozen))
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # a view of the file, at any address: matrix products round by it
        _freeze(model, recipe, frozen)
        start = start or _beginning(folder, recipe, model)
        masters = {name: nn.Parameter(master.clone()) for name, master in start.masters.items()}
        optimizer = _Optimizer(masters, _matrices(model, recipe, frozen), recipe, start)
        place = _Place(recipe.seed, start.step)
        _seed_dropout(model, place, frozen)
        losses, norms, rates, skipped = [], [], [], []
        for batch in batches:
            place.step += 1
            _set_weights(_trained(model), masters)
            loss, gradients = _gradients(model, batch, recipe, place)
            for name, master in masters.items():
                master.grad = gradients[name]
            norm = get_total_norm(gradients.values(), foreach=False)
            skip = recipe.clip is not None and not math.isfinite(norm)
            rate = reference_learning_rate(
                place.step, recipe.lr, recipe.min_lr, recipe.steps, recipe.warmup_steps, recipe.schedule
            )
            if not skip:
                if recipe.clip is not None:
                    clip_grads_with_norm_(masters.values(), recipe.clip, norm, foreach=False)
                optimizer.step(rate)
            losses.append(loss)
            norms.append(norm.item())
            rates.append(rate)
            skipped.append(skip)
        adam_steps = start.adam_steps + skipped.count(False)
        return Result(place.step, adam_steps, *optimizer.state(), losses, norms, rates, skipped)


def _freeze(model: Any, recipe: Recipe, unreached: tuple[str, ...]) -> None:
    """Freeze what the recipe does not train. A shared parameter matches by any of its names.

    A frozen parameter has the value of the working copy, which is what streams.
    """
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(_plain(name))
    for parameter, names in aliases.items():
        if recipe.adapter and _matches(recipe.trainable, names):
            parameter.requires_grad_(True)
        out = recipe.trainable and not recipe.adapter and not _matches(recipe.trainable, names)
        if out or _matches(recipe.freeze, names) or names[0].startswith(unreached):
            parameter.requires_grad_(False)


def _matches(patterns: Iterable[str], names: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for name in names for pattern in patterns)


def reference_learning_rate(
    step: int, peak: float, min_lr: float, steps: int, warmup_steps: int, schedule: str
) -> float:
    """Return the learning rate of a step, counted from 1.

    It is a linear warm-up to the peak at step `warmup_steps`, then the schedule over the rest.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - 1 - warmup_steps) / (steps - warmup_steps)
    return {
        "constant": peak,
        "linear": peak - (peak - min_lr) * progress,
        "cosine": min_lr + (peak - min_lr) * (1 + math.cos(math.pi * progress)) / 2,
    }[schedule]


def _gradients(  # noqa: C901
    model: Any, batch: Sequences, recipe: Recipe, place: _Place
) -> tuple[float, Named]:
    """Return loss and FP32 gradients of one update: each micro-batch has fresh gradients, which are summed in order."""
    recipe = replace(recipe, micro_batch_size=recipe.micro_batch_size * getattr(batch, "row_parts", 1))
    weights = batch.loss_weights
    total_weight = int((batch.targets != -100).sum()) if weights is None else weights.double().sum().item()
    total_weight = (batch.num_documents or 0) // 2 if recipe.preference else total_weight
    losses: list[float] = []
    sums: Named = {}
    inputs = batch.input_ids.to(recipe.device).split(recipe.micro_batch_size)
    targets = _weighted_targets(batch, len(inputs), recipe)
    packed = getattr(batch, "pictured", None) or _positions(batch.positions, len(inputs), recipe)
    real = [None] * len(inputs) if batch.real is None else batch.real.to(recipe.device).split(recipe.micro_batch_size)
    by_reference = [None] * len(inputs)
    if batch.reference_logprobs is not None:
        by_reference = [part.flatten() for part in batch.reference_logprobs.split(recipe.micro_batch_size)]
    predicted = [None] * len(inputs)
    if batch.teacher is not None:
        both = ([part.flatten(0, 1) for part in x.split(recipe.micro_batch_size)] for x in batch.teacher)
        predicted = list(zip(*both, strict=True))
    margins = [None] * len(inputs)
    if "margins" in batch.columns:
        margins = batch.columns["margins"].split(recipe.micro_batch_size)
    rows = torch.arange(len(batch.input_ids)).split(recipe.micro_batch_size)
    size = recipe.micro_batch_size
    kl = kl_of(model, batch, size, recipe.kto)
    for j in range(len(inputs)):
        place.micro_batch, place.layer = j, 0
        model.zero_grad(set_to_none=True)
        if recipe.kto:
            losses += kto_backward(model, batch, slice(j * size, (j + 1) * size), recipe.kto, kl)
        elif recipe.preference and recipe.preference.kind == "reward":
            hidden = model.base_model(input_ids=inputs[j], use_cache=False, **packed[j]).last_hidden_state
            scores = model.score(hidden).float().flatten()
            each = reward_losses(scores, packed[j].get("position_ids"), real[j], margins[j], recipe.preference)
            loss = each.sum() / total_weight
            loss.backward()
            losses.append(loss.item())
        elif recipe.policy:
            losses.append(_backward_of_rollouts(model, batch, recipe.policy, targets[j][0], packed[j], rows[j]))
        elif recipe.loss_chunk_tokens is None or recipe.preference or recipe.distil:
            losses += _backward(
                model,
                inputs[j],
                targets[j],
                packed[j],
                total_weight,
                len(inputs),
                recipe,
                real[j],
                by_reference[j],
                predicted[j],
            )
        else:
            several = len(inputs) > 1
            losses += _backward_in_chunks(model, inputs[j], targets[j], packed[j], total_weight, recipe, several)
        for name, parameter in _trained(model):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for part in getattr(parameter, "of_chunks", None) or [gradient]:
                sums[name] = sums[name] + part.float() if name in sums else part.float()
    if recipe.grad_dtype == "bf16":
        sums = {name: total.bfloat16().float() for name, total in sums.items()}
    return sum(losses), sums


def _positions(positions: Tensor | None, num_micro_batches: int, recipe: Recipe) -> list[dict[str, Tensor]]:
    """Return arguments that make the model keep several documents in a row apart, for each micro-batch.

    positions: beginning again with each document, [rows, T]; None: a row is one document.
    """
    if positions is None:
        return [{}] * num_micro_batches
    return [{"position_ids": part} for part in positions.to(recipe.device).split(recipe.micro_batch_size)]


def _backward_of_rollouts(
    model: Any, batch: Sequences, policy: Policy, targets: Tensor, packed: dict[str, Tensor], rows: Tensor
) -> float:
    """Compute the gradients of these rows' rollouts into `.grad`; return their share of the step's loss."""
    sampled, advantages = (batch.columns[name][rows].flatten() for name in ("sampler_logprob", "advantage"))
    reference = None if batch.reference_logprobs is None else batch.reference_logprobs[rows].flatten()
    of = Rollouts(batch.positions[rows], batch.real[rows], sampled, advantages, reference)
    logits = model(input_ids=batch.input_ids[rows], use_cache=False, **packed).logits.float().flatten(0, 1)
    loss = policy_loss(logits, targets, of, policy, (batch.num_documents, batch.num_supervised))
    loss.backward()
    return loss.item()


def _backward(
    model: Any,
    input_ids: Tensor,
    targets: Weighted,
    packed: dict[str, Tensor],
    total_weight: float,
    num_micro_batches: int,
    recipe: Recipe,
    real: Tensor | None,
    by_reference: Tensor | None,
    predicted: tuple[Tensor, Tensor] | None,
) -> list[float]:
    """Compute the gradients of one micro-batch into `.grad`; return the parts of its share of the step's loss.

    A router's auxiliary loss is a mean, not a sum over tokens: each micro-batch has an equal share in the step's. It
    leaves out pads as the model's own code does for an attention mask. Attention needs no mask, as pads come last.
    """
    output = model(input_ids=input_ids, use_cache=False, **packed)
    logits = output.logits.float().flatten(0, 1)
    if recipe.distil is not None:
        parts = [plain_objective(logits, targets, predicted, recipe.distil) / total_weight]
    elif recipe.preference is None:
        parts = [_objective(logits, targets, recipe) / total_weight]
    else:
        positions = packed.get("position_ids")
        if positions is not None and positions.dim() == 3:  # the text's come before those along three axes
            positions = positions[0]
        losses = pair_losses(logits, targets[0], positions, real, recipe.preference, by_reference)
        parts = [losses.sum() / total_weight]
    if getattr(output, "aux_loss", None) is not None:
        coefficient = model.config.get_text_config().router_aux_loss_coef
        aux_loss = output.aux_loss
        if real is not None:
            balance = sys.modules[type(model).__module__].load_balancing_loss_func
            aux_loss = balance(output.router_logits, model.num_experts, model.num_experts_per_tok, real.long())
        parts.append((coefficient * aux_loss).float() / num_micro_batches)
    if sum(parts).requires_grad:  # not of a text, if only what turns images into features is trained
        sum(parts).backward()
    return [part.item() for part in parts]


def _weighted_targets(batch: Sequences, num_micro_batches: int, recipe: Recipe) -> list[Weighted]:
    """Return targets and loss weights of each micro-batch, [B·T] each."""
    if batch.loss_weights is None:
        weights: Iterable[Tensor | None] = [None] * num_micro_batches
    else:
        weights = [w.flatten() for w in batch.loss_weights.to(recipe.device).split(recipe.micro_batch_size)]
    targets = batch.targets.to(recipe.device).split(recipe.micro_batch_size)
    return [(t.flatten(), w) for t, w in zip(targets, weights, strict=True)]


def _objective(logits: Tensor, targets: Weighted, recipe: Recipe) -> Tensor:
    """Return what is minimised, summed over the supervised tokens, each times its weight.

    logits: [T, V].
    targets: [T] each.
    """
    ids, weights = targets
    smoothing, reduction = recipe.label_smoothing, "sum" if weights is None else "none"
    loss = F.cross_entropy(logits, ids, ignore_index=-100, reduction=reduction, label_smoothing=smoothing)
    if weights is not None:
        loss = (loss * weights).sum()
    if recipe.z_loss:
        log_z = torch.logsumexp(logits, dim=-1) * (ids != -100)
        loss = loss + recipe.z_loss * (log_z**2 * (1 if weights is None else weights)).sum()
    return loss


def _backward_in_chunks(
    model: Any,
    input_ids: Tensor,
    targets: Weighted,
    packed: dict[str, Tensor],
    total_weight: float,
    recipe: Recipe,
    several: bool,
) -> list[float]:
    """Compute what `_backward` does with the head on some tokens at a time, for a body with a linear head.

    With `several` micro-batches, the gradients of an untied head enter the step's sum one by one: they are `of_chunks`
    of its weight. Otherwise they are summed in FP32 and rounded once; backward through the body then adds what a tied
    embedding contributes.
    """
    hidden = model.base_model(input_ids=input_ids, use_cache=False, **packed).last_hidden_state
    head = model.get_output_embeddings()
    losses, of_hidden, of_chunks, chunk = [], [], [], recipe.loss_chunk_tokens
    ids, weights = targets
    for start, h in zip(range(0, ids.numel(), chunk), hidden.detach().flatten(0, 1).split(chunk), strict=True):
        h.requires_grad_(hidden.requires_grad)
        here = slice(start, start + chunk)
        part = (
            _objective(head(h).float(), (ids[here], None if weights is None else weights[here]), recipe) / total_weight
        )
        part.backward()
        losses.append(part.item())
        of_hidden.append(h.grad)
        if head.weight.requires_grad:
            of_chunks.append(head.weight.grad)
            head.weight.grad = None
    if several and head.weight is not model.get_input_embeddings().weight:
        head.weight.of_chunks = of_chunks
    elif of_chunks:
        total = of_chunks[0].float()
        for gradient in of_chunks[1:]:
            total = total + gradient
        head.weight.grad = total.to(head.weight.dtype)
    if hidden.requires_grad:
        hidden.backward(torch.cat(of_hidden).view_as(hidden))
    return losses


def _load(folder: Path, dtype: torch.dtype, recipe: Recipe) -> Any:
    """Load the model, and into it the pairs of the recipe's adapter with the peft library, in the same type."""
    model = load_model(folder, dtype)
    if recipe.adapter is None:
        return model
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(model, recipe.adapter, is_trainable=True, autocast_adapter_dtype=False)
    return loaded.get_base_model()


def _plain(name: str) -> str:
    """Return a parameter's name without what peft puts into it."""
    return re.sub(r"\.(base_layer|default)(?=\.)", "", name)


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """Load the model by the class that its configuration names, or by the folder's own code if there is some.

    It is a causal language model, or one that has one inside. Models with capped scores use eager attention: older
    Transformers give the scores to SDPA, which leaves the cap out. Quantised weights are dequantised, on a GPU as well.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model_class = getattr(transformers, config.architectures[0], AutoModelForCausalLM)
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    options: dict[str, Any] = {"attn_implementation": "eager"} if capped else {}
    if isinstance(quantisation := getattr(config, "quantization_config", None), dict):
        quantisation["dequantize"] = True
        options["config"] = config
    return model_class.from_pretrained(folder, dtype=dtype, trust_remote_code=True, **options)


def _trained(model: Any) -> list[tuple[str, nn.Parameter]]:
    return [(_plain(name), p) for name, p in model.named_parameters() if p.requires_grad]


@dataclass
class _Place:
    """Says where the run is, for the seed of dropout."""

    seed: int
    step: int
    micro_batch: int = 0
    layer: int = 0  # 0 before the decoder layers, N + 1 after them


def _seed_dropout(model: Any, place: _Place, unreached: tuple[str, ...]) -> None:
    """Seed before (call 0) and after (call 1) each decoder layer and each other module that has parameters."""
    layers = _layer_list(model, unreached)
    inside = {id(m) for layer in layers for m in layer.modules()}

    def seed(call: int) -> None:
        # torch.manual_seed formats three stacks for GPUs that are not there: a third of the time of these tests.
        value = dropout_seed(place.seed, place.step, place.micro_batch, place.layer, call)
        torch.default_generator.manual_seed(value)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(value)

    def enter(layer: int) -> None:
        place.layer = layer
        seed(0)

    def leave(layer: int) -> None:
        seed(1)
        place.layer = layer + 1 if layer == len(layers) else 0  # N + 1 after the last

    for i, module in enumerate(layers, 1):
        module.register_forward_pre_hook(lambda *_, i=i: enter(i))
        module.register_forward_hook(lambda *_, i=i: leave(i))
    for module in model.modules():
        if id(module) not in inside and any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda *_: seed(0))
            module.register_forward_hook(lambda *_: seed(1))


def _layer_list(model: Any, unreached: tuple[str, ...]) -> nn.ModuleList:
    reached = {id(p) for name, p in model.named_parameters() if not name.startswith(unreached)}
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters() if id(p) in reached))


def _matrices(model: Any, recipe: Recipe, unreached: tuple[str, ...]) -> list[str]:
    """Return the names of the parameters that Muon trains.

    These are matrices, and stacks of them, of the decoder layers, unless the pattern's group says otherwise. Norms,
    biases, tables and convolutions are not among them.
    """
    if recipe.muon is None:
        return []
    layers = _layer_list(model, unreached)
    tables = [m for m in layers.modules() if isinstance(m, nn.Embedding | nn.Conv1d)]
    inside = {id(p) for p in layers.parameters()} - {id(m.weight) for m in tables}
    by_rule = {n for n, p in _trained(model) if id(p) in inside and p.dim() > 1 and not UNDECAYED.search(n)}
    own = {name: _own(name, recipe).muon for name, _ in _trained(model)}
    return [name for name, muon in own.items() if (name in by_rule if muon is None else muon)]


def _own(name: str, recipe: Recipe) -> Own:
    return next((own for own in recipe.groups if _matches([own.match], [name])), Own(""))


def _beginning(folder: Path, recipe: Recipe, model: Any) -> Result:
    whole = {_plain(n): p.detach() for n, p in _load(folder, torch.float32, recipe).named_parameters()}
    masters = {name: whole[name].to(recipe.device) for name, _ in _trained(model)}
    _set_weights([(_plain(name), p) for name, p in model.named_parameters() if not p.requires_grad], whole)
    zeros = {name: torch.zeros_like(master) for name, master in masters.items()}
    return Result(0, 0, masters, zeros, zeros)


class _Optimizer:
    """Runs torch's AdamW, and torch's Muon on the `matrices`, from the state of `start`.

    Norms and biases have no decay unless their group says so.
    """

    def __init__(
        self, masters: Mapping[str, nn.Parameter], matrices: Iterable[str], recipe: Recipe, start: Result
    ) -> None:
        self._masters = masters
        self._matrices = set(matrices)
        self._recipe = recipe
        self._moment_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[recipe.moments]
        groups = {name: self._group(name, recipe) for name in masters}
        rest = [group for name, group in groups.items() if name not in self._matrices]
        self._optimizers: list[torch.optim.Optimizer] = []
        self._moments: dict[str, dict[str, Tensor]] = {}
        if rest:
            adamw = torch.optim.AdamW(rest, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)
            for group in rest:
                (p,), name = group["params"], group["name"]
                step = torch.tensor(float(start.adam_steps), device=p.device)
                m, v = (x[name].to(self._moment_dtype).float().clone() for x in (start.exp_avg, start.exp_avg_sq))
                self._moments[name] = adamw.state[p] = {"step": step, "exp_avg": m, "exp_avg_sq": v}
            self._optimizers.append(adamw)
        self._momenta = {name: start.exp_avg[name].clone() for name in self._matrices}
        self._slices = {name: [nn.Parameter(s) for s in _slices(masters[name].data)] for name in self._matrices}
        if recipe.muon:
            stacks = [group | {"params": self._slices[name]} for name, group in groups.items() if name in self._slices]
            muon = torch.optim.Muon(stacks, recipe.lr, adjust_lr_fn=recipe.muon.adjust_lr, **_numbers(recipe.muon))
            for name, slices in self._slices.items():
                for p, momentum in zip(slices, _slices(self._momenta[name]), strict=True):
                    muon.state[p] = {"momentum_buffer": momentum}
            self._optimizers.append(muon)

    def _group(self, name: str, recipe: Recipe) -> dict[str, Any]:
        own, p = _own(name, recipe), self._masters[name]
        decay = recipe.weight_decay if p.dim() > 1 and not UNDECAYED.search(name) else 0.0
        decay = decay if own.weight_decay is None else own.weight_decay
        lr_scale = 1.0 if own.lr is None else own.lr / recipe.lr
        return {"params": [p], "weight_decay": decay, "lr_scale": lr_scale, "name": name}

    def step(self, rate: float) -> None:
        """Update the masters from their gradients. `rate`: learning rate of the step."""
        for name, slices in self._slices.items():
            for p, gradient in zip(slices, _slices(self._masters[name].grad), strict=True):
                p.grad = gradient
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["lr_scale"]
            optimizer.step()
        if self._recipe.moments == "bf16":
            for name, state in self._moments.items():
                round_moments(state["exp_avg"], state["exp_avg_sq"], name, int(state["step"]), self._recipe.seed)

    def state(self) -> tuple[Named, Named, Named]:
        dtype, states = self._moment_dtype, self._moments.items()
        exp_avg = self._momenta | {name: state["exp_avg"].to(dtype) for name, state in states}
        exp_avg_sq = {name: state["exp_avg_sq"].to(dtype) for name, state in states}
        return {name: p.detach() for name, p in self._masters.items()}, exp_avg, exp_avg_sq


def _numbers(muon: MuonRecipe) -> dict[str, Any]:
    return {"momentum": muon.momentum, "nesterov": muon.nesterov, "ns_steps": muon.ns_steps}


def _slices(stack: Any) -> list[Tensor]:
    """Return the matrix itself, or the matrices of a stack, as views."""
    return list(stack.view(-1, *stack.shape[-2:]))


def _set_weights(parameters: Iterable[tuple[str, nn.Parameter]], masters: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters:
            master = masters[name].detach()
            parameter.copy_(to_working(master) if parameter.dtype == torch.bfloat16 else master)


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
