"""Writes a model folder with code that Transformers does not have, and with buffers that the checkpoint holds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

CODE = '''
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput


class MixerConfig(PretrainedConfig):
    model_type = "own_mixer"

    def __init__(self, vocab_size=131, hidden_size=16, num_layers=3, **kwargs):
        self.vocab_size, self.hidden_size, self.num_layers = vocab_size, hidden_size, num_layers
        super().__init__(**kwargs)


class Mixer(nn.Module):
    """Mixes every token with the mean of those before it."""

    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)
        self.register_buffer("scale", torch.ones(size))
        self.register_buffer("order", torch.arange(size))

    def forward(self, hidden):
        counts = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None]
        mixed = self.norm(hidden + hidden.cumsum(1) / counts)
        return hidden + self.down(torch.tanh(self.up(mixed[..., self.order]))) * self.scale


class MixerBase(PreTrainedModel):
    config_class = MixerConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Mixer(config.hidden_size) for _ in range(config.num_layers))
        self.post_init()

    def forward(self, input_ids=None, use_cache=None):
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return BaseModelOutput(last_hidden_state=hidden)


class MixerForCausalLM(PreTrainedModel):
    config_class = MixerConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = MixerBase(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, inputs_embeds=None, labels=None, use_cache=None):
        output = self.model(input_ids=input_ids, use_cache=use_cache)
        return CausalLMOutput(logits=self.lm_head(output.last_hidden_state))
'''


def build_own_code(folder: Path, vocab_size: int = 131, code: str = CODE) -> Path:
    """Write a model with random weights, and with buffers other than those that the code makes."""
    folder.mkdir(exist_ok=True)
    (folder / "modeling_own.py").write_text(code)
    classes = {"AutoConfig": "modeling_own.MixerConfig", "AutoModelForCausalLM": "modeling_own.MixerForCausalLM"}
    settings = {
        "model_type": "own_mixer",
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
        "architectures": ["MixerForCausalLM"],
        "auto_map": classes,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    generator = torch.Generator().manual_seed(0)
    state = AutoModelForCausalLM.from_config(config, trust_remote_code=True).state_dict()
    for name, values in state.items():
        if values.is_floating_point():
            state[name] = torch.randn(values.shape, generator=generator) * 0.3
        else:
            state[name] = torch.randperm(values.numel(), generator=generator)
    save_file({name: values.contiguous() for name, values in state.items()}, folder / "model.safetensors")
    return folder
