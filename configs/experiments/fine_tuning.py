"""finetune and lora: a pretrained model learns from prompts and completions, all its weights or small adapters.

    python train.py --config=configs/fsdp.py:lora --config.init_from=MODEL --config.data.path=rows.jsonl

MODEL is a folder in the form of Hugging Face, or the workdir of a run. A line of rows.jsonl is {"prompt": "2 + 2 =",
"completion": " 4"}, or {"messages": [...]}, a dialogue; the loss counts completions, or answers, alone. Choose
model.seq_len so that your rows fit. docs/fine-tuning.md shows what the model of `make train` learns in a minute or two:
`lora` ends at a validation loss of 0.0168, and `finetune` at 0.0991, after 300 steps on 8 devices simulated from 2 CPU
cores. These learning rates suit a model of a million weights. Larger models want lower ones: 2e-4 for adapters of 7
billion weights (QLoRA, arXiv:2305.14314), 2e-5 for all of them (Llama 2, arXiv:2307.09288).
"""

from ml_collections import ConfigDict


def finetune(config: ConfigDict) -> None:
  config.data.update(prompt_field="prompt", messages_field="messages", packing="documents")
  config.optimizer.update(learning_rate=1e-3, warmup=10, weight_decay=0.0)
  config.update(eval_every=100, eval_examples=0, sample_length=0)


def lora(config: ConfigDict) -> None:
  finetune(config)
  config.model.lora_rank = 16
  config.optimizer.learning_rate = 1e-2
