"""Sampling by the engine: the tokens of plain `generate`, whatever the plan, and training does not notice it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_ray.engine.layout.split_master import to_working
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.step.engine import Engine
from megatrain_ray.engine.step.sampler import Completion, Prompt, SamplingParams, _Draw
from megatrain_ray.engine.weights_stream.bound_model import BoundModel
from tests.support.family_models import build_family, family_batches
from tests.support.reference import Recipe, load_model, torch_threads
from tests.support.run_engine import EngineResult, Mode, train_engine
from tests.support.tiny import build_tiny, tiny_batches

LAYERS = Mode(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, num_shards=2, num_fragments=3)
ON_DISK = Mode(num_shards=2, num_fragments=3, spilled=frozenset({1, 2, 3}), on_disk=frozenset({2, 3}))
RESIDENT = Mode(hbm_layers=frozenset(range(5)))
PARTS = Mode(block_parts=4)
COMPILED = Mode(activation_budget=0.5, mlp_chunk_tokens=8)
PROMPTS = [Prompt([10, 20, 30], 1), Prompt([40, 41, 42, 43, 44, 45, 46], 2), Prompt([7], 3)]
GREEDY = SamplingParams(20, temperature=0.0)


def plain(folder: Path, recipe: Recipe, ours: EngineResult, prompt: Prompt) -> tuple[list[int], torch.Tensor]:
    """Return what the trained model, without the engine, generates of one prompt, and its log-probabilities."""
    model = load_model(folder, torch.bfloat16 if recipe.precision == "bf16" else torch.float32).eval()
    with torch_threads(recipe.num_threads), torch.no_grad():
        for name, parameter in model.named_parameters():
            master = ours.masters.get(name, parameter)
            parameter.data = to_working(master) if recipe.precision == "bf16" else master.clone()
        made = model.generate(
            torch.tensor([list(prompt.ids)]), attention_mask=torch.ones(1, len(prompt.ids), dtype=torch.long),
            max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    ids = made.sequences[0, len(prompt.ids) :].tolist()
    logprobs = torch.log_softmax(torch.cat(made.logits).float(), -1)
    return ids, logprobs[range(20), ids]


def assert_plain(folder: Path, recipe: Recipe, ours: EngineResult, prompts: list[Prompt], atol: float) -> None:
    for prompt, found in zip(prompts, ours.sampled[-1], strict=True):
        ids, logprobs = plain(folder, recipe, ours, prompt)
        assert found.ids == ids
        torch.testing.assert_close(torch.tensor(found.logprobs), logprobs, rtol=0, atol=atol)


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("mode", "tied"),
    [(LAYERS, True), (Mode(), False), (PARTS, False), (ON_DISK, True), (COMPILED, False), (RESIDENT, False)],
    ids=["layers", "plain", "divided blocks", "weights on disk", "compiled", "resident"],
)
def test_it_generates_what_the_trained_model_does_by_itself(tmp_path: Path, mode: Mode, tied: bool) -> None:
    """Prompts of several lengths together, of which each is padded, have the tokens of each by itself."""
    build_tiny(tmp_path, tied=tied, attention_dropout=0.0 if mode is PARTS else 0.2)  # parts have none
    recipe, batches = Recipe(3, lr=0.01, seed=3), tiny_batches(3)
    ours = train_engine(tmp_path, batches, recipe, mode, prompts=PROMPTS, sampling=GREEDY)
    assert_plain(tmp_path, recipe, ours, PROMPTS, 1e-5)
    assert ours.sampled[0] != ours.sampled[-1]
    unsampled = train_engine(tmp_path, batches, recipe, mode)
    assert ours.losses == unsampled.losses, "training does not notice that it was sampled"


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    "name",
    ["Mixtral", "GPT-2", "Gemma 2", "Qwen3-Next", "Gemma 3n", "Gemma 3, vision-language", "Falcon-H1", "DeepSeek-V3"],
)
def test_families(tmp_path: Path, name: str) -> None:
    """Families with learned positions, sliding windows, routers, states, or keys and values that layers share."""
    build_family(name, tmp_path)
    recipe = Recipe(1, micro_batch_size=2)
    prompts = [Prompt([10, 20, 30], 1), Prompt([40, 41, 42], 2)]
    ours = train_engine(tmp_path, family_batches(1), recipe, LAYERS, prompts=prompts, sampling=GREEDY)
    assert_plain(tmp_path, recipe, ours, prompts, 1e-5)


def test_a_row_draws_its_own_tokens(tmp_path: Path) -> None:
    """Tokens depend on the row's seed and not on the rows beside it, and end at an end."""
    build_tiny(tmp_path)
    sampling = SamplingParams(12, temperature=0.7, top_p=0.9, ends=tuple(range(100, 130)))

    def sampled(prompts: list[Prompt]) -> list[Completion]:
        return train_engine(tmp_path, tiny_batches(1), Recipe(1), Mode(), prompts=prompts, sampling=sampling).sampled[0]

    group = [Prompt([1, 2, 3], seed) for seed in range(6)]
    together = sampled([*group, *PROMPTS])
    for alone, beside in zip(sampled(group[2:4]), together[2:4], strict=True):
        assert (alone.ids, alone.ended) == (beside.ids, beside.ended)
        assert alone.logprobs == pytest.approx(beside.logprobs, abs=1e-5)
    assert len({tuple(completion.ids) for completion in together[:6]}) == 6
    for completion in together:
        assert [k for k, token in enumerate(completion.ids) if token in sampling.ends] == (
            [len(completion.ids) - 1] if completion.ended else []
        )
        assert completion.ended or len(completion.ids) == 12
    assert {completion.ended for completion in together} == {True, False}


