"""The config: CIFAR-10 as configs/experiments/cifar10.py reads it, with the network in place of the Transformer."""

from ml_collections import ConfigDict

from configs import base, project


def get_config(preset: str = "cifar10") -> ConfigDict:
  config = base.get_config(preset, "data_parallel")
  project.use(config, "convnet")
  config.model.name = "convnet"
  config.optimizer.update(name="sgd", learning_rate=0.05, momentum=0.9, weight_decay=5e-4, warmup=100)
  return config
