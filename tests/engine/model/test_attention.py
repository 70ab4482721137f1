"""Which attention a run takes, what its masks cost, and that flex attention computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.discovery.fake_answers import FOLLOWED_BYTES, Answers
from megatrain_ray.engine.model.attention import Attention, without_cache
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.batch import assemble
from megatrain_ray.io.batching.windows import Rows
from megatrain_ray.model.architecture import Architecture
from megatrain_ray.planning.run_spec import prepare
from tests.support.documents import packed
from tests.support.families import FAMILIES, SIZES
from tests.support.family_models import build_family
from tests.support.reference import Recipe, train_reference
from tests.support.run_engine import Mode, train_engine
from tests.support.runs import config
from tests.support.tiny import as_tensors

CPU = Machine(device="cpu", num_cpus=2, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=None)
CUDA = Machine(device="cuda", num_cpus=2, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=80 << 30)
SEQ_LEN, LAYERS = 256, 3
LLAMA = {
    "model_type": "llama", "vocab_size": 264, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQ_LEN,
}  # fmt: skip


def plan(folder: Path, machine: Machine, shape: dict[str, Any] | None = None, **changes: Any) -> Plan:
    settings = {"data__seq_len": SEQ_LEN, "hardware__device": machine.device, "train__precision": "bf16"}
    settings |= {"model__attention": "auto", "hardware__compile": False}
    tree = config(folder, shape or LLAMA, **settings | changes)
    return prepare(TrainConfig.model_validate(tree).resolve(), machine).plan


def attentions(plan: Plan) -> tuple[Attention, Attention]:
    return plan.compute.attention, plan.compute.packed_attention


SDPA, FLEX = Attention.SDPA, Attention.FLEX


@pytest.mark.parametrize(
    ("machine", "shape", "changes", "expected"),
    [
        (CUDA, {}, {}, (SDPA, FLEX)),
        (CUDA, {}, {"data__packing": False}, (SDPA, SDPA)),
        (CUDA, {}, {"model__attention": "sdpa"}, (SDPA, SDPA)),
        (CUDA, {"model_type": "mistral", "sliding_window": 32}, {"data__packing": False}, (FLEX, FLEX)),
        # Its scores are capped, which Transformers' SDPA refuses (5.23).
        (CUDA, {"model_type": "gemma2", "head_dim": 16}, {"data__packing": False}, (FLEX, FLEX)),
        (CUDA, {"head_dim": 8}, {}, (SDPA, SDPA)),
        (CUDA, {"attention_dropout": 0.1}, {}, (SDPA, SDPA)),
        (CPU, {}, {}, (SDPA, SDPA)),
    ],
)
def test_flex_attention_is_taken_where_masks_are_needed_and_it_works(
    tmp_path: Path,
    machine: Machine,
    shape: dict[str, Any],
    changes: dict[str, Any],
    expected: tuple[Attention, Attention],
) -> None:
    assert attentions(plan(tmp_path, machine, LLAMA | shape, **changes)) == expected


@pytest.mark.parametrize(
    ("machine", "shape", "reason"),
    [
        (CPU, {}, "it computes gradients on a GPU only"),
        (CUDA, {"head_dim": 8}, "its kernels need heads of 16 at least, and this LlamaForCausalLM has heads of 8"),
        (CUDA, {"attention_dropout": 0.1}, "it has no dropout"),
        (CUDA, {"model_type": "bloom"}, "BloomForCausalLM does not support it"),
    ],
)
def test_flex_attention_that_is_asked_for_and_impossible_is_refused(
    tmp_path: Path, machine: Machine, shape: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"model\.attention: flex.*{reason}.*set model\.attention: auto"):
        plan(tmp_path, machine, LLAMA | shape, model__attention="flex")


def test_the_plan_counts_masks_by_hand(tmp_path: Path) -> None:
    """Four sequences an update, one a micro-batch; layers outermost keep the masks of all."""
    whole = plan(tmp_path, CUDA, model__attention="sdpa")
    assert whole.step.order is LoopOrder.LAYERS_OUTER
    assert masks_bytes(whole) == (4 + 2) * SEQ_LEN**2
    assert masks_bytes(plan(tmp_path, CUDA)) == (4 + 2) * 16 * (SEQ_LEN // 128) ** 2
    assert masks_bytes(plan(tmp_path, CUDA, data__packing=False)) == 0


def masks_bytes(plan: Plan) -> int:
    return next(row.num_bytes for row in plan.memory_items if row.name == "attention masks")


def test_a_layer_keeps_the_mask_that_sdpa_is_given_in_the_working_type() -> None:
    factory = Architecture(LLAMA)
    _, without = discover(factory, torch.bfloat16, 2, SEQ_LEN)
    _, whole = discover(factory, torch.bfloat16, 2, SEQ_LEN, packed=True)
    _, flex = discover(factory, torch.bfloat16, 2, SEQ_LEN, attention=FLEX, packed=True)
    assert (without.masks, whole.masks) == (0, 2 * SEQ_LEN**2)
    repeated = 2 * (2 * 2 * SEQ_LEN * 16 * 2)  # keys and values of two heads more, which SDPA shares without a mask
    more = [w - n for w, n in zip(whole.kept, without.kept, strict=True)]
    assert more[1:-1] == [2 * 2 * SEQ_LEN**2 + repeated] * LAYERS
    assert flex.kept == without.kept


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["Mistral", "Gemma 2", "Gemma 3n"])
def test_flex_attention_computes_the_same(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine computes the same with flex attention, without the compiler.

    It runs torch's own computation of what the kernel does, which has gradients on the CPU once its check of the device
    is out of the way.
    """
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    build_family(name, tmp_path)
    batches, recipe = [packed(step) for step in range(2)], Recipe(2, seed=3)
    mode = Mode(activations=ActivationPolicy.RECOMPUTE, packed_attention=FLEX)
    with torch.compiler.set_stance("force_eager"):
        ours = train_engine(tmp_path, batches, recipe, mode)
    theirs = train_reference(tmp_path, batches, recipe)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-5)


