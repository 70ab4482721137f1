"""Configurations of LLaMA-Factory and Axolotl, and what converts them with some keys changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.convert.convert_config import convert

LLAMA_FACTORY = """
### model
model_name_or_path: model
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: full
deepspeed: ds_z3.json

### dataset
dataset: dialogues,facts
template: qwen
cutoff_len: 200
overwrite_cache: true
preprocessing_num_workers: 16

### output
output_dir: runs/full
logging_steps: 10
save_steps: 0.25
save_total_limit: 3
plot_loss: true
overwrite_output_dir: true

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
"""

AXOLOTL = """
base_model: model
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: false
strict: false

datasets:
  - path: chats
    type: chat_template
    field_messages: messages
    message_property_mappings: {role: role, content: content}
    roles_to_train: ["assistant"]
chat_template: tokenizer_default
val_set_size: 0
output_dir: ./out

sequence_len: 200
sample_packing: false
pad_to_sequence_len: true
adapter:
lora_r:
wandb_project: mine
wandb_entity:

gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 10
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: 2e-5
max_grad_norm: 0
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
saves_per_epoch: 1
weight_decay: 0.01
special_tokens:
  pad_token: <|endoftext|>
"""


def write(folder: Path, text: str, **changes: Any) -> Path:
    """Write the file with these keys changed; a key that is None is left out."""
    tree = {key: value for key, value in (yaml.safe_load(text) | changes).items() if value is not None}
    (folder / "theirs.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return folder / "theirs.yaml"


def converted(path: Path, *overrides: str, **options: Any) -> dict[str, Any]:
    found = convert(path, overrides, **options)
    tree = yaml.safe_load(found.text)
    TrainConfig.model_validate(tree)
    return dict(tree)