def test_tokens_are_drawn_with_their_probabilities() -> None:
    """1,000 rows of the same logits: counts are within four standard deviations, and top_p leaves the rest out."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.8)):
        rows = [Prompt([0], seed) for seed in range(1000)]
        draw = _Draw(rows, SamplingParams(1, temperature, top_p), torch.device("cpu"))
        ids = draw(torch.zeros(1000, 1), logits.expand(1000, -1)).argmax(-1)
        likely = torch.softmax(logits / temperature, -1)
        kept = likely if top_p == 1 else torch.tensor([0.0, likely[1], likely[2], 0.0]) / (likely[1] + likely[2])
        counts = torch.bincount(ids, minlength=4)
        assert bool(((counts - 1000 * kept).abs() <= 4 * (1000 * kept * (1 - kept)).sqrt()).all()), counts
        for token, completion in zip(ids.tolist(), draw.completions(), strict=True):
            assert completion.ids == [token]
            assert completion.logprobs == pytest.approx([torch.log_softmax(logits, -1)[token].item()])


def test_a_batch_without_room_leaves_the_engine_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device memory runs out in layers of several tokens, and then in the head."""
    build_tiny(tmp_path)
    sample, eager = Engine.sample, BoundModel.eager
    countdown = iter(())
    num_failed = 0

    def tight(model: BoundModel, path: str) -> Any:
        if next(countdown, None) == 0:
            raise torch.OutOfMemoryError("no room")
        return eager(model, path)

    def no_room(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    async def retried(engine: Engine, *arguments: Any) -> list[Completion]:
        nonlocal countdown, num_failed
        modules = engine.model.proxied._model, engine.model.proxied._stub
        before = [dict(vars(module)) for module in modules]
        for number in (0, 3, 4, 11, 47):
            countdown = iter(range(number, -1, -1))
            with pytest.raises(torch.OutOfMemoryError):
                await sample(engine, *arguments)
            num_failed += 1
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(_Draw, "__call__", no_room)
            await sample(engine, *arguments)
        found = await sample(engine, *arguments)
        for module, own in zip(modules, before, strict=True):  # a compiled call would not fit a changed model
            assert [name for name, value in vars(module).items() if own.get(name, ()) is not value] == []
        return found

    def result() -> EngineResult:
        sampling = SamplingParams(10)
        return train_engine(tmp_path, tiny_batches(1), Recipe(1), LAYERS, prompts=PROMPTS, sampling=sampling)

    whole = result()
    monkeypatch.setattr(BoundModel, "eager", tight)
    monkeypatch.setattr(Engine, "sample", retried)
    assert (result().sampled, num_failed) == (whole.sampled, 10)