def test_whole_masks_of_long_sequences_are_not_computed() -> None:
    """A trial knows positions, but not what would be as large as the square of a sequence."""
    with FakeTensorMode(), Answers() as answers:
        positions = torch.arange(1 << 14)
        mask = positions[:, None] >= positions[None]
        assert mask.shape == (1 << 14, 1 << 14)
        assert int(positions[-1]) == (1 << 14) - 1
        known = sum(values.numel() * values.itemsize for _, values in answers._known.values())
        assert known <= FOLLOWED_BYTES


def test_the_imagined_masks_leave_nothing_behind() -> None:
    """They stand in a table that all models of the process share; models of one factory share a configuration."""
    factory = Architecture(FAMILIES["Mistral"].config)
    before = discover(factory, torch.float32, 1, 16, packed=True)
    discover(factory, torch.float32, 1, 16, attention=FLEX, packed=True)
    discover(factory, torch.float32, 1, 16)
    assert discover(factory, torch.float32, 1, 16, packed=True) == before


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
PHI3 = {
    **SIZES, "model_type": "phi3", "max_position_embeddings": 64, "original_max_position_embeddings": 8,
    "pad_token_id": 0, "rope_parameters": LONGROPE,
}  # fmt: skip


@pytest.mark.parametrize("packs", [False, True])
def test_pads_do_not_make_a_row_long(tmp_path: Path, packs: bool) -> None:
    """A row of 6 tokens and 10 pads has the loss of the 6 tokens, whose factors are the short ones."""
    torch.manual_seed(0)
    Architecture(PHI3)(torch.float32).save_pretrained(tmp_path)
    rows = Rows.of_pads(1, 16)
    rows.ids[0, :7], rows.documents[0, :7], rows.loss_weights[0, :7] = range(1, 8), 0, 1
    if packs:
        rows.documents[0, 4:7] = 1
    padded = assemble(rows)
    alone = assemble(Rows(*(part[:, :8] for part in rows)))
    recipe = Recipe(steps=1)
    assert train_engine(tmp_path, [padded], recipe, Mode()).losses == pytest.approx(
        train_reference(tmp_path, [as_tensors(alone)], recipe).losses, rel=1e-7
    )


def test_a_forward_that_knows_no_cache_is_told_of_none() -> None:
    """As that of openai-gpt in Transformers 4, whose first losses are then the plain model's."""

    class Without(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids

    class With(nn.Module):
        def forward(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
            return input_ids

    assert without_cache(Without()) == {}
    assert without_cache(With()) == without_cache(Architecture(LLAMA)(torch.float32)) == {"use_cache": False}
