"""Prices what layers compute, and their updates, in seconds, from a machine's rates. Pure.

Compute is priced layer by layer for one micro-batch: products by their FLOPs at the rate of products of their size,
attention at a rate of its own, and operations that are bound by memory by their bytes. If submitting the launches takes
longer, that counts instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.flat_layout import FlatLayout
from megatrain_ray.engine.layout.model_layout import DIRECTION_BYTES
from megatrain_ray.engine.layout.precision import SECOND_MOMENT_BYTES
from megatrain_ray.engine.model.flops import Product
from megatrain_ray.engine.model.structure import LayerKind
from megatrain_ray.engine.optimizer.muon import matrix_parts
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_groups import UpdateOrder
from megatrain_ray.engine.plan.schedule import Phase
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.cost.simulate_step import operations
from megatrain_ray.engine.planner.memory.chunk_sizes import is_long, logits_bytes

# Bytes that operations between products read and write, as multiples of what autograd keeps of a layer. From one
# eager decoder layer (Qwen2.5-7B's, 16 × 1024 tokens, 595 model TFLOPS on an H200).
FORWARD_TRAFFIC, BACKWARD_TRAFFIC = 3, 5
# Share of these bytes in a compiled layer, whose operations are fused. From the same layer, 652 model TFLOPS. With
# experts, too: 8 layers of Qwen3-30B-A3B computed for 0.763 s on an H100 (64 × 1024 tokens). From rates measured in
# bursts 0.734 are predicted, and 0.93 without this share.
COMPILED_TRAFFIC = 1 / 3
# Bytes read and written to round a bf16 element to FP8: a compiled layer does it in one pass, another one in seven
# operations with FP32 in between. Counted, not measured.
FP8_ROUNDING, UNCOMPILED_FP8_ROUNDING = 3, 27
# Traffic as a multiple of a chunk's logits and their gradients: each is written and read once.
LOSS_TRAFFIC = 2
SCORE_BYTES = 8  # of a logit of which only the log-probability is wanted: in FP32, and its logarithm
# Host time of a visit to a layer, in launches for each product and for one product more. A compiled layer of Qwen2.5
# with 7 products took the host 1.05 ms forward if it lived on the device, 1.8 ms if it streamed, and 1.3 to 3.1 ms
# backward, on a machine with an H200 and launches of about 6 us (control path in benchmarks/history.md). A backward
# counts as two.
LAUNCHES = 20
# Host time of an update of a layer that lives on the device, in launches. Qwen2.5's 12 parameters, updated one by one,
# took 0.39 ms in the same runs; since then they are 8 parts.
UPDATE_LAUNCHES = 40
UPDATE_BYTES = 26  # per parameter where update rates are measured: bf16 gradient, split master, two moments
# Bytes per parameter that a CPU moves in the time in which it rounds moments to bf16. 16 cores of an H100's host made
# 5.5 Gparam/s of 26 bytes and 6.0 of 18 in steps, as if these were 24; alone 5.7 and 7.5, as if they were 20.
ROUNDING_BYTES = 4
# Share of the link's rate at which activations that leave slow the updates as much as copies in both directions do.
# From traces: updates were slowed by 0.37 of the difference at 0.18 of the rate (Llama-3-8B within 25 GiB), by 0.7 to
# 1.1 at 0.5 and more (7.6B, Llama-3-8B within 67.3 GiB).
FULLY_SLOWING = 0.5
NS_STEPS = 5  # Newton-Schulz steps that Muon does by default


class LayerPrices:
    """Prices what one plan computes, layer by layer, for one micro-batch."""

    def __init__(self, plan: Plan, basis: CostBasis, activations: ActivationBytes) -> None:
        """Price the operations of `plan`.

        activations: bytes for a micro-batch of the plan.
        """
        self._plan = plan
        self._basis = basis
        self._activations = activations
        self._profile = basis.profile
        self._num_tokens = plan.step.micro_batch_size * plan.step.seq_len
        self._known = basis.known_prices(plan, activations).of_layers
        self._products_s = cache(self._price_products)

    def of_layer(self, name: str, layer: int) -> float:
        """Return the seconds of an operation that computes, for one micro-batch.

        name: forward, recompute, replay, backward, loss, score (log-probabilities of the targets), update (by the GPU)
            or orthogonalize.
        """
        plan = self._plan.layers[layer]
        key = name, self._basis.alike[layer], self._activations.alike[layer], plan.compiled, plan.activation_budget
        if key not in self._known:
            self._known[key] = self._compute(name, layer)
        return self._known[key]

    @cached_property
    def updated_by_cpu(self) -> list[int]:
        return [i for i in self._plan.layer_order if self._plan.layers[i].updated_by == "cpu"]

    @cached_property
    def beside_copies(self) -> float:
        """Return by how much copies slow the updates by the CPU: 0 not at all, 1 as much as copies in both directions.

        Both compete for the host's memory. Under a backward copies run in both directions. Without clipping
        updates begin together with the backward, and may outlast it. Under a forward weights are uploaded, which does
        not count: 2.28 s per step were measured, 2.27 are predicted with the rate of updates alone
        (docs/hardware_profile.md). Activations may leave meanwhile.
        """
        plan = self._plan
        if plan.step.update_order is UpdateOrder.BACKWARD:
            alone_s = sum(self._update_s(layer, beside_copies=0.0) for layer in self.updated_by_cpu)
            return min(1.0, self._backwards_s / alone_s) if alone_s else 1.0
        if not plan.host_activation_bytes:
            return 0.0
        sweep_s = sum(self.of_layer("forward", layer) for layer in range(len(plan.layers) - 1))
        most_bytes = plan.step.num_live_micro_batches * sweep_s * self._profile.busy_d2h_bytes_per_s
        return min(1.0, plan.host_activation_bytes / (FULLY_SLOWING * most_bytes))

    def of_update(self, layer: int) -> float:
        """Return the seconds of the layer's update by the CPU."""
        return self._update_s(layer, self.beside_copies)

    def _update_s(self, layer: int, beside_copies: float) -> float:
        rate = UPDATE_BYTES * self._profile.updates_per_s(beside_copies)
        rounds = self._plan.precision.moments == "bf16"
        rounding_bytes = ROUNDING_BYTES * self._plan.layers[layer].num_trained if rounds else 0
        return (self._update_bytes(layer) + rounding_bytes) / self._plan.hosts.num_hosts / rate

    @property
    def _backwards_s(self) -> float:
        """Return the seconds of all backwards of a step but those of the head."""
        layers = [visit.layer for visit in self._basis.one_sweep if visit.phase is Phase.BACKWARD]
        names = [(name, i) for i in layers for name in operations(Phase.BACKWARD, self._plan.layers[i].activations)]
        return self._plan.step.num_micro_batches * sum(self.of_layer(name, i) for name, i in names)

    def _update_bytes(self, layer: int) -> int:
        """Return the bytes that an update of the layer reads and writes, over all hosts."""
        plan = self._plan.layers[layer]
        moments = 2 * self._plan.precision.element_bytes * plan.num_trained
        muon_bytes = (DIRECTION_BYTES - 2 * SECOND_MOMENT_BYTES) * plan.num_muon
        return moments + muon_bytes + self._plan.gradients.offload_dtype.itemsize * plan.num_trained

    def _compute(self, name: str, layer: int) -> float:
        match name:
            case "forward" | "recompute" | "replay":
                return self._forward(layer) + (self._settling(layer + 1) if name == "forward" else 0.0)
            case "backward":
                return self._backward(layer) + self._settling(layer)
            case "loss" | "score":
                return self._loss(layer) if name == "loss" else self._score(layer)
            case "update":
                launches_s = UPDATE_LAUNCHES * self._profile.launch_s
                return max(self._update_bytes(layer) / self._profile.device_bytes_per_s, launches_s)
            case "orthogonalize":
                return self._orthogonalize(self._basis.layout.layers[layer])
        raise ValueError(f"no price for {name}")

    def _forward(self, layer: int) -> float:
        return self._layer(layer, 1, FORWARD_TRAFFIC, 0)

    def _backward(self, layer: int) -> float:
        """Return the seconds of a layer's backward, which adds its gradient to a sum.

        The gradient is written and read, and the sum is written. From the second micro-batch on the sum is read, too.
        With gradients added in pairs the sum is read and written half as often.
        """
        size = self._basis.layout.layers[layer].trained.size
        item, sum_itemsize = self._plan.precision.working_dtype.itemsize, self._plan.gradients.accumulate_dtype.itemsize
        several = self._plan.step.num_micro_batches > 1
        if self._plan.compute.chunks_add_to_sums and layer == len(self._plan.layers) - 1:
            size = 0  # the loss has already added the head's gradient
        summed = (1 + several) * sum_itemsize / (2 if layer in self._plan.paired_layers else 1)
        working_s = self._layer(layer, 2, BACKWARD_TRAFFIC, size * (2 * item + summed))
        return working_s + self._recomputed(layer) + self._in_chunks(layer)

    def _settling(self, layer: int) -> float:
        """Return the seconds in which what enters the layer, or its gradient, is copied (Plan.settles)."""
        if not self._plan.settles or not 0 < layer < len(self._activations.boundary):
            return 0.0
        return 2 * self._activations.boundary[layer] / self._profile.device_bytes_per_s

    def _recomputed(self, layer: int) -> float:
        """Return the seconds of what the backward of a compiled layer recomputes."""
        budget, costs = self._plan.layers[layer].activation_budget, self._activations.budgets_of(layer)
        cost = next((cost for cost in costs if cost.activation_budget == budget), None)
        if cost is None or not self._plan.layers[layer].compiled:
            return 0.0
        # For short sequences attention is a few percent and is priced like the products, as it was when predictions
        # were compared with real steps. For long ones it is most of the work.
        attending = cost.of_attention if is_long(self._plan.step.seq_len) else 0.0
        flops, products = cost.recomputed_flops - attending, self._basis.work[layer].products
        products_s = self._profile.matmul_s(self._plan.precision.compute, flops)
        # Those of experts and in FP8 are as fast as the same products in a forward.
        if any(product.num_experts or product.fp8_sides for product in products):
            forward_flops = sum(2 * product.elements * self._num_tokens for product in products)
            products_s = self._micro_batch_products_s(products, 1) * flops / forward_flops
        return products_s + self._profile.attention_s(self._plan.step.seq_len, attending)

    def _in_chunks(self, layer: int) -> float:
        """Return the seconds that the backward of an MLP in chunks takes beyond that of a whole one.

        Its forward runs again, and each chunk's gradient of the weights is added to a sum.
        """
        chunk = self._plan.compute.mlp_chunk_tokens
        if not chunk or self._basis.structure.layers[layer].mlp is None:
            return 0.0
        products = tuple(product for product in self._basis.work[layer].products if product.of_mlp)
        summed = sum(p.elements for p in products if p.trained) * (2 * self._plan.precision.working_dtype.itemsize + 8)
        chunk_s = self._products_s(products, 1, chunk) + summed / self._profile.device_bytes_per_s
        return self._plan.num_mlp_chunks * chunk_s

    def _layer(self, layer: int, passes: int, traffic: int, more_bytes: float) -> float:
        """Return the seconds of one micro-batch through one layer.

        passes: 1 for a forward; 2 for a backward, which makes gradients of trained weights and of the input.
        traffic: bytes that operations between products read and write, as a multiple of what is kept.
        more_bytes: further bytes that are read and written.
        """
        # The same bytes are read and written whether MLPs are in chunks or whole.
        work, kept = self._basis.work[layer], float((self._activations.whole or self._activations).kept[layer])
        if self._basis.structure.layers[layer].kind is LayerKind.HEAD:
            work = replace(work, products=())  # the loss counts the head's products
        if self._plan.layers[layer].compiled:
            kept *= COMPILED_TRAFFIC
        boundary = self._activations.boundary[min(layer + 1, len(self._activations.boundary) - 1)]
        moved = traffic * kept + 2 * boundary + more_bytes + self._rounded_bytes(layer, passes)
        working_s = self._micro_batch_products_s(work.products, passes) + moved / self._profile.device_bytes_per_s
        if work.attention and work.attention.width:
            num_tokens, seq_len = self._num_tokens, self._plan.step.seq_len
            flops = passes * work.attention.flops(num_tokens, num_tokens * seq_len)
            working_s += self._profile.attention_s(seq_len, flops)
        return max(working_s, self._launches(work.products, passes))

    def _rounded_bytes(self, layer: int, passes: int) -> float:
        """Return the bytes read and written to round the operands of FP8 products; `passes` as for `_layer`.

        A forward rounds the input and the weight. A backward rounds the weight and the output's gradient along another
        side, and for a trained weight the input and that gradient once more. Both are taken to be equally wide.
        """
        elements = 0.0
        for p in self._basis.work[layer].products:
            if p.fp8_sides:
                elements += p.elements + self._num_tokens * p.fp8_sides * (0.5 if passes == 1 else 0.5 + p.trained)
        return elements * (FP8_ROUNDING if self._plan.layers[layer].compiled else UNCOMPILED_FP8_ROUNDING)

    def _launches(self, products: Sequence[Product], passes: int) -> float:
        if self._plan.step.captured:
            return 0.0  # the device launches the operations of the graph by itself
        return passes * LAUNCHES * (1 + len(products)) * self._profile.launch_s

    def _micro_batch_products_s(self, products: tuple[Product, ...], passes: int) -> float:
        return self._products_s(products, passes, self._num_tokens)

    def _price_products(self, products: tuple[Product, ...], passes: int, num_tokens: int) -> float:
        """Return the seconds of these products.

        passes: 1 for a forward; 2 for a backward, which makes no gradient of a frozen matrix.
        """
        precision, total_s = self._plan.precision.compute, 0.0
        for product in products:
            count = 1 if passes == 1 else 1 + product.trained
            flops = 2 * product.elements * num_tokens
            if product.num_experts:
                total_s += count * self._profile.grouped_s(precision, flops, num_tokens * product.routed_share)
            else:
                total_s += count * self._profile.matmul_s("fp8" if product.fp8_sides else precision, flops)
        return total_s

    def _loss(self, layer: int) -> float:
        """Return the seconds of the loss: forward and backward of the logits, in chunks.

        The head's gradient is summed over the chunks in FP32, or added to the step's sum. With pairs a forward comes
        first, whose logits nothing fuses with what follows them.
        """
        products, chunk = self._basis.work[layer].products, self._plan.compute.loss_chunk_tokens
        num_chunks = math.ceil(self._num_tokens / chunk)
        item = self._plan.precision.working_dtype.itemsize
        logit_bytes = logits_bytes(
            self._basis.structure,
            self._plan.precision,
            1,
            self._basis.objective_bytes,
            compiled=self._plan.compute.compiled_loss,
        )
        trained = sum(p.elements for p in products if p.trained)
        sums = num_chunks * trained * (2 * item + 8) if num_chunks > 1 or self._plan.compute.chunks_add_to_sums else 0
        working_s = (self._num_tokens * LOSS_TRAFFIC * logit_bytes + sums) / self._profile.device_bytes_per_s
        all_passes = (1, 1, 2) if self._basis.scores_in_step else (1, 2)
        working_s += num_chunks * sum(self._products_s(products, passes, chunk) for passes in all_passes)
        if self._basis.scores_in_step:
            scores = self._num_tokens * self._basis.structure.num_logits * (item + SCORE_BYTES)
            working_s += LOSS_TRAFFIC * scores / self._profile.device_bytes_per_s
        return max(working_s, num_chunks * self._launches(products, sum(all_passes)))

    def _score(self, layer: int) -> float:
        """Return the seconds of the targets' log-probabilities, from logits that nothing is fused with."""
        products, chunk = self._basis.work[layer].products, self._plan.compute.loss_chunk_tokens
        num_chunks = math.ceil(self._num_tokens / chunk)
        logit_bytes = self._plan.precision.working_dtype.itemsize + SCORE_BYTES
        moved = LOSS_TRAFFIC * self._num_tokens * self._basis.structure.vocab_size * logit_bytes
        working_s = num_chunks * self._products_s(products, 1, chunk) + moved / self._profile.device_bytes_per_s
        return max(working_s, num_chunks * self._launches(products, 1))

    def _orthogonalize(self, layer: FlatLayout) -> float:
        """Return the seconds in which one layer's momentum is orthogonalized.

        The Newton-Schulz iteration runs in bf16; gradient and momentum are read and written in FP32. With several GPUs
        each has an equal share of all layers together. In a backward, however, sums over GPUs keep them in step layer
        by layer, so the largest part counts.
        """
        part_flops = [part.flops for part in matrix_parts(layer, self._plan.hosts.num_gpus)]
        total = sum(part_flops)
        if not total:
            return 0.0
        in_backward = self._plan.step.update_order is UpdateOrder.BACKWARD
        flops = max(part_flops) if in_backward else total / self._plan.hosts.num_gpus
        moved = 16 * layer.num_muon * flops / total
        return self._profile.matmul_s("bf16", NS_STEPS * flops) + moved / self._profile.device_bytes_per_s
